"""Whom to tell of a job's end: recorded with the job, so that a crash forgets nobody. Told at least once."""

import dataclasses

from sqlalchemy import delete, func, select, update

from actors.jobs.database import Database
from actors.jobs.rows import job_of
from actors.jobs.tables import deliveries, jobs
from actors.jobs.values import Job

_HELD_S = 120.0  # that one process has to try; another may then


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """A job that has ended and whose webhook wasn't told; `attempts` counts this one."""

    job: Job
    url: str
    attempts: int


class Deliveries:
    """The webhooks that are to be called. Every method is one transaction; any number of processes may take part."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self) -> Delivery | None:
        """Take the one that is due longest; nobody else is given it for two minutes."""
        with self._database.write() as connection:
            now = self._database.now(connection)
            due = connection.execute(
                select(deliveries)
                .where(deliveries.c.due_at <= now)
                .order_by(deliveries.c.due_at)
                .limit(1)
                .with_for_update(skip_locked=True)
            ).one_or_none()
            if due is None:
                return None
            job = connection.execute(select(jobs).where(jobs.c.id == due.job)).one_or_none()
            if job is None:  # deleted meanwhile
                connection.execute(delete(deliveries).where(deliveries.c.job == due.job))
                return None
            attempts = due.attempts + 1
            connection.execute(
                update(deliveries).where(deliveries.c.job == due.job).values(attempts=attempts, due_at=now + _HELD_S)
            )
            return Delivery(job=job_of(job), url=due.url, attempts=attempts)

    def done(self, delivery: Delivery) -> None:
        """Record that it was told, or that nobody tries any more."""
        with self._database.write() as connection:
            connection.execute(delete(deliveries).where(deliveries.c.job == delivery.job.id))

    def again(self, delivery: Delivery, after_s: float) -> None:
        """Have it tried again, later."""
        with self._database.write() as connection:
            due_at = self._database.now(connection) + after_s
            connection.execute(update(deliveries).where(deliveries.c.job == delivery.job.id).values(due_at=due_at))

    def waiting(self) -> int:
        """Return how many jobs have ended whose webhook wasn't told."""
        with self._database.read() as connection:
            return connection.scalar(select(func.count()).where(deliveries.c.due_at.is_not(None))) or 0
