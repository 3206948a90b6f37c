"""Decide whether one more job may wait, and at which position in the queue."""

import math
from typing import Any

from sqlalchemy import func, literal_column, select
from sqlalchemy.orm import Session

from actors.jobs.errors import QueueFull
from actors.jobs.tables import Job
from actors.jobs.values import Room

# A literal, since with a bound parameter SQLite looks up every row of the index of waiting jobs in the table.
QUEUED: Any = literal_column("'queued'")
# Built once, since every request runs them.
_WAITING = select(func.count()).select_from(Job).where(Job.status == QUEUED)
_WAITING_BY_OWNER = select(Job.owner, func.count()).where(Job.status == QUEUED).group_by(Job.owner)


def check_room(session: Session, owner: str, room: Room) -> None:
    """Raise `QueueFull` if one more job of an owner may not wait."""
    limits = [limit for limit in (room.queue, room.owner) if limit is not None]
    if (session.scalar(_WAITING) or 0) < min(limits, default=math.inf):
        return
    waiting = dict(session.execute(_WAITING_BY_OWNER).all())
    owner_waiting, other_owners = waiting.get(owner, 0), waiting.keys() - {owner}
    if (reason := room.explain_refusal(sum(waiting.values()), owner_waiting, 1 + len(other_owners))) is not None:
        raise QueueFull(reason)


def choose_round(session: Session, owner: str, priority: int) -> int:
    """Return the round of an owner's next job: after its own waiting jobs, and not before everyone else's first.

    Jobs of equal priority are claimed round by round (round-robin over owners), however many each owner has submitted.
    """
    waiting = (Job.status == QUEUED) & (Job.priority == priority)
    last_own = session.scalar(select(func.max(Job.round)).where(waiting, Job.owner == owner))
    # A requeued job has an old round. A new job in the same round would overtake all that came in between.
    new = func.min(Job.round).filter(Job.attempts == 0)
    first = session.scalar(select(func.coalesce(new, func.min(Job.round))).where(waiting))
    return max(first or 0, 0 if last_own is None else last_own + 1)
