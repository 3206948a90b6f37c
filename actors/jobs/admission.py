"""Decide whether a job's segments may wait, and at which position in the queue."""

from typing import Any

from sqlalchemy import ColumnElement, String, and_, bindparam, func, literal_column, select, true
from sqlalchemy.orm import Session, aliased

from actors.jobs.errors import QueueFull, StoredTooMuch
from actors.jobs.tables import ApiKey, File, Job
from actors.jobs.values import Room
from wan_tpu.errors import InvalidRequest

# Literals, since with a bound parameter SQLite doesn't see that the index of these jobs alone will do.
QUEUED: Any = literal_column("'queued'")
RUNNING: Any = literal_column("'in_progress'")
_MODEL = bindparam("model", type_=String)
_OTHER = aliased(Job)
_COUNT_OF_KEY = (
    select(func.count())
    .select_from(_OTHER)
    .where(_OTHER.status == RUNNING, _OTHER.owner == ApiKey.id)
    .correlate(ApiKey)
    .scalar_subquery()
)
OWNERS_AT_LIMIT = select(ApiKey.id).where(ApiKey.running.is_not(None), ApiKey.running <= _COUNT_OF_KEY)
# Jobs of a model that isn't served any more wait, and take no room. Programs before schema 0004 recorded no model.
OF_MODEL: Any = func.coalesce(Job.model, _MODEL) == _MODEL
# Built once, since every request runs it.
_WAITING_BY_OWNER = (
    select(Job.owner, func.sum(Job.segments_left).label("segments"))
    .where(Job.status == QUEUED, OF_MODEL)
    .group_by(Job.owner)
)


def check_room(session: Session, owner: str, segments: int, model: str | None, room: Room) -> None:
    """Check whether a job of an owner may wait.

    Args:
        model: The model that makes it. Only its jobs take room, and those without a model.

    Raises:
        InvalidRequest: The job has more segments than may ever wait.
        QueueFull: Too many segments wait now.
    """
    if segments > (most := max(1, min(room.limits, default=segments))):
        raise InvalidRequest(
            f"the video has {segments} segments, but at most {most} may wait at a time; send at most {most - 1} "
            "next_prompts, and continue the finished video with the others",
            "next_prompts",
        )
    waiting = {row.owner: row.segments for row in session.execute(_WAITING_BY_OWNER, {"model": model or ""})}
    own, others = waiting.get(owner, 0), waiting.keys() - {owner}
    if (reason := room.explain_refusal(segments, sum(waiting.values()), own, 1 + len(others))) is not None:
        raise QueueFull(reason)


def check_stored(session: Session, owner: str, room: Room) -> None:
    """Raise `StoredTooMuch` if the files of an owner's jobs take more than they may.

    What has been accepted is made even so: an owner may exceed the limit by the videos that wait.
    """
    if room.stored is None:
        return
    stored = int(session.scalar(select(func.sum(File.size)).where(File.owner == owner)) or 0)
    if stored > room.stored:
        raise StoredTooMuch(
            f"this key's videos and their inputs take {stored / 1e9:.2f} GB, and may take {room.stored / 1e9:g} GB; "
            "delete some: that makes room within a minute, and what interrupted attempts have left goes within an hour"
        )


def is_claimable(model: str | None, now: float) -> ColumnElement[bool]:
    """Return the condition that a job waits and could be claimed for a model. Turns are only those of such jobs."""
    is_of_model = true() if model is None else (Job.model == model) | Job.model.is_(None)
    is_in_time = Job.deadline.is_(None) | (Job.deadline > now)
    return and_(Job.status == QUEUED, is_of_model, is_in_time, Job.owner.not_in(OWNERS_AT_LIMIT))


def choose_round(session: Session, owner: str, priority: int, model: str | None, now: float) -> int:
    """Return the round of an owner's next job: after its own waiting jobs, and not before everyone else's first.

    Jobs of equal priority are claimed round by round (round-robin over owners), however many each owner has submitted.
    """
    own = (Job.status == QUEUED) & (Job.priority == priority) & (Job.owner == owner)
    last_own = session.scalar(select(func.max(Job.round)).where(own))
    waiting = is_claimable(model, now) & (Job.priority == priority)
    # A requeued job has an old round. A new job in the same round would overtake all that came in between.
    new = func.min(Job.round).filter(Job.attempts == 0)
    first = session.scalar(select(func.coalesce(new, func.min(Job.round))).where(waiting))
    return max(first or 0, 0 if last_own is None else last_own + 1)
