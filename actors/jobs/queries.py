"""Queries of the clients' view of jobs."""

from typing import Any, NamedTuple

from sqlalchemy import Select, bindparam, case, func, select
from sqlalchemy.orm import Session, aliased, with_expression

from actors.jobs.admission import QUEUED
from actors.jobs.tables import Job

PRIVATE = "\x1f"  # Clients' idempotency keys are printable, so none of them begins like this.
_RETRY_CANDIDATES = 200  # The number of an owner's latest jobs that are matched with a repeated request.


class Turn(NamedTuple):
    """What decides when a job runs: the columns of `Job` by which it is claimed, and how much it has left to do."""

    priority: int
    round: int
    sequence: int
    owner: str
    segments_left: int


def _count_before() -> Any:
    """Return an expression that counts the waiting jobs ahead of a job; null if the job doesn't wait.

    It reads three ranges of the index of waiting jobs, so that jobs behind aren't visited.
    """
    other = aliased(Job)
    same = other.priority == Job.priority
    ranges = (
        [other.priority > Job.priority],
        [same, other.round < Job.round],
        [same, other.round == Job.round, other.sequence < Job.sequence],
    )
    waiting = other.status == QUEUED
    counts = [select(func.count()).select_from(other).where(waiting, *range_).correlate(Job) for range_ in ranges]
    first, second, third = (count.scalar_subquery() for count in counts)
    return case((Job.status == QUEUED, first + second + third))


# Built once, since every poll runs them, and building them takes longer than answering them.
BY_ID = select(Job).where(Job.id == bindparam("wanted"))
WITH_POSITION = with_expression(Job.position, _count_before())
BY_ID_WITH_POSITION = BY_ID.options(WITH_POSITION)


def find_earlier(session: Session, owner: str, idempotency_key: str | None) -> Job | None:
    """Return the job that was accepted with an idempotency key."""
    if idempotency_key is None:
        return None
    same = (Job.owner == owner) & (Job.idempotency_key == idempotency_key)
    return session.scalars(select(Job).where(same)).one_or_none()


def select_repeated(owner: str, body_digest: str, since: float) -> Select[Job]:
    """Return a query for the latest job that an earlier try of a request without a key may have created.

    A job with a client's own idempotency key belongs to another request. Of the candidates only the columns that
    decide are read.
    """
    columns = (Job.sequence, Job.body_digest, Job.idempotency_key, Job.created_at)
    latest = (
        select(*columns).where(Job.owner == owner).order_by(Job.sequence.desc()).limit(_RETRY_CANDIDATES).subquery()
    )
    key = latest.c.idempotency_key
    same = (latest.c.body_digest == body_digest) & (latest.c.created_at > since)
    sequences = select(latest.c.sequence).where(same, key.is_(None) | key.startswith(PRIVATE))
    alive = Job.deleted_at.is_(None) & Job.stop_code.is_(None) & (Job.status != "failed")
    return select(Job).where(Job.sequence.in_(sequences), alive).order_by(Job.sequence.desc()).limit(1)
