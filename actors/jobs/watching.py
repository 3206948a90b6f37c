"""The part of jobs that is read for clients that watch videos being decoded. It is small, because it is read often."""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sqlalchemy import and_, bindparam, or_, select, update
from sqlalchemy.orm import Session, load_only

from actors.jobs.database import Database
from actors.jobs.errors import StoreUnavailable
from actors.jobs.queries import PRIVATE, WITH_POSITION
from actors.jobs.tables import Job, StoredFragment
from actors.jobs.values import Status

RENEW_S = 10.0  # Workers store fragments of a job for as long as its `watched_at` is renewed about this often.
TOLD = ("id", "status", "progress", "attempts", "position", "warnings")  # What clients that wait for a job are told of.
_UNENDED: tuple[Status, ...] = ("queued", "in_progress")
# Built once, because it is run several times a second.
_WATCHED = select(Job.id, Job.status, Job.attempts, Job.fragments, Job.results, Job.watched_at).where(
    Job.id.in_(bindparam("jobs", expanding=True)), Job.deleted_at.is_(None)
)


class FragmentRow(NamedTuple):
    """A stored fragment; the fields are those of `StoredFragment`."""

    attempt: int
    run: int
    number: int
    name: str
    digest: str


@dataclasses.dataclass(eq=False, kw_only=True)
class StoredRun:
    """The stored fragments of one run. They are read once for all who watch, and only ever added to."""

    attempt: int
    run: int
    # Its fragments from the video's first one on, without a gap.
    rows: list[FragmentRow] = dataclasses.field(default_factory=list)
    has_gap: bool = False  # Whether there are others, after one that was removed.

    def add(self, rows: Iterable[FragmentRow]) -> None:
        """Add the fragments that follow, sorted by number."""
        self.has_gap = False
        for row in rows:
            if row.number == len(self.rows):
                self.rows.append(row)
            self.has_gap |= row.number >= len(self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """The part of a job that its watchers need."""

    status: Status  # As in `Job`.
    attempts: int  # As in `Job`.
    fragments: int | None  # As in `Job`. It changes whenever `stored` does.
    video: str | None = None  # Name of the finished file; None until the job has completed.
    stored: StoredRun | None = None  # The latest run of the latest attempt that has stored fragments; None without any.

    @property
    def has_ended(self) -> bool:
        return self.status not in _UNENDED


def begin_to_watch(database: Database, *jobs: str) -> None:
    """Have the workers of jobs that haven't ended store fragments for a while from now on.

    Jobs of which another process has said so lately are left as they are.
    """
    with database.write() as session:
        now = database.now(session)
        # A time to come means that the clock was set back.
        is_due = Job.watched_at.is_(None) | (Job.watched_at < now - RENEW_S / 2) | (Job.watched_at > now)
        due = select(Job.id).where(Job.id.in_(jobs), Job.status.in_(_UNENDED), is_due)
        # Rows are locked in one order, so that two processes never wait for each other.
        locked = session.scalars(due.order_by(Job.id).with_for_update()).all()
        if locked:
            session.execute(update(Job).where(Job.id.in_(locked)).values(watched_at=now))


def share(database: Database, job: Job) -> None:
    """Note that somebody else waits for a job, so that it isn't cancelled with the request that it was made for."""
    if (key := job.idempotency_key) is not None and key.startswith(PRIVATE):
        with database.write() as session:
            same = (Job.id == job.id) & (Job.idempotency_key == key)
            session.execute(update(Job).where(same).values(idempotency_key=None))


def look_at_watched(database: Database, jobs: Mapping[str, Watched]) -> dict[str, Watched]:
    """Return the jobs with the given ids as they are now, except those that don't exist; keep them watched.

    Args:
        jobs: The jobs as they were seen last, by id. Of their fragments only new ones are read.
    """
    seen: dict[str, Watched] = {}
    with database.read() as session:
        rows = session.execute(_WATCHED, {"jobs": list(jobs)}).all()
        now = database.now(session)
        for id_, status, attempts, count, results, _ in rows:
            new = Watched(status=status, attempts=attempts, fragments=count, video=results.get("video"))
            before, stored = jobs[id_], None
            if count is not None:
                stored = before.stored
                if stored is None or new != dataclasses.replace(before, stored=None):
                    stored = _read_new(session, id_, stored)
            seen[id_] = dataclasses.replace(new, stored=stored)
    unended = {id_: at for id_, status, *_, at in rows if status in _UNENDED}
    ages = {id_: RENEW_S if at is None or at > now else now - at for id_, at in unended.items()}
    if any(age >= RENEW_S for age in ages.values()):
        with contextlib.suppress(StoreUnavailable):  # It is tried again with the next look, and news come meanwhile.
            begin_to_watch(database, *(id_ for id_, age in ages.items() if age >= RENEW_S / 2))
    return seen


def find_unchanged(database: Database, jobs: Mapping[str, Job]) -> set[str]:
    """Return the ids of the jobs that still are as they were seen, by what clients are told of while they wait.

    Only these columns are read. A job's prompts alone may have hundreds of kilobytes.
    """
    columns = [getattr(Job, name) for name in TOLD if name != "position"]
    query = select(Job).options(load_only(*columns), WITH_POSITION).where(Job.id.in_(list(jobs)))
    with database.read() as session:
        now = session.scalars(query.where(Job.deleted_at.is_(None))).all()
    return {job.id for job in now if all(getattr(job, name) == getattr(jobs[job.id], name) for name in TOLD)}


def list_fragments(database: Database, job: str) -> list[FragmentRow]:
    """Return the stored fragments of the latest run, in order, of the latest attempt that has stored any."""
    with database.read() as session:
        stored = _read_new(session, job, None)
    return [] if stored is None else stored.rows


def _read_new(session: Session, job: str, before: StoredRun | None) -> StoredRun | None:
    """Read the rows after those that are known, or all of a later run; return the latest run."""
    table = StoredFragment
    query = select(table.attempt, table.run, table.number, table.name, table.digest).where(table.job == job)
    if before is not None:
        same = table.attempt == before.attempt
        later = or_(table.attempt > before.attempt, and_(same, table.run > before.run))
        query = query.where(or_(later, and_(same, table.run == before.run, table.number >= len(before.rows))))
    rows = [FragmentRow(*row) for row in session.execute(query.order_by(table.attempt, table.run, table.number))]
    if not rows:
        return before
    newest = rows[-1]
    if before is None or (newest.attempt, newest.run) != (before.attempt, before.run):
        before = StoredRun(attempt=newest.attempt, run=newest.run)
    before.add(row for row in rows if (row.attempt, row.run) == (before.attempt, before.run))
    return before
