"""Between rows and values, and the changes of a row that several operations make."""

import dataclasses
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select, update

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


def _ahead() -> Any:
    """Return what counts the waiting jobs that are claimed before one, given its priority, turn and sequence."""
    priority: Any = bindparam("own_priority")
    turn: Any = bindparam("own_turn")
    sequence: Any = bindparam("own_sequence")
    earlier = (jobs.c.turn < turn) | ((jobs.c.turn == turn) & (jobs.c.sequence < sequence))
    before = (jobs.c.priority > priority) | ((jobs.c.priority == priority) & earlier)
    return select(func.count()).where(jobs.c.status == "queued", before)


# Built once: they are asked with every poll, and putting them together takes longer than answering them.
BY_ID = select(jobs).where(jobs.c.id == bindparam("wanted"))
STATUS = select(jobs.c.status).where(jobs.c.id == bindparam("wanted"))
AHEAD = _ahead()


def next_turn(connection: Connection, owner: str, priority: int) -> int:
    """Return the turn of an owner's next job: after its own waiting ones, and not before everyone else's first.

    Jobs of equal priority are claimed by turn, so that owners alternate however many each has sent.
    """
    waiting = (jobs.c.status == "queued") & (jobs.c.priority == priority)
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
