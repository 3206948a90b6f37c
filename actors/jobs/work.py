"""The workers' view of jobs: claim a job, report its progress, and end it exactly once."""

import itertools
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from sqlalchemy import Select, bindparam, func, select, update
from sqlalchemy.orm import Session, defer

from actors.jobs.admission import OWNERS_AT_LIMIT, QUEUED, RUNNING, is_claimable
from actors.jobs.database import Database
from actors.jobs.ending import STOPPED, end, expire_files
from actors.jobs.errors import CommitUncertain, LeaseLost
from actors.jobs.keys import PRIORITIES
from actors.jobs.stored_request import count_left, read_redo, set_frames
from actors.jobs.tables import ApiKey, File, Job, StoredFragment
from actors.jobs.values import DEADLINE, LOST, PREVIEW, JobSettings, make_storable
from actors.reliability import ReliabilitySettings

# After the clock was set forward, no lease counts as expired for this many renewals: SQLite's clock is the machine's,
# and setting it expires all leases at once.
_RENEWALS = 3
_LOOK_AT = 200  # Waiting jobs that are looked at together.
_FROZEN_S = 10.0  # Workers look at the queue much more often, unless they or their machine stood still.
_REUSABLE_S = 60.0  # A file that is due for removal within this time isn't reused.
# Built once, since every worker runs them all the time, and building them takes longer than running them. On PostgreSQL
# workers don't wait for one another. Ending jobs locks their owners' usage, always in the same order.
_CLAIMED = select(Job).where(Job.id == bindparam("job"), Job.status == RUNNING, Job.lease_token == bindparam("token"))
_CLAIMED = _CLAIMED.with_for_update()
_RENEWED = _CLAIMED.options(defer(Job.request))  # Each second, and a request may have 64,000 characters of prompts.
_SILENT = (
    select(Job)
    .where(Job.status == RUNNING, Job.lease_expires_at <= bindparam("now"))
    .order_by(Job.owner)
    .with_for_update(skip_locked=True)
)
_OVERDUE = (
    select(Job)
    .where(Job.status.in_((QUEUED, RUNNING)), Job.deadline <= bindparam("now"), Job.stop_code.is_(None))
    .order_by(Job.owner)
    .with_for_update(skip_locked=True)
)
_NEXT = (
    select(Job)
    .where(
        Job.status == QUEUED,
        Job.priority > bindparam("above"),
        Job.deadline.is_(None) | (Job.deadline > bindparam("now")),
        Job.owner.not_in(OWNERS_AT_LIMIT),
        Job.owner.not_in(bindparam("busy_owners", expanding=True)),
        Job.sequence.not_in(bindparam("of_newer", expanding=True)),
    )
    .order_by(Job.priority.desc(), Job.round, Job.sequence)
)
_NEXT_OF_MODEL = _NEXT.where((Job.model == bindparam("model")) | Job.model.is_(None))


class WorkQueue:
    """The jobs that wait or run. Every method is one transaction, and safe between threads and processes.

    A claimed job belongs to its worker until `lease_expires_at`, which the worker renews; each claim has a new
    `lease_token`. Methods that take a claimed job also record its `progress` and cost as the worker has set them. They
    raise `LeaseLost` once the job was taken back: the worker must stop, and remove what it has written.
    """

    def __init__(
        self,
        database: Database,
        settings: JobSettings = JobSettings(),  # noqa: B008 (frozen)
        reliability: ReliabilitySettings = ReliabilitySettings(),  # noqa: B008 (frozen)
    ) -> None:
        self._database, self._settings = database, settings
        self._lease_s, self._worker_attempts = reliability.lease_s, reliability.worker_attempts
        self._of_newer: set[int] = set()  # The sequences of waiting jobs that only a newer version can run.
        self._renewal_s = reliability.renewal_s
        self._clocks: tuple[float, float] | None = None  # The database's and this process's own at the latest look.
        self._trusted_from = -math.inf  # When expired leases count again, by the process's own clock.

    def claim(
        self,
        worker: str,
        *,
        above: int | None = None,
        model: str | None = None,
        can_run: Callable[[Job], bool] = lambda job: True,
    ) -> Job | None:
        """Claim the next job: by priority, then round-robin over owners, then by age. Return None if there is none.

        Keys that have as many jobs running as they may are skipped. Jobs whose lease has run out are requeued first.

        Args:
            above: Claim only a job of a higher priority than this.
            model: Claim only a job that was accepted for this model. Others wait for a worker that has theirs.
            can_run: Returns whether the worker's version understands a job. Others wait for a newer worker.
        """
        token = secrets.token_hex(16)
        try:
            return self._claim(worker, token, above, model, can_run)
        except CommitUncertain:  # The claim may have succeeded, and no other worker could then make the video.
            with self._database.read() as session:
                return session.scalars(select(Job).where(Job.lease_token == token)).one_or_none()

    def _claim(
        self, worker: str, token: str, above: int | None, model: str | None, can_run: Callable[[Job], bool]
    ) -> Job | None:
        with self._database.write() as session:
            now = self._database.now(session)
            self._requeue_lost(session, now)
            values = {"now": now, "above": PRIORITIES[0] - 1 if above is None else above}
            job = self._find_next(session, values, model, can_run)
            if job is None:
                return None
            job.status, job.worker, job.attempts = "in_progress", worker, job.attempts + 1
            job.lease_token, job.lease_expires_at = token, now + self._lease_s
            if job.started_at is None:
                job.started_at = now
            if job.needed_files:
                self._keep_files(session, job, now)
            job.segments_left = count_left(job.request, job.finished_segments)
            return job

    def renew_lease(self, claimed: Job) -> str | None:
        """Renew a lease for another `lease_s`. Return the job's `stop_code` if it must stop, else None.

        The worker's copy gets the row's `watched_at`, which clients change.
        """
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed, _RENEWED)
            job.lease_expires_at, claimed.watched_at = self._database.now(session) + self._lease_s, job.watched_at
            return job.stop_code

    def announce(self, claimed: Job, sizes: Mapping[str, int]) -> None:
        """Record the names and bytes of files before they are written, so that a crash leaves nothing behind.

        Names must be unique to this attempt (`attempts`), so that a worker that was thought lost can't overwrite the
        results of the next one.
        """
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            for name, size in sizes.items():  # The rows exist already if the answer to an earlier commit was lost.
                session.merge(File(name=name, job=job.id, attempt=job.attempts, owner=job.owner, size=size))

    def show_preview(self, claimed: Job, name: str) -> None:
        """Show clients a picture of the unfinished video, which was announced and is stored, in place of the last one.

        It stays for as long as there are no other results; the one before is deleted after a while.
        """
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            before, job.results = job.results.get(PREVIEW), {**job.results, PREVIEW: name}
            if before is not None and before != name:
                delete_at = self._database.now(session) + self._settings.abandoned_s
                session.execute(update(File).where(File.name == before).values(delete_at=delete_at))

    def publish_fragments(self, claimed: Job, fragments: Sequence[StoredFragment]) -> None:
        """Show clients that watch fragments whose names were announced and whose files are stored."""
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            new = [fragment for fragment in fragments if session.get(StoredFragment, fragment.name) is None]
            if new:  # An earlier try may have added them.
                for fragment in new:
                    session.merge(fragment)
                job.fragments = (job.fragments or 0) + len(new)

    def reuse_fragments(self, claimed: Job, wanted: Sequence[StoredFragment]) -> int:
        """Make fragments that an earlier run has stored part of this one.

        Args:
            wanted: Fragments as this run would store them, in order.

        Returns:
            How many of them, from the first on, are stored by now.
        """
        with self._database.write() as session:
            job, now = self._lock_claimed(session, claimed), self._database.now(session)
            numbers = [fragment.number for fragment in wanted]
            is_stored = (StoredFragment.job == job.id) & StoredFragment.number.in_(numbers)
            is_safe = File.delete_at.is_(None) | (File.delete_at > now + _REUSABLE_S)
            pairs = session.execute(
                select(StoredFragment, File)
                .join(File, File.name == StoredFragment.name)
                .where(is_stored, is_safe)
                .order_by(File.name)
                .with_for_update()
            ).all()
            stored = {(row.number, row.digest): (row, file) for row, file in pairs}
            count = 0
            for fragment in wanted:
                if (pair := stored.get((fragment.number, fragment.digest))) is None:
                    break
                row, file = pair
                row.attempt, row.run, file.attempt, file.delete_at = fragment.attempt, fragment.run, job.attempts, None
                count += 1
            if count:
                job.fragments = (job.fragments or 0) + count
            return count

    def abandon_fragments(self, claimed: Job) -> None:
        """Tell clients that watch that no more fragments will come."""
        with self._database.write() as session:
            self._lock_claimed(session, claimed).fragments = None

    def keep_segment(
        self,
        claimed: Job,
        index: int,
        segment: str,
        end: str | None,
        warnings: Sequence[str] = (),
        results: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Record that a segment of a job is stored, so that no later attempt makes it again.

        Workers that were lost before this don't count any more: the job does make headway.

        Args:
            index: The segment's number, counted from 0.
            segment: Name of the segment's file, which was announced.
            end: The same for its last frame, if that is stored as well.
            warnings: What the job's owner should know about the segment.
            results: Names of files that stay with the job's results, by variant.
        """
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            if len(job.segments) == index:  # Otherwise the answer to an earlier commit was lost.
                job.segments, job.segments_end = [*job.segments, segment], end
                job.results = {**job.results, **results}
                self._count_segment(job, warnings)
            claimed.segments, claimed.segments_end, claimed.results = job.segments, job.segments_end, job.results
            claimed.segments_left, claimed.warnings = job.segments_left, job.warnings

    def keep_last_segment(
        self, claimed: Job, files: Mapping[str, str], warnings: Sequence[str] = (), frames: int | None = None
    ) -> None:
        """Record that a job's last segment is stored. What is left to do can fail, and be repeated, without it.

        Args:
            files: Names of its files, which were announced, by variant.
            warnings: What the job's owner should know about the segment.
            frames: How many frames it has, if the request left that open.
        """
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            if job.last_segment is None:
                job.last_segment = dict(files)
                self._count_segment(job, warnings)
                if frames is not None:
                    job.request = set_frames(job.request, frames)
            claimed.last_segment, claimed.request = job.last_segment, job.request
            claimed.segments_left, claimed.warnings = job.segments_left, job.warnings

    def keep_end(self, claimed: Job, end: str) -> None:
        """Record the name of the last frame of the newest segment, which was announced and is stored."""
        with self._database.write() as session:
            job = self._lock_claimed(session, claimed)
            job.segments_end = claimed.segments_end = end

    def give_way(self, claimed: Job) -> bool:
        """Give a job back after a segment if another one's turn has come; return whether it was given back.

        That is the case if a job of another owner with the same priority waits, or any one with a higher priority. The
        job keeps its finished segments, and waits for its next turn.
        """
        with self._database.write() as session:
            job, now = self._lock_claimed(session, claimed), self._database.now(session)
            could_run = is_claimable(job.model, now) & Job.sequence.not_in(self._of_newer)
            is_other = could_run & (Job.owner != job.owner) & (Job.priority == job.priority)
            is_urgent = could_run & (Job.priority > job.priority)
            first = session.scalar(select(func.min(Job.round)).where(is_other))
            if job.stop_code is not None:
                return False
            if first is None and session.scalar(select(Job.sequence).where(is_urgent).limit(1)) is None:
                return False
            if first is not None:
                last = session.scalar(select(func.max(Job.sequence)).where(is_other, Job.round == first))
                self._move_behind(session, job, first, last or 0)
            self._requeue(session, job, now)
            return True

    def complete(
        self,
        claimed: Job,
        results: Mapping[str, str],
        *,
        watchable: bool = False,
        unwritten: Collection[str] = (),
    ) -> Job:
        """End a job with its results; but if it was told to stop, fail it with its `stop_code`.

        Files that the job wrote and that aren't results are scheduled for deletion.

        Args:
            results: Names that were announced, by variant.
            watchable: Whether all fragments of the last run are stored, so that clients can watch to the end.
            unwritten: Names of announced files that may still be written. They aren't deleted before that, either.
        """
        with self._database.write() as session:
            job, now = self._lock_claimed(session, claimed), self._database.now(session)
            names = set(session.scalars(select(File.name).where(File.job == job.id)))
            if unknown := set(results.values()) - names:
                raise ValueError(f"results of {job.id} that were never announced: {', '.join(sorted(unknown))}")
            if not watchable:
                job.fragments = None
            session.execute(update(File).where(File.name.in_(unwritten)).values(attempt=None))
            return end(session, job, now, self._settings, results=dict(results))

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
            overdue = session.scalars(_OVERDUE, {"now": now}).all()
            for job in overdue:
                if job.status == "queued":
                    end(session, job, now, self._settings, failure=STOPPED[DEADLINE])
                else:
                    job.stop_code = DEADLINE
            return [job.id for job in overdue]

    def _find_next(
        self, session: Session, values: Mapping[str, float], model: str | None, can_run: Callable[[Job], bool]
    ) -> Job | None:
        """Return the first job that may run, locked."""
        busy_owners: set[str] = set()
        query, more = (_NEXT, values) if model is None else (_NEXT_OF_MODEL, {**values, "model": model})
        while True:
            others = {**more, "busy_owners": busy_owners, "of_newer": self._of_newer}
            if (job := session.scalars(query.limit(1).with_for_update(skip_locked=True), others).one_or_none()) is None:
                return None
            if job.model is None:  # An earlier version accepted it while this one was starting.
                job.model = str(job.request.get("model", ""))
            if model not in (None, job.model):
                continue  # The query doesn't return it again.
            if not can_run(job):  # There may be many, so they are looked at together, and only once.
                candidates = session.scalars(query.limit(_LOOK_AT), others)
                self._of_newer.update(other.sequence for other in candidates if not can_run(other))
            elif self._may_run(session, job.owner):
                return job
            else:
                busy_owners.add(job.owner)

    def _may_run(self, session: Session, owner: str) -> bool:
        """Return whether a key may have one more job running. If so, its row stays locked until the job is counted.

        If not, the row is unlocked at once. Workers visit keys in different orders, and would otherwise wait for each
        other's locks.
        """
        query = select(ApiKey.running).where(ApiKey.id == owner, ApiKey.running.is_not(None)).with_for_update()
        with session.begin_nested() as locked:
            most = session.scalar(query)
            running = select(func.count()).select_from(Job).where(Job.status == RUNNING, Job.owner == owner)
            if most is None or (session.scalar(running) or 0) < most:
                return True
            locked.rollback()
        return False

    def _lock_claimed(self, session: Session, claimed: Job, query: Select[Job] = _CLAIMED) -> Job:
        """Lock a claimed job's row and copy the worker's progress and costs into it; raises `LeaseLost`."""
        mine = {"job": claimed.id, "token": claimed.lease_token}
        job = session.scalars(query, mine).one_or_none()
        if job is None:
            raise LeaseLost(
                f"{claimed.id} no longer belongs to {claimed.worker}: the lease has expired, or the job has ended"
            )
        job.progress, job.stage_seconds = claimed.progress, claimed.stage_seconds
        job.chip_seconds, job.dollars = claimed.chip_seconds, claimed.dollars
        return job

    def _has_been_set(self, now: float) -> bool:
        """Return whether leases may not have been renewed, since lately the clock was set or processes stood still."""
        moment, before = time.monotonic(), self._clocks
        self._clocks = now, moment
        if before is None:
            return False
        looked_s = moment - before[1]  # So long only if this process was frozen, and then probably others as well.
        if (now - before[0]) - looked_s > self._renewal_s or looked_s > max(self._lease_s / 2, _FROZEN_S):
            self._trusted_from = moment + _RENEWALS * self._renewal_s
        return moment < self._trusted_from

    def _requeue_lost(self, session: Session, now: float) -> list[str]:
        if self._has_been_set(now):
            return []
        silent = session.scalars(_SILENT, {"now": now}).all()
        for job in silent:
            job.losses += 1
            if job.losses >= self._worker_attempts:
                message = f"given up after {job.losses} workers were lost, the last one {job.worker}"
                end(session, job, now, self._settings, failure=(LOST, message))
            else:
                self._requeue(session, job, now)
        return [job.id for job in silent]

    def _keep_files(self, session: Session, job: Job, now: float) -> None:
        """Keep a job's inputs and what it has made, and forget what isn't stored any more, so that it is made again.

        Workers of earlier versions that gave the job back have let files expire of which they don't know.
        """
        is_kept = File.name.in_(job.needed_files) & (File.delete_at > now)
        session.execute(update(File).where(is_kept).values(delete_at=None))
        stored = File.name.in_(job.needed_files) & File.delete_at.is_(None)
        names = set(session.scalars(select(File.name).where(stored)))
        segments = list(itertools.takewhile(names.__contains__, job.segments))
        if len(segments) < len(job.segments) or not names.issuperset((job.last_segment or {}).values()):
            job.last_segment = None
        ends = {index: job.results.get(f"end-{index}") for index in range(len(job.segments))}  # Kept only of motion.
        ends[len(job.segments)] = job.segments_end
        if job.last_segment is None and "continue_by" in job.request and read_redo(job.request) is None:
            while segments and ends[len(segments)] not in names:  # The next one could not go on from it.
                segments.pop()
        end = ends[len(segments)]
        job.segments, job.segments_end = segments, end if end in names else None
        job.results = {variant: name for variant, name in job.results.items() if name in names}

    def _move_behind(self, session: Session, job: Job, first: int, last: int) -> None:
        """Move a job to its owner's next turn, and the owner's later jobs to the turns after that.

        Args:
            session: A transaction that has locked the job's row.
            first: The round of the other owners' next turns,
            last: and the latest sequence of their jobs in it. Within a round, older jobs come first.
        """
        own = (Job.status == QUEUED) & (Job.owner == job.owner) & (Job.priority == job.priority)
        older = session.scalar(select(func.max(Job.round)).where(own, Job.sequence < job.sequence))
        job.round = max(first + (job.sequence < last), -1 if older is None else older + 1)
        # Rows are locked in one order, so that no two processes wait for each other.
        later = select(Job.id).where(own, Job.sequence > job.sequence, Job.round >= job.round)
        if ids := session.scalars(later.order_by(Job.id).with_for_update()).all():
            session.execute(update(Job).where(Job.id.in_(ids)).values(round=Job.round + 1))

    def _count_segment(self, job: Job, warnings: Sequence[str]) -> None:
        job.losses, job.segments_left = 0, count_left(job.request, job.finished_segments)
        job.warnings = list(dict.fromkeys([*job.warnings, *map(make_storable, warnings)]))

    def _requeue(self, session: Session, job: Job, now: float) -> None:
        if job.stop_code is not None:
            end(session, job, now, self._settings)
            return
        job.status = "queued"
        job.worker = job.lease_token = job.lease_expires_at = None
        expire_files(session, job.id, now + self._settings.abandoned_s, keep=job.needed_files)
