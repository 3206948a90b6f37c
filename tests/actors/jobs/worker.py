"""A worker process of test_processes.py: claims jobs until told to end, and notes what it did.

python -m tests.actors.jobs.worker ADDRESS NAME FOLDER

Every completion is one file in FOLDER, named by job and made with O_EXCL before it is recorded in the database; what
the database then accepts is one line in FOLDER/NAME.
"""

import sys
import time
from pathlib import Path

from actors.jobs.database import Database
from actors.jobs.errors import LeaseLost
from actors.jobs.values import Progress
from actors.jobs.work import LeaseSettings, WorkQueue

LEASE_S = 2.0


def main(address: str, name: str, folder: Path) -> None:
    work = WorkQueue(Database(address), LeaseSettings(lease_s=LEASE_S, losses=1000))
    done = open(folder / f"{name}.done", "a", buffering=1)  # noqa: SIM115 (closed by whatever ends this process)
    print("ready", flush=True)
    while not (folder / "stop").exists():
        lease = work.claim(name)
        if lease is None:
            time.sleep(0.02)
            continue
        result = f"{lease.job.id}/{lease.job.attempts}"
        try:
            work.announce(lease, [result])
            work.heartbeat(lease, Progress(stage="denoise_high", step=1, steps=1, percent=50.0))
            work.complete(lease, {"video": result})
        except LeaseLost:
            continue
        done.write(lease.job.id + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
