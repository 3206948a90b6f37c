"""Foresee when jobs end: follow the queue's rule, segment by segment, with all segments taking equally long."""

import bisect
import dataclasses
import heapq
from collections import Counter
from collections.abc import Sequence

from actors.jobs.queries import Turn

_HALF = 0.5  # What is left on average of a segment that is being made.
_Order = tuple[int, int, int]  # Jobs are claimed in this order.


@dataclasses.dataclass(frozen=True)
class Foresight:
    """What will happen to the jobs that wait or run. Times are in multiples of a segment's duration.

    Attributes:
        ends: When each job will have ended, by its sequence.
        pauses: How long each running job will wait while others have their turns, by its sequence.
        starts: When each waiting job will be claimed for the first time, in that order, and each job's order.
        free: When a place will be free that none of them needs.
    """

    ends: dict[int, float]
    pauses: dict[int, float]
    starts: list[tuple[_Order, float]]
    free: float

    def get_end(self, turn: Turn) -> float:
        """Return when a job will have ended. One that came later is taken to displace the next one in order."""
        if turn.sequence in self.ends:
            return self.ends[turn.sequence]
        index = bisect.bisect(self.starts, (_get_order(turn), 0.0))
        start = self.starts[index][1] if index < len(self.starts) else self.free
        return start + turn.segments_left


def foresee(running: Sequence[Turn], waiting: Sequence[Turn], places: int) -> Foresight:
    """Return what will happen to the jobs of a pipeline with `places` if no others come.

    A job gives its place back after a segment if one of another owner with the same priority waits, or any one with a
    higher priority (`WorkQueue.give_way`).
    """
    left = {turn.sequence: turn.segments_left for turn in (*running, *waiting)}
    owners = {turn.sequence: turn.owner for turn in (*running, *waiting)}
    queue = [_get_order(turn) for turn in waiting]
    heapq.heapify(queue)
    of_priority, of_owner = Counter(-order[0] for order in queue), Counter[tuple[int, str]]()
    last: dict[tuple[int, str], int] = {}  # The last round in which an owner has a job waiting.
    for turn in waiting:
        own = turn.priority, turn.owner
        of_owner[own] += 1
        last[own] = max(last.get(own, 0), turn.round)
    busy = [(_HALF, turn.sequence, turn.priority) for turn in running]
    ends: dict[int, float] = {}
    first: dict[int, tuple[_Order, float]] = {}
    now, free = 0.0, None
    while busy or queue:
        while queue and len(busy) < places:
            order = heapq.heappop(queue)
            priority, sequence = -order[0], order[2]
            of_priority[priority] -= 1
            of_owner[priority, owners[sequence]] -= 1
            first.setdefault(sequence, (order, now))
            heapq.heappush(busy, (now + 1.0, sequence, priority))
        if free is None and len(busy) < places:
            free = now
        now, sequence, priority = heapq.heappop(busy)
        own = priority, owners[sequence]
        left[sequence] -= 1
        if left[sequence] <= 0:
            ends[sequence] = now
        elif queue and (-queue[0][0] > priority or of_priority[priority] > of_owner[own]):
            next_round = queue[0][1] + 1 if -queue[0][0] == priority else 0
            last[own] = max(next_round, last[own] + 1 if of_owner[own] else 0)
            of_priority[priority] += 1
            of_owner[own] += 1
            heapq.heappush(queue, (-priority, last[own], sequence))
        else:
            heapq.heappush(busy, (now + 1.0, sequence, priority))
    pauses = {turn.sequence: ends[turn.sequence] - (turn.segments_left - _HALF) for turn in running}
    waited = {turn.sequence for turn in waiting}
    starts = sorted(start for sequence, start in first.items() if sequence in waited)
    return Foresight(ends, pauses, starts, now if free is None else free)


def _get_order(turn: Turn) -> _Order:
    return -turn.priority, turn.round, turn.sequence
