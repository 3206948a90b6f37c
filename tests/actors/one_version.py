"""An ingress and a worker of the version of the program that comes first on the path; see test_upgrade.py.

python -P one_version.py FOLDER

It reads commands, and answers each with a line: `ingress` starts one, and its address is the answer; `worker` starts
one whose jobs make no step; `go` lets them; `rest` ends the worker. It ends with its standard input.
"""

import contextlib
import sys
from pathlib import Path

from actors.api.settings import ServiceSettings
from tests.actors.api import serving


def main(folder: Path) -> None:
    settings = ServiceSettings(
        database=str(folder / "jobs.sqlite"),
        storage=str(folder / "results"),
        model=serving.MODEL,
        chips={"denoise_high": 4, "denoise_low": 8},
    )
    (folder / "frames").mkdir(exist_ok=True)
    engine = serving.DecodingEngine(folder / "frames")
    engine.go.clear()
    engine.decoded.release(1000)
    with contextlib.ExitStack() as ingress, contextlib.ExitStack() as worker:
        for line in sys.stdin:
            answer = ""
            match line.strip():
                case "ingress":
                    answer = ingress.enter_context(serving.serve(settings))
                case "worker":
                    worker.enter_context(serving.working(settings, engine))
                case "go":
                    engine.go.set()
                case "rest":
                    worker.close()
            print(answer, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
