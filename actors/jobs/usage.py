"""What each key has used: counted at the end of every job, and kept when the jobs are gone."""

import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from actors.jobs.database import Database
from actors.jobs.tables import Job, Usage


def count(session: Session, job: Job, now: float) -> None:
    """Add a job that has just ended."""
    made = job.status == "completed"
    day = datetime.datetime.fromtimestamp(now, datetime.UTC).date().isoformat()
    row = {"videos": int(made), "failed": int(not made), "chip_seconds": job.chip_seconds, "dollars": job.dollars}
    dialect: Any = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    new = dialect.insert(Usage).values(owner=job.owner, day=day, **row)
    more = {name: getattr(Usage, name) + getattr(new.excluded, name) for name in row}
    session.execute(new.on_conflict_do_update(index_elements=["owner", "day"], set_=more))


def read_usage(
    database: Database, owner: str | None = None, *, first: str = "", last: str = "9999"
) -> dict[str, Usage]:
    """Return what each key (or one) has used from a day to another, both included, by the key's id.

    first, last  days such as "2026-11-25", UTC
    """
    sums = [func.sum(getattr(Usage, name)).label(name) for name in ("videos", "failed", "chip_seconds", "dollars")]
    query = select(Usage.owner, *sums).where(Usage.day.between(first, last)).group_by(Usage.owner)
    if owner is not None:
        query = query.where(Usage.owner == owner)
    with database.read() as session:
        return {row.owner: Usage(day="", **row._asdict()) for row in session.execute(query)}
