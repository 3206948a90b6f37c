"""The part of jobs that is read for clients that watch videos being decoded. It is small, because it is read often."""

import dataclasses
from collections.abc import Iterable

from sqlalchemy import func, select, update

from actors.jobs.database import Database
from actors.jobs.tables import Job, StoredFragment
from actors.jobs.values import Status

_UNENDED: tuple[Status, ...] = ("queued", "in_progress")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """The part of a job that its watchers need; the fields are those of `Job`."""

    status: Status
    attempts: int
    fragments: int | None

    @property
    def has_ended(self) -> bool:
        """Whether the job has completed or failed."""
        return self.status not in _UNENDED


def begin_to_watch(database: Database, job: str) -> None:
    """Have the job's worker store fragments from now on, unless it does already or the job has ended."""
    condition = (Job.id == job) & Job.status.in_(_UNENDED) & Job.watched_at.is_(None)
    with database.write() as session:
        session.execute(update(Job).where(condition).values(watched_at=database.now(session)))


def look_at_watched(database: Database, jobs: Iterable[str]) -> dict[str, Watched]:
    """Return the jobs with the given ids, except those that don't exist."""
    columns = select(Job.id, Job.status, Job.attempts, Job.fragments)
    with database.read() as session:
        rows = session.execute(columns.where(Job.id.in_(list(jobs)), Job.deleted_at.is_(None))).all()
    return {id_: Watched(status=status, attempts=attempts, fragments=count) for id_, status, attempts, count in rows}


def list_fragments(database: Database, job: str) -> list[StoredFragment]:
    """Return the stored fragments of the latest run, in order, of the latest attempt that has stored any."""
    stored = select(StoredFragment).where(StoredFragment.job == job)
    attempt = select(func.max(StoredFragment.attempt)).where(StoredFragment.job == job)
    with database.read() as session:
        fragments = session.scalars(stored.where(StoredFragment.attempt == attempt.scalar_subquery())).all()
    latest = max((fragment.run for fragment in fragments), default=0)
    return sorted((part for part in fragments if part.run == latest), key=lambda part: part.number)
