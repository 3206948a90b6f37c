"""Between rows and values, and the changes of a row that several operations make."""

import dataclasses
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, bindparam, case, func, literal_column, select, update

from actors.jobs.tables import deliveries, files, jobs
from actors.jobs.values import Cost, Job, Progress

_FIELDS = [field.name for field in dataclasses.fields(Job)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keeping:
    """How long things are kept, in seconds.

    ended_s      a job and its results after it has ended
    abandoned_s  a file that nobody may need any more: an upload that became no job, or what a lost worker was writing.
                 Long, since a worker that hangs may still write what it has announced.
    """

    ended_s: float = 7 * 86400
    abandoned_s: float = 3600


def job_of(row: Row[Any]) -> Job:
    """Return a row of `jobs` as a value."""
    found = row._mapping
    progress = None if found["progress"] is None else Progress(**found["progress"])
    return Job(**{name: found[name] for name in _FIELDS} | {"progress": progress})


# Written out: with a parameter SQLite looks each row of the index of waiting jobs up in the table.
_WAITS: Any = literal_column("'queued'")


def _position() -> Any:
    """Return what counts the waiting jobs that are claimed before one; null when it doesn't wait.

    Three ranges of the index of waiting jobs, so that those behind aren't looked at.
    """
    other = jobs.alias("other")
    same = other.c.priority == jobs.c.priority
    ranges = (
        [other.c.priority > jobs.c.priority],
        [same, other.c.turn < jobs.c.turn],
        [same, other.c.turn == jobs.c.turn, other.c.sequence < jobs.c.sequence],
    )
    waiting = other.c.status == _WAITS
    counts = [select(func.count()).select_from(other).where(waiting, *range_).correlate(jobs) for range_ in ranges]
    first, second, third = (count.scalar_subquery() for count in counts)
    return case((jobs.c.status == _WAITS, first + second + third)).label("position")


# Built once: they are asked with every poll, and putting them together takes longer than answering them.
BY_ID = select(jobs).where(jobs.c.id == bindparam("wanted"))
POSITION = select(_position()).where(jobs.c.id == bindparam("wanted"))
WAITING = select(func.count()).where(jobs.c.status == _WAITS)
LOOK = select(jobs, _position()).where(jobs.c.id == bindparam("wanted"))


def next_turn(connection: Connection, owner: str, priority: int) -> int:
    """Return the turn of an owner's next job: after its own waiting ones, and not before everyone else's first.

    Jobs of equal priority are claimed by turn, so that owners alternate however many each has sent.
    """
    waiting = (jobs.c.status == _WAITS) & (jobs.c.priority == priority)
    last_own = connection.scalar(select(func.max(jobs.c.turn)).where(waiting, jobs.c.owner == owner))
    if last_own is not None:
        return int(last_own) + 1
    # One that came back into the queue has an old turn: who follows it would pass all that came in between.
    return int(connection.scalar(select(func.min(jobs.c.turn)).where(waiting, jobs.c.attempts == 0)) or 0)


def end(
    connection: Connection,
    job: Job,
    now: float,
    keeping: Keeping,
    *,
    failure: tuple[str, str] | None = None,
    results: dict[str, str] | None = None,
    cost: Cost | None = None,
) -> Job:
    """Record the end of a job whose row is locked; what it wrote and isn't a result is doomed."""
    code, message = failure or (None, None)
    used = cost or job.cost
    progress = job.progress
    if failure is None:
        progress = dataclasses.replace(progress or Progress(stage="decoder"), percent=100.0, eta_s=None)
    row = connection.execute(
        update(jobs)
        .where(jobs.c.id == job.id)
        .values(
            status="completed" if failure is None else "failed",
            error_code=code,
            error_message=message,
            results=results or {},
            progress=None if progress is None else dataclasses.asdict(progress),
            stage_seconds=used.stage_seconds,
            chip_seconds=used.chip_seconds,
            lease_token=None,
            lease_expires_at=None,
            ended_at=now,
            expires_at=now + keeping.ended_s,
        )
        .returning(jobs)
    ).one()
    connection.execute(update(deliveries).where(deliveries.c.job == job.id).values(due_at=now))
    kept = {*(results or {}).values(), job.input_image or ""}
    doom(connection, job.id, now + (0 if failure is None else keeping.abandoned_s), keep=kept)
    return job_of(row)


def doom(connection: Connection, job: str, when: float, keep: Collection[str] = ()) -> None:
    """Have the files of a job removed at `when`, those in `keep` excepted; what is doomed already stays so."""
    connection.execute(
        update(files)
        .where(files.c.job == job, files.c.name.not_in(keep), files.c.doomed_at.is_(None))
        .values(doomed_at=when)
    )
