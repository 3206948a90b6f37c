"""The clients' view of jobs: submit, look at, list, cancel and delete them."""

import dataclasses
import itertools
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from sqlalchemy import Select, Text, cast, func, select
from sqlalchemy.orm import Session

from actors.jobs.admission import OF_MODEL, QUEUED, RUNNING, check_room, check_stored, choose_round
from actors.jobs.database import Database
from actors.jobs.ending import STOPPED, delete_for_owner, end
from actors.jobs.errors import IdempotencyConflict, JobError, JobNotFound, JobUnfinished
from actors.jobs.migrations.migrate import migrate
from actors.jobs.queries import BY_ID, BY_ID_WITH_POSITION, PRIVATE, WITH_POSITION, Turn, find_earlier, select_repeated
from actors.jobs.sharing import share
from actors.jobs.stored_request import count_left
from actors.jobs.tables import Delivery, File, Job
from actors.jobs.values import CANCELLED, Counts, JobSettings, Room, Status, is_id

MAX_PAGE = 100
PAGE_CHARACTERS = 1_000_000  # The most characters of all stored requests on a page. Answers have fewer bytes.
_RETRY_WINDOW_S = 120.0  # Jobs older than this aren't matched with requests that clients repeat automatically.
_ATTACH_MARGIN_S = 60.0  # A file that is due for removal within this time can't become an input any more.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """Some jobs of a list, in order, and whether more follow the last one."""

    jobs: tuple[Job, ...]
    has_more: bool


def open_database(address: str | Path) -> Database:
    """Connect to a database and bring it to this program's schema; raises `StoreError`, `StoreUnavailable`."""
    database = Database(address)
    migrate(database)
    return database


def make_private_key() -> str:
    """Return an idempotency key that no client can send, so that only the request that has it waits for the job."""
    return PRIVATE + secrets.token_hex(16)


class JobStore:
    """The jobs of a database. Every method is one transaction, and safe between threads and processes.

    With an `owner`, jobs of other owners appear not to exist; None sees all jobs.
    """

    def __init__(self, database: Database, settings: JobSettings = JobSettings()) -> None:  # noqa: B008 (frozen)
        self._database, self._settings = database, settings

    def submit(
        self,
        job: Job,
        *,
        shared: Collection[str] = (),
        webhook_url: str | None = None,
        room: Room = Room(),  # noqa: B008
    ) -> tuple[Job, bool]:
        """Accept a job. Return it and True, or False with the job that has the same idempotency key already.

        Args:
            job: The job, without the fields that the queue sets.
            shared: Those of its inputs that are files of another job. Both need them from now on.

        Raises:
            FileGone: A file of another job is gone.
            IdempotencyConflict: The key was used with another body.
            InvalidRequest: The job has more segments than may ever wait.
            QueueFull: No more segments may wait now.
        """
        with self._database.write() as session:
            self._database.serialize(session)
            earlier = find_earlier(session, job.owner, job.idempotency_key)
            if earlier is not None:
                _check_body(earlier, job.body_digest)
                return earlier, False
            job.segments_left = count_left(job.request)
            check_room(session, job.owner, job.segments_left, job.model, room)
            job.created_at = self._database.now(session)
            job.round = choose_round(session, job.owner, job.priority, job.model, job.created_at)
            session.add(job)
            if webhook_url is not None:
                session.add(Delivery(job_id=job.id, url=webhook_url))
            for name in job.inputs:
                if name in shared:
                    share(session, name, job)
                else:
                    self._attach(session, job, name)
            return job, True

    def check_room(
        self, owner: str, idempotency_key: str | None, room: Room, model: str | None, segments: int = 1
    ) -> None:
        """Raise what `submit` would if there is no room for a job. One that was accepted before always has room.

        Raises:
            StoredTooMuch: The owner's files take too much storage. `submit` doesn't look, because a sum over many rows
                would hold up everybody's jobs.
        """
        with self._database.read() as session:
            if find_earlier(session, owner, idempotency_key) is None:
                check_room(session, owner, segments, model, room)
                check_stored(session, owner, room)

    def find_committed(self, job: str) -> Job | None:
        """Return a job if the commit that accepts it succeeded but its answer was lost; None if it certainly failed.

        This waits until no transaction that accepts jobs is under way, since the server may still be working on the
        lost one without its client.
        """
        with self._database.write() as session:
            self._database.serialize(session)
            return session.scalars(BY_ID, {"wanted": job}).one_or_none()

    def find_repeat(
        self, owner: str, idempotency_key: str | None, body_digest: str, *, is_retry: bool = False
    ) -> Job | None:
        """Return the job that was accepted for the same request before, if any.

        Args:
            idempotency_key: Names the request, if the client sent one.
            is_retry: Whether the client says that it repeats the request, as clients do automatically after an error. A
                recent job with the same body then counts as this request's even without a key, unless it has failed or
                was cancelled. The job is then shared: more than one request may wait for it.

        Raises:
            IdempotencyConflict: The key was used with another body.
        """
        repeated = None
        with self._database.read() as session:
            earlier = find_earlier(session, owner, idempotency_key)
            if idempotency_key is None and is_retry:
                since = self._database.now(session) - _RETRY_WINDOW_S
                repeated = session.scalars(select_repeated(owner, body_digest, since)).first()
        if repeated is not None:
            return self._share(repeated)
        if earlier is not None:
            _check_body(earlier, body_digest)
        return earlier

    def get(self, job: str, owner: str | None = None) -> Job:
        """Return a job; raises `JobNotFound`."""
        with self._database.read() as session:
            return self._find(session, job, owner)

    def look(self, job: str, owner: str | None = None) -> Job:
        """Return a job with its position in the queue; raises `JobNotFound`."""
        with self._database.read() as session:
            return self._find(session, job, owner, BY_ID_WITH_POSITION)

    def look_at_all(self, jobs: Iterable[str]) -> Sequence[Job]:
        """Return the jobs with the given ids, with their positions, except those that don't exist."""
        query = select(Job).options(WITH_POSITION).where(Job.id.in_(list(jobs)), Job.deleted_at.is_(None))
        with self._database.read() as session:
            return session.scalars(query).all()

    def list(
        self,
        owner: str | None = None,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Literal["asc", "desc"] = "desc",
        status: Status | None = None,
    ) -> Page:
        """Return a page of jobs with their positions.

        Jobs with long requests make the page shorter: it holds about `PAGE_CHARACTERS`, and at least one job.

        Args:
            owner: Whose jobs; None for everybody's.
            after: The id of the job before the page, which may be deleted by now.
            order: "desc" for the newest first, "asc" for the oldest first.

        Raises:
            JobNotFound: There is no job `after`.
        """
        size = func.length(cast(Job.request, Text))
        query = select(Job.sequence, size).where(Job.deleted_at.is_(None)).limit(limit + 1)
        by_age = Job.sequence.asc() if order == "asc" else Job.sequence.desc()
        if owner is not None:
            query = query.where(Job.owner == owner)
        if status is not None:
            query = query.where(Job.status == status)
        with self._database.read() as session:
            if after is not None:
                start = self._find(session, after, owner, deleted=True).sequence
                query = query.where(Job.sequence > start if order == "asc" else Job.sequence < start)
            rows = session.execute(query.order_by(by_age)).all()
            count = _count_fitting([characters for _, characters in rows[:limit]])
            sequences = [sequence for sequence, _ in rows[:count]]
            jobs = session.scalars(
                select(Job).options(WITH_POSITION).where(Job.sequence.in_(sequences)).order_by(by_age)
            ).all()
        if sequences and not jobs:  # All of these jobs were deleted meanwhile, so the page begins with later ones.
            return self.list(owner, after=after, limit=limit, order=order, status=status)
        return Page(jobs=tuple(jobs), has_more=len(rows) > count)

    def cancel(self, job: str, owner: str | None = None) -> Job:
        """Cancel a job: it fails with code "cancelled". A job that has ended stays as it is.

        A queued job ends at once. A running one ends when its worker next reports; until then its `stop_code` is set,
        and it can't complete any more.

        Raises:
            JobNotFound: There is no such job.
        """
        with self._database.write() as session:
            return self._cancel(session, self._find(session, job, owner, BY_ID.with_for_update()))

    def cancel_private(self, job: str, key: str) -> bool:
        """Cancel a job that was accepted with a private key, unless a repeated request waits for it by now.

        Returns:
            Whether it was cancelled.
        """
        with self._database.write() as session:
            row = session.scalars(BY_ID.with_for_update(), {"wanted": job}).one_or_none()
            if row is None or row.idempotency_key != key:
                return False
            self._cancel(session, row)
            return True

    def delete(self, job: str, owner: str | None = None) -> None:
        """Delete a job, cancelling it if it is queued. The next `Retention.sweep` removes its files.

        Raises:
            JobNotFound: There is no such job.
            JobUnfinished: The job is in progress.
        """
        with self._database.write() as session:
            row = self._find(session, job, owner, BY_ID.with_for_update())
            if row.status == "in_progress":
                raise JobUnfinished(f"{row.id} is in progress; cancel it first, or wait for its end")
            delete_for_owner(session, row, self._database.now(session), self._settings)

    def list_recent(self, limit: int, known: Mapping[str, Job] = MappingProxyType({})) -> tuple[Job, ...]:
        """Return the latest completed jobs of all owners, the latest first: by expiry, as all are kept equally long.

        Those `known` by id aren't read again.
        """
        latest = select(Job.id).where(Job.status == "completed", Job.expires_at.is_not(None))
        with self._database.read() as session:
            ids = session.scalars(latest.order_by(Job.expires_at.desc()).limit(limit)).all()
            new = session.scalars(select(Job).where(Job.id.in_(set(ids) - known.keys())))
            jobs = {**known, **{job.id: job for job in new}}
        return tuple(jobs[id_] for id_ in ids if id_ in jobs)

    def list_turns(self, model: str | None = None) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
        """Return the turns of a model's running jobs, and of its waiting ones, unordered."""
        of_model = select(*(getattr(Job, name) for name in Turn._fields)).where(OF_MODEL)
        with self._database.read() as session:
            running_rows = session.execute(of_model.where(Job.status == RUNNING), {"model": model or ""}).all()
            waiting_rows = session.execute(of_model.where(Job.status == QUEUED), {"model": model or ""}).all()
        return tuple(Turn(*row) for row in running_rows), tuple(Turn(*row) for row in waiting_rows)

    def count_jobs(self) -> Counts:
        with self._database.read() as session:
            groups = session.execute(
                select(Job.status, Job.error_code, func.count())
                .where(Job.deleted_at.is_(None))
                .group_by(Job.error_code, Job.status)
            ).all()
            oldest = session.scalar(select(func.min(Job.created_at)).where(Job.status == "queued"))
            pending = session.scalar(select(func.count()).where(File.delete_at.is_not(None))) or 0
            now = self._database.now(session)
        by_status: dict[Status, int] = dict.fromkeys(get_args(Status), 0)
        for status, _, count in groups:
            by_status[status] += count
        return Counts(
            by_status=by_status,
            failures={code: count for _, code, count in groups if code is not None},
            oldest_queued_s=0.0 if oldest is None else max(0.0, now - oldest),
            files_pending_deletion=pending,
        )

    def _cancel(self, session: Session, job: Job) -> Job:
        if job.status == "queued":
            return end(session, job, self._database.now(session), self._settings, failure=STOPPED[CANCELLED])
        if job.status == "in_progress" and job.stop_code is None:
            job.stop_code = CANCELLED
        return job

    def _share(self, job: Job) -> Job | None:
        """Mark a job as shared between requests and return it; None if it was cancelled or has failed meanwhile."""
        if job.idempotency_key is None:
            return job
        with self._database.write() as session:
            row = session.scalars(BY_ID.with_for_update(), {"wanted": job.id}).one_or_none()
            if row is None or row.deleted_at is not None or row.stop_code is not None or row.status == "failed":
                return None
            row.idempotency_key = None
            return row

    def _find(
        self, session: Session, job: str, owner: str | None, query: Select[Job] = BY_ID, *, deleted: bool = False
    ) -> Job:
        row = None
        if is_id(job):  # Other texts aren't looked up, because PostgreSQL rejects some of them.
            row = session.scalars(query, {"wanted": job}).one_or_none()
        hidden = row is not None and row.deleted_at is not None and not deleted
        if row is None or hidden or owner not in (None, row.owner):
            raise JobNotFound(f"there is no job {job[:80]!r}; it may have been deleted, or have expired")
        return row

    def _attach(self, session: Session, job: Job, image: str) -> None:
        """Attach a reserved file to a job, so that it is kept as long as the job."""
        file = session.get(File, image, with_for_update=True)
        margin = job.created_at + _ATTACH_MARGIN_S
        if file is None or file.job is not None or file.delete_at is None or file.delete_at <= margin:
            raise JobError(f"the input image {image} is no longer stored for this request; send it again")
        file.job, file.delete_at = job.id, None


def _count_fitting(characters: Sequence[int]) -> int:
    """Return how many requests of these lengths fit on a page: at least one."""
    sums = itertools.accumulate(characters)
    return max(min(1, len(characters)), sum(total <= PAGE_CHARACTERS for total in sums))


def _check_body(earlier: Job, body_digest: str) -> None:
    if earlier.body_digest != body_digest:
        raise IdempotencyConflict(
            f"idempotency key {earlier.idempotency_key!r} belongs to {earlier.id}, whose request had another body; "
            "use a new key for a new request"
        )
