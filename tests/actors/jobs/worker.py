"""A worker process of test_processes.py: claims jobs until told to end, and notes what it did.

python -m tests.actors.jobs.worker ADDRESS NAME FOLDER LEASE_S

What the database accepts as completed by it is a line in FOLDER/NAME.done.
"""

import sys
import time
from pathlib import Path

from actors.jobs.database import Database
from actors.jobs.errors import LeaseLost
from actors.jobs.values import Progress
from actors.jobs.work import WorkQueue
from actors.reliability import ReliabilitySettings


def main(address: str, name: str, folder: Path, lease_s: float) -> None:
    work = WorkQueue(Database(address), reliability=ReliabilitySettings(lease_s=lease_s, worker_attempts=1000))
    done = open(folder / f"{name}.done", "a", buffering=1)  # noqa: SIM115 (closed by whatever ends this process)
    print("ready", flush=True)
    while not (folder / "stop").exists():
        leased = work.claim(name)
        if leased is None:
            time.sleep(0.02)
            continue
        result = f"{leased.id}/{leased.attempts}"
        try:
            work.announce(leased, {result: 1})
            leased.progress = Progress(stage="denoise_high", step=1, steps=1, percent=50.0)
            work.renew_lease(leased)
            time.sleep(0.005)  # A job takes time, in which others use the database.
            work.complete(leased, {"video": result})
        except LeaseLost:
            continue
        done.write(leased.id + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
