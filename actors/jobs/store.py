"""Jobs as those who ask for videos see them: submit, look, list, cancel, delete."""

import dataclasses
import itertools
import math
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from sqlalchemy import Select, Text, bindparam, case, cast, func, literal_column, select
from sqlalchemy.orm import Session, aliased, with_expression

from actors.jobs.database import Database
from actors.jobs.ending import STOPPED, delete_for_owner, end
from actors.jobs.errors import IdempotencyConflict, JobError, JobNotFound, JobUnfinished, QueueFull
from actors.jobs.migrations.migrate import migrate
from actors.jobs.tables import Delivery, File, Job
from actors.jobs.values import CANCELLED, Counts, JobSettings, Room, Status, is_id

MAX_PAGE = 100
PAGE_CHARACTERS = 1_000_000  # of the requests on a page, as the database has them: more than their answer has bytes
_RETRIED_S, _RETRIED_OF = 120.0, 200  # how long ago, and among how many, a request is that a client repeats itself
_PRIVATE = "\x1f"  # Clients' idempotency keys are printable, so none of them begins like this.
_ATTACH_MARGIN_S = 60.0  # a file that is removed sooner than this can't become an input any more

# Written out: with a parameter SQLite looks each row of the index of waiting jobs up in the table.
_QUEUED: Any = literal_column("'queued'")


def _position() -> Any:
    """Return what counts the waiting jobs that are claimed before one; null when it doesn't wait.

    Three ranges of the index of waiting jobs, so that those behind aren't looked at.
    """
    other = aliased(Job)
    same = other.priority == Job.priority
    ranges = (
        [other.priority > Job.priority],
        [same, other.round < Job.round],
        [same, other.round == Job.round, other.sequence < Job.sequence],
    )
    waiting = other.status == _QUEUED
    counts = [select(func.count()).select_from(other).where(waiting, *range_).correlate(Job) for range_ in ranges]
    first, second, third = (count.scalar_subquery() for count in counts)
    return case((Job.status == _QUEUED, first + second + third))


# Built once: they are asked with every poll, and building them takes longer than answering them.
_BY_ID = select(Job).where(Job.id == bindparam("wanted"))
_WITH_POSITION = with_expression(Job.position, _position())
_LOOK = _BY_ID.options(_WITH_POSITION)
_WAITING = select(func.count()).select_from(Job).where(Job.status == _QUEUED)
_WAITING_BY_OWNER = select(Job.owner, func.count()).where(Job.status == _QUEUED).group_by(Job.owner)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """Some jobs of a list, in order; `more` when others follow the last."""

    jobs: tuple[Job, ...]
    more: bool


def open_database(address: str | Path) -> Database:
    """Connect to a database and bring it to this program's schema; raises `StoreError`, `StoreUnavailable`."""
    database = Database(address)
    migrate(database)
    return database


def private_key() -> str:
    """Return an idempotency key that no client can send: whoever holds it is the only one who waits for its job."""
    return _PRIVATE + secrets.token_hex(16)


class JobStore:
    """The jobs of a database. Every method is one transaction, and safe between threads and processes.

    Where `owner` is given, jobs of others are not found; None sees all.
    """

    def __init__(self, database: Database, settings: JobSettings = JobSettings()) -> None:  # noqa: B008 (frozen)
        self._database, self._settings = database, settings

    def submit(self, job: Job, *, webhook_url: str | None = None, room: Room = Room()) -> tuple[Job, bool]:  # noqa: B008
        """Accept a new job; return it, and whether it is new: the same idempotency key and body is the same job.

        webhook_url  called when the job has ended

        Raises `IdempotencyConflict` for the same key with another body, `QueueFull` where there is no room.
        """
        with self._database.write() as session:
            self._database.serialize(session)
            earlier = _earlier(session, job.owner, job.idempotency_key)
            if earlier is not None:
                _check_body(earlier, job.body_digest)
                return earlier, False
            _check_room(session, job.owner, room)
            job.round = _next_round(session, job.owner, job.priority)
            job.created_at = self._database.now(session)
            session.add(job)
            if webhook_url is not None:
                session.add(Delivery(job_id=job.id, url=webhook_url))
            for name in job.inputs:
                self._attach(session, job, name)
            return job, True

    def check_room(self, owner: str, idempotency_key: str | None, room: Room) -> None:
        """Raise `QueueFull` where there is no room for a job; there always is for one that was accepted before."""
        with self._database.read() as session:
            if _earlier(session, owner, idempotency_key) is None:
                _check_room(session, owner, room)

    def find_committed(self, job: str) -> Job | None:
        """Return a job if it was accepted by a commit whose answer got lost; None where it certainly wasn't.

        Waits until no transaction that accepts a job is under way: that one may still be, on a server that goes on
        without its client.
        """
        with self._database.write() as session:
            self._database.serialize(session)
            return session.scalars(_BY_ID, {"wanted": job}).one_or_none()

    def known(self, owner: str, idempotency_key: str | None, body_digest: str, *, retried: bool = False) -> Job | None:
        """Return the job that was accepted with that key and body; raises `IdempotencyConflict`.

        retried  whether the client says that it asks again, as clients do by themselves after an error: without a key
                 a job of the same body and of a moment ago is this request's, unless it has failed or was cancelled.
                 From then on it is nobody's alone.
        """
        repeated = None
        with self._database.read() as session:
            earlier = _earlier(session, owner, idempotency_key)
            if idempotency_key is None and retried:
                since = self._database.now(session) - _RETRIED_S
                repeated = session.scalars(_repeated(owner, body_digest, since)).first()
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
        """Return a job with its position; raises `JobNotFound`."""
        with self._database.read() as session:
            return self._find(session, job, owner, _LOOK)

    def look_at_all(self, jobs: Iterable[str]) -> Sequence[Job]:
        """Return those of some jobs that there are, with their positions."""
        wanted = select(Job).options(_WITH_POSITION).where(Job.id.in_(list(jobs)), Job.deleted_at.is_(None))
        with self._database.read() as session:
            return session.scalars(wanted).all()

    def list(
        self,
        owner: str | None = None,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Literal["asc", "desc"] = "desc",
        status: Status | None = None,
    ) -> Page:
        """Return at most `limit` jobs with their positions, newest first unless `order` is "asc".

        Of long requests fewer are returned: about `PAGE_CHARACTERS`, and one in any case.

        after   the id of the job before the first, which may be deleted by now; raises `JobNotFound` when there is none
        status  of those that are wanted; any if None
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
            found = session.execute(query.order_by(by_age)).all()
            count = _fitting([characters for _, characters in found[:limit]])
            wanted = [sequence for sequence, _ in found[:count]]
            jobs = session.scalars(
                select(Job).options(_WITH_POSITION).where(Job.sequence.in_(wanted)).order_by(by_age)
            ).all()
        if wanted and not jobs:  # deleted in between: what follows is another page
            return self.list(owner, after=after, limit=limit, order=order, status=status)
        return Page(jobs=tuple(jobs), more=len(found) > count)

    def cancel(self, job: str, owner: str | None = None) -> Job:
        """Cancel a job: it ends as failed with code "cancelled".

        One that waits ends at once. One in progress ends when its worker next reports; until then `stop_code` is set,
        and it can't complete any more. One that has ended stays as it is. Raises `JobNotFound`.
        """
        with self._database.write() as session:
            return self._cancel(session, self._find(session, job, owner, _BY_ID.with_for_update()))

    def cancel_private(self, job: str, key: str) -> bool:
        """Cancel a job that was accepted with a `private_key`, unless a repeated request waits for it by now.

        Returns whether it was cancelled.
        """
        with self._database.write() as session:
            found = session.scalars(_BY_ID.with_for_update(), {"wanted": job}).one_or_none()
            if found is None or found.idempotency_key != key:
                return False
            self._cancel(session, found)
            return True

    def delete(self, job: str, owner: str | None = None) -> None:
        """Have a job found no more; its files are deleted by the next `Retention.sweep`. One that waits is cancelled.

        Raises `JobNotFound`, `JobUnfinished` for one in progress.
        """
        with self._database.write() as session:
            found = self._find(session, job, owner, _BY_ID.with_for_update())
            if found.status == "in_progress":
                raise JobUnfinished(f"{found.id} is in progress; cancel it first, or wait for its end")
            delete_for_owner(session, found, self._database.now(session), self._settings)

    def recent(self, limit: int) -> tuple[Job, ...]:
        """Return jobs of any owner that have completed, the latest first."""
        query = select(Job).where(Job.status == "completed", Job.expires_at.is_not(None))
        with self._database.read() as session:
            return tuple(session.scalars(query.order_by(Job.expires_at.desc()).limit(limit)))

    def running(self) -> int:
        """Return how many jobs are in progress."""
        with self._database.read() as session:
            return session.scalar(select(func.count()).where(Job.status == "in_progress")) or 0

    def counts(self) -> Counts:
        """Return how many jobs there are, by status and failure."""
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
        """Return a job that more than one request waits for from now on; None if it was cancelled meanwhile."""
        if job.idempotency_key is None:
            return job
        with self._database.write() as session:
            found = session.scalars(_BY_ID.with_for_update(), {"wanted": job.id}).one_or_none()
            if found is None or found.deleted_at is not None or found.stop_code is not None or found.status == "failed":
                return None
            found.idempotency_key = None
            return found

    def _find(
        self, session: Session, job: str, owner: str | None, query: Select[Job] = _BY_ID, *, deleted: bool = False
    ) -> Job:
        found = None
        if is_id(job):  # anything else isn't asked for: PostgreSQL refuses some texts
            found = session.scalars(query, {"wanted": job}).one_or_none()
        hidden = found is not None and found.deleted_at is not None and not deleted
        if found is None or hidden or owner not in (None, found.owner):
            raise JobNotFound(f"there is no job {job[:80]!r}; it may have been deleted, or have expired")
        return found

    def _attach(self, session: Session, job: Job, image: str) -> None:
        """Make a reserved file part of a job, so that it lives as long."""
        file = session.get(File, image, with_for_update=True)
        margin = job.created_at + _ATTACH_MARGIN_S
        if file is None or file.job is not None or file.delete_at is None or file.delete_at <= margin:
            raise JobError(f"the input image {image} isn't kept for this request any more; send it again")
        file.job, file.delete_at = job.id, None


def _earlier(session: Session, owner: str, idempotency_key: str | None) -> Job | None:
    """Return the job that was accepted with an idempotency key."""
    if idempotency_key is None:
        return None
    same = (Job.owner == owner) & (Job.idempotency_key == idempotency_key)
    return session.scalars(select(Job).where(same)).one_or_none()


def _repeated(owner: str, body_digest: str, since: float) -> Select[Job]:
    """Return a query for the latest job that a repeated request without a key may have made.

    A client's own idempotency key names another request. Only the columns that decide are read of the others.
    """
    columns = (Job.sequence, Job.body_digest, Job.idempotency_key, Job.created_at)
    latest = select(*columns).where(Job.owner == owner).order_by(Job.sequence.desc()).limit(_RETRIED_OF).subquery()
    key = latest.c.idempotency_key
    same = (latest.c.body_digest == body_digest) & (latest.c.created_at > since)
    sequences = select(latest.c.sequence).where(same, key.is_(None) | key.startswith(_PRIVATE))
    alive = Job.deleted_at.is_(None) & Job.stop_code.is_(None) & (Job.status != "failed")
    return select(Job).where(Job.sequence.in_(sequences), alive).order_by(Job.sequence.desc()).limit(1)


def _fitting(characters: Sequence[int]) -> int:
    """Return how many requests of such lengths are on a page: one at least."""
    sums = itertools.accumulate(characters)
    return max(min(1, len(characters)), sum(total <= PAGE_CHARACTERS for total in sums))


def _check_body(earlier: Job, body_digest: str) -> None:
    if earlier.body_digest != body_digest:
        raise IdempotencyConflict(
            f"idempotency key {earlier.idempotency_key!r} belongs to {earlier.id}, which was asked for with another "
            "body; use a new key for a new request"
        )


def _check_room(session: Session, owner: str, room: Room) -> None:
    """Raise `QueueFull` where one more job of an owner may not wait."""
    limits = [limit for limit in (room.queue, room.owner) if limit is not None]
    if (session.scalar(_WAITING) or 0) < min(limits, default=math.inf):
        return
    waiting = dict(session.execute(_WAITING_BY_OWNER).all())
    own, others = waiting.get(owner, 0), waiting.keys() - {owner}
    if (reason := room.refusal(sum(waiting.values()), own, 1 + len(others))) is not None:
        raise QueueFull(reason)


def _next_round(session: Session, owner: str, priority: int) -> int:
    """Return the round of an owner's next job: after its own waiting ones, and not before everyone else's first.

    Jobs of equal priority are claimed round by round (round-robin over owners), however many each has submitted.
    """
    waiting = (Job.status == _QUEUED) & (Job.priority == priority)
    last_own = session.scalar(select(func.max(Job.round)).where(waiting, Job.owner == owner))
    # One that came back into the queue has an old round: who follows it would pass all that came in between.
    new = func.min(Job.round).filter(Job.attempts == 0)
    first = session.scalar(select(func.coalesce(new, func.min(Job.round))).where(waiting))
    return max(first or 0, 0 if last_own is None else last_own + 1)
