"""Webhooks to call when a job ends. They are recorded with the job, so that each is called at least once.

Every function is one transaction; any number of processes may call them.
"""

from collections.abc import Collection

from sqlalchemy import delete, func, select, update

from actors.jobs.database import Database
from actors.jobs.tables import Delivery, Job

_CLAIM_S = 120.0  # How long a process has to make its call; then another may claim the delivery.


def claim(database: Database, but: Collection[str] = ()) -> Delivery | None:
    """Claim the delivery that has been due longest, but none of an owner in `but`, and count the attempt.

    Nobody else can claim it for two minutes.
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
            due.attempts, due.due_at = due.attempts + 1, now + _CLAIM_S
        return due


def remove(database: Database, delivery: Delivery) -> None:
    """Forget a delivery that was made or given up."""
    with database.write() as session:
        session.execute(delete(Delivery).where(Delivery.job_id == delivery.job_id))


def postpone(database: Database, delivery: Delivery, after_s: float) -> None:
    with database.write() as session:
        due_at = database.now(session) + after_s
        session.execute(update(Delivery).where(Delivery.job_id == delivery.job_id).values(due_at=due_at))


def count_waiting(database: Database) -> int:
    """Return how many ended jobs still have a webhook to call."""
    with database.read() as session:
        return session.scalar(select(func.count()).where(Delivery.due_at.is_not(None))) or 0
