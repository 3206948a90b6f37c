"""Jobs as workers see them: claim one, report, and end it exactly once."""

import dataclasses
import secrets
from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, func, insert, select, update

from actors.jobs.database import Database
from actors.jobs.errors import LeaseLost
from actors.jobs.rows import Keeping, doom, end, job_of
from actors.jobs.tables import files, jobs
from actors.jobs.values import CANCELLED, DEADLINE, LOST, Cost, Job, Lease, Progress

_STOPPED = {CANCELLED: "the job was cancelled", DEADLINE: "the job's deadline passed before it was done"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaseSettings:
    """How long a worker may be silent, and how often a job may lose its worker.

    lease_s  a claim ends this long after the last heartbeat: several of them, and longer than the database may pause
    losses   a job that has lost this many workers fails: it may be what kills them
    """

    lease_s: float = 30.0
    losses: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """What a heartbeat learns: until when the lease holds, and why the job is to stop, if it is."""

    expires_at: float
    stop_code: str | None


class WorkQueue:
    """The jobs to be done. Every method is one transaction, and safe between threads and processes.

    Methods that take a lease raise `LeaseLost` once the job was taken back: stop, and remove what was written.
    """

    def __init__(
        self,
        database: Database,
        settings: LeaseSettings = LeaseSettings(),
        keeping: Keeping = Keeping(),  # noqa: B008 (frozen)
    ) -> None:
        self._database = database
        self._settings = settings
        self._keeping = keeping

    def claim(self, worker: str, *, above: int | None = None) -> Lease | None:
        """Take the next job: of the highest priority, by turns of owners, then by age; None when none waits.

        above: only one of a higher priority than this

        Jobs whose lease has run out are taken back first.
        """
        with self._database.write() as connection:
            now = self._database.now(connection)
            self._take_back(connection, now)
            wanted = [jobs.c.status == "queued", jobs.c.deadline.is_(None) | (jobs.c.deadline > now)]
            if above is not None:
                wanted.append(jobs.c.priority > above)
            chosen = connection.execute(
                select(jobs.c.id)
                .where(*wanted)
                .order_by(jobs.c.priority.desc(), jobs.c.turn, jobs.c.sequence)
                .limit(1)
                .with_for_update(skip_locked=True)  # on PostgreSQL workers don't wait for one another
            ).scalar_one_or_none()
            if chosen is None:
                return None
            token, expires_at = secrets.token_hex(16), now + self._settings.lease_s
            row = connection.execute(
                update(jobs)
                .where(jobs.c.id == chosen)
                .values(
                    status="in_progress",
                    worker=worker,
                    lease_token=token,
                    lease_expires_at=expires_at,
                    attempts=jobs.c.attempts + 1,
                    started_at=func.coalesce(jobs.c.started_at, now),
                )
                .returning(jobs)
            ).one()
            return Lease(job=job_of(row), worker=worker, token=token, expires_at=expires_at)

    def heartbeat(self, lease: Lease, progress: Progress | None = None, cost: Cost | None = None) -> Orders:
        """Keep a job for another `lease_s`, and tell how far it is; when left out, that stays as it was."""
        values: dict[str, object] = {}
        if progress is not None:
            values["progress"] = dataclasses.asdict(progress)
        if cost is not None:
            values |= {"stage_seconds": cost.stage_seconds, "chip_seconds": cost.chip_seconds}
        with self._database.write() as connection:
            expires_at = self._database.now(connection) + self._settings.lease_s
            row = connection.execute(
                update(jobs)
                .where(jobs.c.id == lease.job.id, jobs.c.lease_token == lease.token)
                .values(lease_expires_at=expires_at, **values)
                .returning(jobs.c.stop_code)
            ).one_or_none()
        if row is None:
            raise _lost(lease)
        return Orders(expires_at=expires_at, stop_code=row.stop_code)

    def announce(self, lease: Lease, names: Iterable[str]) -> None:
        """Record names in storage before anything is written there, so that a crash leaves nothing behind.

        Names are to be of this attempt alone (`lease.job.attempts`): a worker that was thought lost then can't
        write over the results of the next.
        """
        with self._database.write() as connection:
            job = self._held(connection, lease)
            rows = [{"name": name, "job": job.id, "attempt": job.attempts} for name in names]
            connection.execute(insert(files), rows)

    def complete(self, lease: Lease, results: Mapping[str, str], cost: Cost | None = None) -> Job:
        """End a job with what was made: variant -> announced name. It ends as cancelled when it was to stop.

        Whatever it wrote besides is doomed.
        """
        with self._database.write() as connection:
            job = self._held(connection, lease)
            now = self._database.now(connection)
            if job.stop_code is not None:
                return self._stop(connection, job, now, cost)
            announced = set(connection.scalars(select(files.c.name).where(files.c.job == job.id)))
            if unknown := set(results.values()) - announced:
                raise ValueError(f"results of {job.id} that were never announced: {', '.join(sorted(unknown))}")
            return end(connection, job, now, self._keeping, results=dict(results), cost=cost)

    def fail(self, lease: Lease, code: str, message: str, cost: Cost | None = None) -> Job:
        """End a job that can't be made, with a reason for people; a job that was to stop says that instead."""
        with self._database.write() as connection:
            job = self._held(connection, lease)
            now = self._database.now(connection)
            if job.stop_code is not None:
                return self._stop(connection, job, now, cost)
            # PostgreSQL takes any text but this character.
            return end(connection, job, now, self._keeping, failure=(code, message.replace("\0", "")), cost=cost)

    def release(self, lease: Lease, cost: Cost | None = None) -> None:
        """Give a job back unfinished, when the worker is to end; it is next in its owner's turn."""
        with self._database.write() as connection:
            job = self._held(connection, lease)
            self._requeue(connection, job, self._database.now(connection), losses=job.losses, cost=cost)

    def take_back(self) -> list[str]:
        """Take back jobs whose worker is silent: into the queue, or to their end. Return their ids."""
        with self._database.write() as connection:
            return self._take_back(connection, self._database.now(connection))

    def stop_overdue(self) -> list[str]:
        """Fail waiting jobs whose deadline has passed, have running ones stopped. Return their ids."""
        with self._database.write() as connection:
            now = self._database.now(connection)
            overdue = connection.execute(
                select(jobs)
                .where(jobs.c.status.in_(("queued", "in_progress")), jobs.c.deadline <= now, jobs.c.stop_code.is_(None))
                .with_for_update(skip_locked=True)
            ).all()
            for job in map(job_of, overdue):
                if job.status == "queued":
                    end(connection, job, now, self._keeping, failure=(DEADLINE, _STOPPED[DEADLINE]))
                else:
                    connection.execute(update(jobs).where(jobs.c.id == job.id).values(stop_code=DEADLINE))
            return [row.id for row in overdue]

    def _held(self, connection: Connection, lease: Lease) -> Job:
        query = select(jobs).where(jobs.c.id == lease.job.id, jobs.c.lease_token == lease.token)
        row = connection.execute(query.with_for_update()).one_or_none()
        if row is None:
            raise _lost(lease)
        return job_of(row)

    def _stop(self, connection: Connection, job: Job, now: float, cost: Cost | None) -> Job:
        assert job.stop_code is not None
        return end(connection, job, now, self._keeping, failure=(job.stop_code, _STOPPED[job.stop_code]), cost=cost)

    def _take_back(self, connection: Connection, now: float) -> list[str]:
        silent = connection.execute(
            select(jobs)
            .where(jobs.c.status == "in_progress", jobs.c.lease_expires_at <= now)
            .with_for_update(skip_locked=True)
        ).all()
        for job in map(job_of, silent):
            losses = job.losses + 1
            if job.stop_code is not None:
                self._stop(connection, job, now, None)
            elif losses >= self._settings.losses:
                message = f"given up after {losses} workers were lost, the last one {job.worker}"
                end(connection, job, now, self._keeping, failure=(LOST, message))
            else:
                self._requeue(connection, job, now, losses=losses)
        return [row.id for row in silent]

    def _requeue(self, connection: Connection, job: Job, now: float, *, losses: int, cost: Cost | None = None) -> None:
        if job.stop_code is not None:
            self._stop(connection, job, now, cost)
            return
        used = cost or job.cost
        connection.execute(
            update(jobs)
            .where(jobs.c.id == job.id)
            .values(
                status="queued",
                worker=None,
                lease_token=None,
                lease_expires_at=None,
                losses=losses,
                stage_seconds=used.stage_seconds,
                chip_seconds=used.chip_seconds,
            )
        )
        doom(connection, job.id, now + self._keeping.abandoned_s, keep=[job.input_image or ""])


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(f"{lease.job.id} isn't {lease.worker}'s any more: its lease ran out, or the job has ended")
