"""The workers' view of jobs: claim a job, report its progress, and end it exactly once."""

import secrets
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session, aliased

from actors.jobs.database import Database
from actors.jobs.ending import STOPPED, end, expire_files
from actors.jobs.errors import CommitUncertain, LeaseLost
from actors.jobs.tables import ApiKey, File, Job, StoredFragment
from actors.jobs.values import DEADLINE, LOST, JobSettings, make_storable
from actors.reliability import ReliabilitySettings

_RUNNING = aliased(Job)
_COUNT_OF_KEY = (
    select(func.count())
    .select_from(_RUNNING)
    .where(_RUNNING.status == "in_progress", _RUNNING.owner == ApiKey.id)
    .correlate(ApiKey)
    .scalar_subquery()
)
_OWNERS_AT_LIMIT = select(ApiKey.id).where(ApiKey.running.is_not(None), ApiKey.running <= _COUNT_OF_KEY)


class WorkQueue:
    """The jobs that wait or run. Every method is one transaction, and safe between threads and processes.

    A claimed job belongs to its worker until `lease_expires_at`, which the worker renews; each claim has a new
    `lease_token`. Methods that take a claimed job also record its `progress` and cost as the worker has set them, and
    set its `watched_at`, which clients change. They raise `LeaseLost` once the job was taken back: the worker must
    stop, and remove what it has written.
    """

    def __init__(
        self,
        database: Database,
        settings: JobSettings = JobSettings(),  # noqa: B008 (frozen)
        reliability: ReliabilitySettings = ReliabilitySettings(),  # noqa: B008 (frozen)
    ) -> None:
        self._database, self._settings = database, settings
        self._lease_s, self._worker_attempts = reliability.lease_s, reliability.worker_attempts

    def claim(self, worker: str, *, above: int | None = None, model: str | None = None) -> Job | None:
        """Claim the next job: by priority, then round-robin over owners, then by age. Return None if there is none.

        Keys that have as many jobs running as they may are skipped. Jobs whose lease has run out are requeued first.

        Args:
            worker: The name of the worker that claims.
            above: Claim only a job of a higher priority than this.
            model: Claim only a job that was accepted for this model. Others wait for a worker that has theirs.
        """
        token = secrets.token_hex(16)
        try:
            return self._claim(worker, token, above, model)
        except CommitUncertain:  # The claim may have succeeded, and no other worker could then make the video.
            with self._database.read() as session:
                return session.scalars(select(Job).where(Job.lease_token == token)).one_or_none()

    def _claim(self, worker: str, token: str, above: int | None, model: str | None) -> Job | None:
        with self._database.write() as session:
            now = self._database.now(session)
            self._requeue_lost(session, now)
            conditions: list[ColumnElement[bool]] = [
                Job.status == "queued",
                Job.deadline.is_(None) | (Job.deadline > now),
            ]
            if above is not None:
                conditions.append(Job.priority > above)
            if model is not None:
                conditions.append((Job.model == model) | Job.model.is_(None))
            job = self._find_next(session, conditions, model)
            if job is None:
                return None
            job.status, job.worker, job.attempts = "in_progress", worker, job.attempts + 1
            job.lease_token, job.lease_expires_at = token, now + self._lease_s
            if job.started_at is None:
                job.started_at = now
            if job.segments:  # A worker of a version without segments, which gave the job back, has let them expire.
                keep = update(File).where(File.name.in_(job.needed_files)).values(delete_at=None)
                session.execute(keep)
            return job

    def renew_lease(self, claimed: Job) -> str | None:
        """Renew a lease for another `lease_s`. Return the job's `stop_code` if it must stop, else None."""
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            job.lease_expires_at = self._database.now(session) + self._lease_s
            return job.stop_code

    def announce(self, claimed: Job, names: Iterable[str]) -> None:
        """Record names in storage before anything is written there, so that a crash leaves nothing behind.

        Names must be unique to this attempt (`attempts`), so that a worker that was thought lost can't overwrite the
        results of the next one.
        """
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            for name in names:  # The rows exist already if the answer to an earlier commit was lost.
                session.merge(File(name=name, job=job.id, attempt=job.attempts))

    def publish_fragment(self, claimed: Job, fragment: StoredFragment) -> None:
        """Show clients that watch a fragment whose name was announced and whose file is stored."""
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            if session.get(StoredFragment, fragment.name) is None:  # An earlier try may have added it.
                session.merge(fragment)
                job.fragments = (job.fragments or 0) + 1

    def abandon_fragments(self, claimed: Job) -> None:
        """Tell clients that watch that no more fragments will come."""
        with self._database.write() as session:
            self._lock_claimed(session, claimed).fragments = None

    def keep_segment(
        self, claimed: Job, index: int, segment: str, end: str | None, warnings: Sequence[str] = ()
    ) -> None:
        """Record that a segment of a job is stored, so that no later attempt makes it again.

        Workers that were lost before this don't count any more: the job does make headway.

        Args:
            claimed: The job.
            index: The segment's number, counted from 0.
            segment: Name of the segment's file, which was announced.
            end: The same for its last frame, if the next segment needs that.
            warnings: What the job's owner should know about the segment.
        """
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            if len(job.segments) == index:  # Otherwise the answer to an earlier commit was lost.
                job.segments, job.segments_end, job.losses = [*job.segments, segment], end, 0
                job.warnings = list(dict.fromkeys([*job.warnings, *map(make_storable, warnings)]))
            claimed.segments, claimed.segments_end, claimed.warnings = job.segments, job.segments_end, job.warnings

    def complete(
        self, claimed: Job, results: Mapping[str, str], warnings: Sequence[str] = (), *, watchable: bool = False
    ) -> Job:
        """End a job with its results; but if it was told to stop, fail it with its `stop_code`.

        Files that the job wrote and that aren't results are scheduled for deletion.

        Args:
            claimed: The job.
            results: Names that were announced, by variant.
            warnings: What the job's owner should know about the video.
            watchable: Whether all fragments of the last run are stored, so that clients can watch to the end.
        """
        with self._database.write() as session:
            job, now = self._lock_claimed(session, claimed), self._database.now(session)
            names = set(session.scalars(select(File.name).where(File.job == job.id)))
            if unknown := set(results.values()) - names:
                raise ValueError(f"results of {job.id} that were never announced: {', '.join(sorted(unknown))}")
            texts = [make_storable(warning) for warning in warnings]
            if not watchable:
                job.fragments = None
            return end(session, job, now, self._settings, results=dict(results), warnings=texts)

    def fail(self, claimed: Job, code: str, message: str) -> Job:
        """End a job that can't be made, with a reason for people. A job that was to stop fails with its `stop_code`."""
        with self._database.write() as session:
            job, now = self._lock_claimed(session, claimed), self._database.now(session)
            return end(session, job, now, self._settings, failure=(code, make_storable(message)))

    def release(self, claimed: Job) -> None:
        """Give an unfinished job back to the queue because the worker is ending. The job keeps its round."""
        with self._database.write() as session:
            self._requeue(session, self._lock_claimed(session, claimed), self._database.now(session))

    def requeue_lost(self) -> list[str]:
        """Requeue jobs whose worker is silent, or fail those that have lost too many workers. Return their ids."""
        with self._database.write() as session:
            return self._requeue_lost(session, self._database.now(session))

    def stop_overdue(self) -> list[str]:
        """Fail queued jobs whose deadline has passed, and tell running ones to stop. Return their ids."""
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

    def _find_next(self, session: Session, conditions: list[ColumnElement[bool]], model: str | None) -> Job | None:
        """Return the first job that may run, locked."""
        query = (
            select(Job)
            .where(*conditions, Job.owner.not_in(_OWNERS_AT_LIMIT))
            .order_by(Job.priority.desc(), Job.round, Job.sequence)
            .limit(1)
            .with_for_update(skip_locked=True)  # On PostgreSQL workers don't wait for one another.
        )
        busy_owners: set[str] = set()
        while (job := session.scalars(query.where(Job.owner.not_in(busy_owners))).one_or_none()) is not None:
            if job.model is None:  # An earlier version accepted it while this one was starting.
                job.model = str(job.request.get("model", ""))
            if model not in (None, job.model):
                continue  # The query doesn't return it again.
            if self._may_run(session, job.owner):
                return job
            busy_owners.add(job.owner)
        return None

    def _may_run(self, session: Session, owner: str) -> bool:
        """Return whether a key may have one more job running. If so, its row stays locked until the job is counted.

        If not, the row is unlocked at once. Workers visit keys in different orders, and would otherwise wait for each
        other's locks.
        """
        query = select(ApiKey.running).where(ApiKey.id == owner, ApiKey.running.is_not(None)).with_for_update()
        with session.begin_nested() as locked:
            most = session.scalar(query)
            running = select(func.count()).select_from(Job).where(Job.status == "in_progress", Job.owner == owner)
            if most is None or (session.scalar(running) or 0) < most:
                return True
            locked.rollback()
        return False

    def _lock_claimed(self, session: Session, claimed: Job) -> Job:
        """Lock a claimed job's row and copy the worker's progress and costs into it; raises `LeaseLost`.

        In return, the worker's copy gets the row's `watched_at`.
        """
        mine = (Job.id == claimed.id) & (Job.status == "in_progress") & (Job.lease_token == claimed.lease_token)
        job = session.scalars(select(Job).where(mine).with_for_update()).one_or_none()
        if job is None:
            raise LeaseLost(
                f"{claimed.id} no longer belongs to {claimed.worker}: the lease has expired, or the job has ended"
            )
        job.progress, job.stage_seconds = claimed.progress, claimed.stage_seconds
        job.chip_seconds, job.dollars = claimed.chip_seconds, claimed.dollars
        claimed.watched_at = job.watched_at
        return job

    def _requeue_lost(self, session: Session, now: float) -> list[str]:
        silent = session.scalars(
            select(Job)
            .where(Job.status == "in_progress", Job.lease_expires_at <= now)
            .order_by(Job.owner)  # Ending jobs locks their owners' usage, always in this order.
            .with_for_update(skip_locked=True)
        ).all()
        for job in silent:
            job.losses += 1
            if job.losses >= self._worker_attempts:
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
        expire_files(session, job.id, now + self._settings.abandoned_s, keep=job.needed_files)
