"""What an operator wants to know of the jobs: what waits and runs, what has failed, and what videos cost.

No row holds a prompt.
"""

import dataclasses
from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session, load_only

from actors.jobs.admission import QUEUED
from actors.jobs.database import Database
from actors.jobs.tables import Job

DAY_S = 86400.0
LATEST = 5000  # Only so many of the newest jobs are looked at for what has ended, so that this stays quick.
MAX_RUNNING = 500
MAX_FAILED = 50
RUNNING = load_only(Job.id, Job.owner, Job.attempts, Job.worker, Job.progress, Job.started_at, raiseload=True)
FAILED = load_only(Job.id, Job.owner, Job.attempts, Job.error_code, Job.error_message, Job.ended_at, raiseload=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """The jobs of a key for one model, of one priority, that wait or run."""

    key: str
    model: str | None
    priority: int
    waiting: int = 0
    running: int = 0
    segments: int = 0  # Segments that those that wait have left.
    oldest_seconds: float = 0.0  # How long the oldest of those that wait has waited; 0 if none does.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overview:
    """The state of all jobs, and of those that ended within a day."""

    now: float  # Unix seconds by the database's clock.
    queues: list[Queue]
    running: Sequence[Job]  # With the columns of `RUNNING`.
    failures: dict[str, int]  # How many failed, by error code.
    failed: Sequence[Job]  # The latest of them, with the columns of `FAILED`.
    completed: int
    seconds: float | None  # How long those took on average, from their first start.
    chip_seconds: float  # What all that ended computed, in seconds of one chip.
    dollars: float  # What that cost, where prices are known.


def read_overview(database: Database) -> Overview:
    """Return the state of all jobs, of one moment."""
    with database.read() as session:
        now = database.now(session)
        latest = (
            select(
                Job.sequence, Job.status, Job.error_code, Job.started_at, Job.ended_at, Job.chip_seconds, Job.dollars
            )
            .order_by(Job.sequence.desc())
            .limit(LATEST)
            .subquery()
        )
        recent = latest.c.ended_at >= now - DAY_S
        by_code = (
            select(latest.c.error_code, func.count()).where(recent, latest.c.status == "failed").group_by("error_code")
        )
        sums = select(func.sum(latest.c.chip_seconds), func.sum(latest.c.dollars)).where(recent)
        running = select(Job).where(Job.status == "in_progress").order_by(Job.sequence).limit(MAX_RUNNING)
        failed = select(latest.c.sequence).where(recent, latest.c.status == "failed")
        last_failed = select(Job).where(Job.sequence.in_(failed)).order_by(Job.ended_at.desc()).limit(MAX_FAILED)
        took = func.avg(latest.c.ended_at - latest.c.started_at)
        completed, seconds = session.execute(
            select(func.count(), took).select_from(latest).where(recent, latest.c.status == "completed")
        ).one()
        chip_seconds, dollars = session.execute(sums).one()
        return Overview(
            now=now,
            queues=_read_queues(session, now),
            running=session.scalars(running.options(RUNNING)).all(),
            failures={code or "": count for code, count in session.execute(by_code)},
            failed=session.scalars(last_failed.options(FAILED)).all(),
            completed=completed,
            seconds=seconds,
            chip_seconds=chip_seconds or 0.0,
            dollars=dollars or 0.0,
        )


def _read_queues(session: Session, now: float) -> list[Queue]:
    key = (Job.owner, Job.model, Job.priority)
    waiting = select(*key, func.count(), func.sum(Job.segments_left), func.min(Job.created_at))
    queues = {
        (owner, model, priority): Queue(
            key=owner,
            model=model,
            priority=priority,
            waiting=count,
            segments=segments,
            oldest_seconds=round(max(0.0, now - oldest), 1),
        )
        for owner, model, priority, count, segments, oldest in session.execute(
            waiting.where(Job.status == QUEUED).group_by(*key)
        )
    }
    running = select(*key, func.count()).where(Job.status == "in_progress").group_by(*key)
    for owner, model, priority, count in session.execute(running):
        queue = queues.get((owner, model, priority)) or Queue(key=owner, model=model, priority=priority)
        queues[owner, model, priority] = dataclasses.replace(queue, running=count)
    return sorted(queues.values(), key=lambda queue: (-queue.priority, -queue.waiting, queue.key))
