"""Webhooks to call at a job's end, recorded with the job: a crash forgets none, each is called at least once.

Every function is one transaction; any number of processes may take part.
"""

from collections.abc import Collection

from sqlalchemy import delete, func, select, update

from actors.jobs.database import Database
from actors.jobs.tables import Delivery, Job

_HELD_S = 120.0  # that one process has to try; another may then


def claim(database: Database, but: Collection[str] = ()) -> Delivery | None:
    """Take the one that is due longest, its `attempts` with this one; nobody else is given it for two minutes.

    but  owners whose turn it isn't
    """
    with database.write() as session:
        now = database.now(session)
        due = session.scalars(
            select(Delivery)
            .join(Job, Job.id == Delivery.job_id)
            .where(Delivery.due_at <= now, Job.owner.not_in(but))
            .order_by(Delivery.due_at)
            .limit(1)
            .with_for_update(of=Delivery, skip_locked=True)
        ).one_or_none()
        if due is not None:
            due.attempts, due.due_at = due.attempts + 1, now + _HELD_S
        return due


def done(database: Database, delivery: Delivery) -> None:
    """Record that it was called, or is given up."""
    with database.write() as session:
        session.execute(delete(Delivery).where(Delivery.job_id == delivery.job_id))


def again(database: Database, delivery: Delivery, after_s: float) -> None:
    """Have it tried again, later."""
    with database.write() as session:
        due_at = database.now(session) + after_s
        session.execute(update(Delivery).where(Delivery.job_id == delivery.job_id).values(due_at=due_at))


def waiting(database: Database) -> int:
    """Return how many jobs have ended whose webhook is to be called."""
    with database.read() as session:
        return session.scalar(select(func.count()).where(Delivery.due_at.is_not(None))) or 0
