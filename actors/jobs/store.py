"""Jobs as those who ask for videos see them: submit, look, list, cancel, delete."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from actors.jobs.database import Database
from actors.jobs.errors import IdempotencyConflict, JobError, JobNotFound, JobUnfinished, QueueFull
from actors.jobs.migrate import migrate
from actors.jobs.rows import BY_ID, LOOK, POSITION, WAITING, Keeping, doom, end, job_of, next_turn
from actors.jobs.tables import deliveries, files, jobs
from actors.jobs.values import CANCELLED, Counts, Job, Page, Submission, digest, is_id, new_id

MAX_PAGE = 100
_ATTACH_MARGIN_S = 60.0  # a file that is removed sooner than this can't become an input any more


def open_database(address: str | Path) -> Database:
    """Connect to a database and bring it to this program's schema; raises `StoreError`, `StoreUnavailable`."""
    database = Database(address)
    migrate(database)
    return database


class JobStore:
    """The jobs of a database. Every method is one transaction, and safe between threads and processes.

    Where `owner` is given, jobs of others are not found; None sees all.
    """

    def __init__(self, database: Database, keeping: Keeping = Keeping()) -> None:  # noqa: B008 (frozen)
        self._database = database
        self._keeping = keeping

    def submit(self, submission: Submission, *, queue_limit: int | None = None) -> tuple[Job, bool]:
        """Accept a job; return it, and whether it is new: the same idempotency key and body is the same job.

        Raises `IdempotencyConflict` for the same key with another body, `QueueFull` when `queue_limit` jobs wait.
        """
        body_digest = submission.body_digest or digest(submission.request)
        with self._database.write() as connection:
            self._database.in_turn(connection)
            earlier = self._same_key(connection, submission)
            if earlier is not None:
                if earlier.body_digest != body_digest:
                    raise IdempotencyConflict(
                        f"idempotency key {submission.idempotency_key!r} belongs to {earlier.id}, which was asked for "
                        "with another body; use a new key for a new request"
                    )
                return earlier, False
            waiting = connection.scalar(WAITING) or 0
            if queue_limit is not None and waiting >= queue_limit:
                raise QueueFull(f"{waiting} jobs wait, which is all that are taken; try again later")
            return self._insert(connection, submission, body_digest), True

    def get(self, job: str, owner: str | None = None) -> Job:
        """Return a job; raises `JobNotFound`."""
        with self._database.read_once() as connection:
            return self._find(connection, job, owner)

    def look(self, job: str, owner: str | None = None) -> tuple[Job, int | None]:
        """Return a job and its `position`, both of one moment; raises `JobNotFound`."""
        with self._database.read_once() as connection:
            row = self._row(connection, LOOK, job, owner)
        return job_of(row), row.position

    def list(
        self,
        owner: str | None = None,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Page:
        """Return at most `limit` jobs (up to 100) in order of acceptance, newest first unless `order` is "asc".

        after  the id of the job before the first; raises `JobNotFound` when there is none
        """
        if not 1 <= limit <= MAX_PAGE:
            raise ValueError(f"limit is {limit}; allowed are 1 to {MAX_PAGE}")
        if order not in ("asc", "desc"):
            raise ValueError(f"order is {order!r}; allowed are 'asc' and 'desc'")
        query = select(jobs).limit(limit + 1)
        query = query.order_by(jobs.c.sequence.asc() if order == "asc" else jobs.c.sequence.desc())
        if owner is not None:
            query = query.where(jobs.c.owner == owner)
        with self._database.read() as connection:
            if after is not None:
                start = self._find(connection, after, owner).sequence
                query = query.where(jobs.c.sequence > start if order == "asc" else jobs.c.sequence < start)
            found = [job_of(row) for row in connection.execute(query)]
        return Page(jobs=tuple(found[:limit]), more=len(found) > limit)

    def position(self, job: Job) -> int | None:
        """Return how many jobs are claimed before this one if none is added; None when it doesn't wait."""
        with self._database.read_once() as connection:
            found: int | None = connection.scalar(POSITION, {"wanted": job.id})
            return found

    def positions(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the same for many at once, in one walk over the queue; those that don't wait are left out."""
        if not ids:
            return {}
        order = func.row_number().over(order_by=(jobs.c.priority.desc(), jobs.c.turn, jobs.c.sequence))
        queue = select(jobs.c.id, (order - 1).label("position")).where(jobs.c.status == "queued").subquery()
        with self._database.read() as connection:
            found = connection.execute(select(queue).where(queue.c.id.in_(ids)))
            return {row.id: row.position for row in found}

    def cancel(self, job: str, owner: str | None = None) -> Job:
        """Cancel a job: it ends as failed with code "cancelled".

        One that waits ends at once. One in progress ends when its worker next reports; until then `stop_code` is set,
        and it can't complete any more. One that has ended stays as it is. Raises `JobNotFound`.
        """
        with self._database.write() as connection:
            found = self._find(connection, job, owner, lock=True)
            if found.status == "queued":
                now = self._database.now(connection)
                return end(connection, found, now, self._keeping, failure=(CANCELLED, "the job was cancelled"))
            if found.status == "in_progress" and found.stop_code is None:
                row = connection.execute(
                    update(jobs).where(jobs.c.id == found.id).values(stop_code=CANCELLED).returning(jobs)
                ).one()
                return job_of(row)
            return found

    def delete(self, job: str, owner: str | None = None) -> None:
        """Remove a job; its files are doomed with it, and removed by the next `Retention.sweep`.

        Raises `JobNotFound`, `JobUnfinished` for one in progress.
        """
        with self._database.write() as connection:
            found = self._find(connection, job, owner, lock=True)
            if found.status == "in_progress":
                raise JobUnfinished(f"{found.id} is in progress; cancel it first, or wait for its end")
            doom(connection, found.id, self._database.now(connection))
            connection.execute(delete(deliveries).where(deliveries.c.job == found.id))
            connection.execute(delete(jobs).where(jobs.c.id == found.id))

    def recent(self, limit: int) -> tuple[Job, ...]:
        """Return jobs of any owner that have completed, the latest first."""
        query = select(jobs).where(jobs.c.status == "completed", jobs.c.expires_at.is_not(None))
        with self._database.read() as connection:
            found = connection.execute(query.order_by(jobs.c.expires_at.desc()).limit(limit))
            return tuple(map(job_of, found))

    def running(self) -> int:
        """Return how many jobs are in progress."""
        with self._database.read() as connection:
            return connection.scalar(select(func.count()).where(jobs.c.status == "in_progress")) or 0

    def counts(self) -> Counts:
        """Return how many jobs there are, by status and failure."""
        with self._database.read() as connection:
            groups = connection.execute(
                select(jobs.c.status, jobs.c.error_code, func.count()).group_by(jobs.c.error_code, jobs.c.status)
            ).all()
            oldest = connection.scalar(select(func.min(jobs.c.created_at)).where(jobs.c.status == "queued"))
            doomed = connection.scalar(select(func.count()).where(files.c.doomed_at.is_not(None))) or 0
            now = self._database.now(connection)
        by_status = dict.fromkeys(("queued", "in_progress", "completed", "failed"), 0)
        for status, _, count in groups:
            by_status[status] += count
        return Counts(
            by_status=by_status,  # type: ignore[arg-type]
            failures={code: count for _, code, count in groups if code is not None},
            oldest_queued_s=0.0 if oldest is None else max(0.0, now - oldest),
            doomed_files=doomed,
        )

    def _find(self, connection: Connection, job: str, owner: str | None, *, lock: bool = False) -> Job:
        return job_of(self._row(connection, BY_ID.with_for_update() if lock else BY_ID, job, owner))

    def _row(self, connection: Connection, query: Select[Any], job: str, owner: str | None) -> Row[Any]:
        row = None
        if is_id(job):  # anything else isn't asked for: PostgreSQL refuses some texts
            row = connection.execute(query, {"wanted": job}).one_or_none()
        if row is None or owner not in (None, row.owner):
            raise JobNotFound(f"there is no job {job[:80]!r}; it may have been deleted, or have expired")
        return row

    def _same_key(self, connection: Connection, submission: Submission) -> Job | None:
        if submission.idempotency_key is None:
            return None
        row = connection.execute(
            select(jobs).where(jobs.c.owner == submission.owner, jobs.c.idempotency_key == submission.idempotency_key)
        ).one_or_none()
        return None if row is None else job_of(row)

    def _insert(self, connection: Connection, submission: Submission, body_digest: str) -> Job:
        now = self._database.now(connection)
        row = connection.execute(
            insert(jobs)
            .values(
                id=new_id(),
                owner=submission.owner,
                status="queued",
                request=submission.request,
                input_image=submission.input_image,
                priority=submission.priority,
                turn=next_turn(connection, submission.owner, submission.priority),
                deadline=submission.deadline,
                idempotency_key=submission.idempotency_key,
                body_digest=body_digest,
                attempts=0,
                losses=0,
                results={},
                stage_seconds={},
                chip_seconds=0.0,
                created_at=now,
            )
            .returning(jobs)
        ).one()
        if submission.webhook_url is not None:
            connection.execute(insert(deliveries).values(job=row.id, url=submission.webhook_url, attempts=0))
        if submission.input_image is not None:
            self._attach(connection, submission.input_image, row.id, now)
        return job_of(row)

    def _attach(self, connection: Connection, image: str, job: str, now: float) -> None:
        """Make a reserved file part of a job, so that it lives as long."""
        attached = connection.execute(
            update(files)
            .where(files.c.name == image, files.c.job.is_(None), files.c.doomed_at > now + _ATTACH_MARGIN_S)
            .values(job=job, doomed_at=None)
        )
        if attached.rowcount != 1:
            raise JobError(f"the input image {image} isn't kept for this request any more; send it again")
