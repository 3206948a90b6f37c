"""Usage by API key: counted when a job ends, and kept after the job is gone; and what its files take now."""

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from actors.jobs.database import Database
from actors.jobs.tables import File, Job, Usage

_SUM_EVERY_S = 60.0


def count(session: Session, job: Job, now: float) -> None:
    """Add a job that has just ended to its owner's usage."""
    done = job.status == "completed"
    day = datetime.datetime.fromtimestamp(now, datetime.UTC).date().isoformat()
    row = {
        "videos": int(done),
        "failed": int(not done),
        "chip_seconds": job.chip_seconds,
        "dollars": job.dollars,
    }
    dialect: Any = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    new = dialect.insert(Usage).values(owner=job.owner, day=day, **row)
    sums = {name: getattr(Usage, name) + getattr(new.excluded, name) for name in row}
    session.execute(new.on_conflict_do_update(index_elements=["owner", "day"], set_=sums))


def read_usage(
    database: Database, owner: str | None = None, *, first: str = "", last: str = "9999"
) -> dict[str, Usage]:
    """Return the usage of each key over a range of days, by the key's id.

    Args:
        owner: The id of the only key that is wanted; None for all keys.
        first: The first day that counts, such as "2026-11-25", in UTC.
        last: The last day that counts.
    """
    sums = [func.sum(getattr(Usage, name)).label(name) for name in ("videos", "failed", "chip_seconds", "dollars")]
    query = select(Usage.owner, *sums).where(Usage.day.between(first, last)).group_by(Usage.owner)
    if owner is not None:
        query = query.where(Usage.owner == owner)
    with database.read() as session:
        return {row.owner: Usage(day="", **row._asdict()) for row in session.execute(query)}


def sum_stored(database: Database) -> dict[str, int]:
    """Return how many bytes the files of each key's jobs take in storage, by the key's id."""
    query = select(File.owner, func.sum(File.size)).where(File.owner.is_not(None)).group_by(File.owner)
    with database.read() as session:
        return {key: int(size) for key, size in session.execute(query) if key is not None}


class StoredBytes:
    """What the files of each key's jobs take, for pages that look every few seconds: a sum reads a row a file."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        """Sum nothing yet; `clock` returns seconds."""
        self._database, self._clock = database, clock
        self._lock = threading.Lock()
        self._sums: dict[str, int] = {}
        self._summed_at: float | None = None

    def read(self) -> dict[str, int]:
        """Return the bytes by the key's id. They are up to a minute old."""
        with self._lock:
            now = self._clock()
            if self._summed_at is None or now - self._summed_at >= _SUM_EVERY_S:
                self._sums, self._summed_at = sum_stored(self._database), now
            return self._sums
