"""Jobs as workers see them: claim one, report, and end it exactly once."""

import secrets
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session, aliased

from actors.jobs.database import Database
from actors.jobs.ending import STOPPED, end, expire_files
from actors.jobs.errors import CommitUncertain, LeaseLost
from actors.jobs.tables import ApiKey, File, Job
from actors.jobs.values import DEADLINE, LOST, JobSettings, storable

_RUNNING = aliased(Job)
_OF_A_KEY = (
    select(func.count())
    .select_from(_RUNNING)
    .where(_RUNNING.status == "in_progress", _RUNNING.owner == ApiKey.id)
    .correlate(ApiKey)
    .scalar_subquery()
)
_AT_THEIR_LIMIT = select(ApiKey.id).where(ApiKey.running.is_not(None), ApiKey.running <= _OF_A_KEY)


class WorkQueue:
    """The jobs to be done. Every method is one transaction, and safe between threads and processes.

    A job that was claimed is its worker's until `lease_expires_at`, or longer if that is renewed; each claim has a new
    `lease_token`. Methods that take a claimed job record its `progress` and what it has cost, as its worker has
    set them. They raise `LeaseLost` once it was taken back: stop, and remove what was written.
    """

    def __init__(self, database: Database, settings: JobSettings = JobSettings()) -> None:  # noqa: B008 (frozen)
        self._database, self._settings = database, settings

    def claim(self, worker: str, *, above: int | None = None, model: str | None = None) -> Job | None:
        """Take the next job: of the highest priority, round-robin over owners, then by age; None when none waits.

        above: only one of a higher priority than this
        model: only one that was accepted for this model; those of another wait for a worker that has it

        None of a key that has as many running as it may. Jobs whose lease has run out are taken back first.
        """
        token = secrets.token_hex(16)
        try:
            return self._claim(worker, token, above, model)
        except CommitUncertain:  # it may be this worker's, and nobody else would have it made
            with self._database.read() as session:
                return session.scalars(select(Job).where(Job.lease_token == token)).one_or_none()

    def _claim(self, worker: str, token: str, above: int | None, model: str | None) -> Job | None:
        with self._database.write() as session:
            now = self._database.now(session)
            self._requeue_lost(session, now)
            wanted: list[ColumnElement[bool]] = [Job.status == "queued", Job.deadline.is_(None) | (Job.deadline > now)]
            if above is not None:
                wanted.append(Job.priority > above)
            if model is not None:
                wanted.append((Job.model == model) | Job.model.is_(None))
            job = self._next(session, wanted, model)
            if job is None:
                return None
            job.status, job.worker, job.attempts = "in_progress", worker, job.attempts + 1
            job.lease_token, job.lease_expires_at = token, now + self._settings.lease_s
            if job.started_at is None:
                job.started_at = now
            return job

    def heartbeat(self, claimed: Job) -> str | None:
        """Renew a lease for another `lease_s`; return why the job is to stop (its `stop_code`), None when it is not."""
        with self._database.write() as session:
            job = self._held(session, claimed)
            job.lease_expires_at = self._database.now(session) + self._settings.lease_s
            return job.stop_code

    def announce(self, claimed: Job, names: Iterable[str]) -> None:
        """Record names in storage before anything is written there, so that a crash leaves nothing behind.

        Names are to be of this attempt alone (`attempts`): a worker that was thought lost then can't
        write over the results of the next.
        """
        with self._database.write() as session:
            job = self._held(session, claimed)
            for name in names:  # of a commit whose answer was lost, they are there already
                session.merge(File(name=name, job=job.id, attempt=job.attempts))

    def complete(self, claimed: Job, results: Mapping[str, str], warnings: Sequence[str] = ()) -> Job:
        """End a job with what was made: variant -> announced name. It ends as cancelled when it was to stop.

        Whatever it wrote besides is to be deleted.
        """
        with self._database.write() as session:
            job, now = self._held(session, claimed), self._database.now(session)
            announced = set(session.scalars(select(File.name).where(File.job == job.id)))
            if unknown := set(results.values()) - announced:
                raise ValueError(f"results of {job.id} that were never announced: {', '.join(sorted(unknown))}")
            texts = [storable(warning) for warning in warnings]
            return end(session, job, now, self._settings, results=dict(results), warnings=texts)

    def fail(self, claimed: Job, code: str, message: str) -> Job:
        """End a job that can't be made, with a reason for people; a job that was to stop says that instead."""
        with self._database.write() as session:
            job, now = self._held(session, claimed), self._database.now(session)
            return end(session, job, now, self._settings, failure=(code, storable(message)))

    def release(self, claimed: Job) -> None:
        """Give a job back unfinished, when the worker is to end; it keeps its round."""
        with self._database.write() as session:
            self._requeue(session, self._held(session, claimed), self._database.now(session))

    def requeue_lost(self) -> list[str]:
        """Take back jobs whose worker is silent: into the queue, or to their end. Return their ids."""
        with self._database.write() as session:
            return self._requeue_lost(session, self._database.now(session))

    def stop_overdue(self) -> list[str]:
        """Fail waiting jobs whose deadline has passed, have running ones stopped. Return their ids."""
        with self._database.write() as session:
            now = self._database.now(session)
            overdue = session.scalars(
                select(Job)
                .where(Job.status.in_(("queued", "in_progress")), Job.deadline <= now, Job.stop_code.is_(None))
                .order_by(Job.owner)
                .with_for_update(skip_locked=True)
            ).all()
            for job in overdue:
                if job.status == "queued":
                    end(session, job, now, self._settings, failure=STOPPED[DEADLINE])
                else:
                    job.stop_code = DEADLINE
            return [job.id for job in overdue]

    def _next(self, session: Session, wanted: list[ColumnElement[bool]], model: str | None) -> Job | None:
        """Return the first job that may run, locked."""
        query = (
            select(Job)
            .where(*wanted, Job.owner.not_in(_AT_THEIR_LIMIT))
            .order_by(Job.priority.desc(), Job.round, Job.sequence)
            .limit(1)
            .with_for_update(skip_locked=True)  # on PostgreSQL workers don't wait for one another
        )
        refused: set[str] = set()
        while (job := session.scalars(query.where(Job.owner.not_in(refused))).one_or_none()) is not None:
            if job.model is None:  # accepted by an earlier version while this one came up
                job.model = str(job.request.get("model", ""))
            if model not in (None, job.model):
                continue  # the query doesn't find it again
            if self._may_run(session, job.owner):
                return job
            refused.add(job.owner)
        return None

    def _may_run(self, session: Session, owner: str) -> bool:
        """Whether a key may have one more job running. Its row stays locked then, so that another worker counts it.

        The row of a key that may not is let go of: workers come to the keys in different orders, and would wait for
        each other's.
        """
        limited = select(ApiKey.running).where(ApiKey.id == owner, ApiKey.running.is_not(None)).with_for_update()
        with session.begin_nested() as locked:
            most = session.scalar(limited)
            running = select(func.count()).select_from(Job).where(Job.status == "in_progress", Job.owner == owner)
            if most is None or (session.scalar(running) or 0) < most:
                return True
            locked.rollback()
        return False

    def _held(self, session: Session, claimed: Job) -> Job:
        """Return a claimed job, locked, with what its worker has noted; raises `LeaseLost`."""
        mine = (Job.id == claimed.id) & (Job.status == "in_progress") & (Job.lease_token == claimed.lease_token)
        job = session.scalars(select(Job).where(mine).with_for_update()).one_or_none()
        if job is None:
            raise LeaseLost(f"{claimed.id} isn't {claimed.worker}'s any more: its lease ran out, or the job has ended")
        job.progress, job.stage_seconds = claimed.progress, claimed.stage_seconds
        job.chip_seconds, job.dollars = claimed.chip_seconds, claimed.dollars
        return job

    def _requeue_lost(self, session: Session, now: float) -> list[str]:
        silent = session.scalars(
            select(Job)
            .where(Job.status == "in_progress", Job.lease_expires_at <= now)
            .order_by(Job.owner)  # as others do: their usage is counted, and is locked in this order
            .with_for_update(skip_locked=True)
        ).all()
        for job in silent:
            job.losses += 1
            if job.losses >= self._settings.losses:
                message = f"given up after {job.losses} workers were lost, the last one {job.worker}"
                end(session, job, now, self._settings, failure=(LOST, message))
            else:
                self._requeue(session, job, now)
        return [job.id for job in silent]

    def _requeue(self, session: Session, job: Job, now: float) -> None:
        if job.stop_code is not None:
            end(session, job, now, self._settings)
            return
        job.status = "queued"
        job.worker = job.lease_token = job.lease_expires_at = None
        expire_files(session, job.id, now + self._settings.abandoned_s, keep=job.inputs)
