"""An ingress and a worker of the version of the program that comes first on the path; see test_upgrade.py.

python -P one_version.py FOLDER

It reads commands, and answers each with a line: `ingress` starts one, and its address is the answer; `worker` starts
one whose jobs make no step; `go` lets them, and `once` until a segment is made; `rest` ends the worker. After
`motion` the model continues motion, which not every version can. It ends with its standard input.
"""

import contextlib
import sys
from pathlib import Path

from actors.api.settings import ServiceSettings
from tests.actors import small_spec
from tests.actors.api import serving


class Engine(serving.DecodingEngine):
    once = False

    async def generate(self, plan, **options):
        if self.once and self.requests:
            self.go.clear()
        return await super().generate(plan, **options)


def main(folder: Path) -> None:
    settings = ServiceSettings(
        database=str(folder / "jobs.sqlite"),
        storage=str(folder / "results"),
        model=serving.MODEL,
        chips={"denoise_high": 4, "denoise_low": 8},
    )
    (folder / "frames").mkdir(exist_ok=True)
    engine = Engine(folder / "frames")
    engine.go.clear()
    engine.decoded.release(1000)
    with contextlib.ExitStack() as ingress, contextlib.ExitStack() as worker:
        for line in sys.stdin:
            answer = ""
            match line.strip():
                case "ingress":
                    answer = ingress.enter_context(serving.serve(settings, engine.model))
                case "worker":
                    worker.enter_context(serving.working(settings, engine))
                case "go" | "once" as word:
                    engine.once = word == "once"
                    engine.go.set()
                case "motion":
                    engine.model = small_spec.MOTION_SPEC
                case "rest":
                    worker.close()
            print(answer, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
