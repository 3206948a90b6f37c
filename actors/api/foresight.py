"""Foresee when jobs end: follow the queue's rule, segment by segment, with all segments taking equally long."""

import bisect
import dataclasses
import heapq
from collections import Counter, defaultdict
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
        starts: When each waiting job will be claimed for the first time, in that order, after each job's order.
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
    """Return what will happen to the jobs of a pipeline with `places` if no others come."""
    turns = {turn.sequence: turn for turn in (*running, *waiting)}
    left = {sequence: turn.segments_left for sequence, turn in turns.items()}
    queue = _Queue(waiting)
    busy = [(_HALF, turn.sequence) for turn in running]
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    now, free = 0.0, None
    while busy or queue:
        while queue and len(busy) < places:
            turn = queue.pop()
            starts.setdefault(turn.sequence, now)
            heapq.heappush(busy, (now + 1.0, turn.sequence))
        if free is None and len(busy) < places:
            free = now
        now, sequence = heapq.heappop(busy)
        left[sequence] -= 1
        if left[sequence] <= 0:
            ends[sequence] = now
        elif queue.has_other(turns[sequence]):
            queue.give_back(turns[sequence])
        else:
            heapq.heappush(busy, (now + 1.0, sequence))
    pauses = {turn.sequence: ends[turn.sequence] - (turn.segments_left - _HALF) for turn in running}
    first = sorted((_get_order(turn), starts[turn.sequence]) for turn in waiting)
    return Foresight(ends, pauses, first, now if free is None else free)


class _Queue:
    """The waiting jobs. It does what `WorkQueue.claim`, `give_way` and `choose_round` do in the database."""

    def __init__(self, waiting: Sequence[Turn]) -> None:
        self._heap: list[tuple[_Order, Turn]] = []
        self._owners: dict[int, Counter[str]] = defaultdict(Counter)  # The jobs of each owner, by priority.
        self._last: dict[tuple[int, str], int] = {}  # The latest round of an owner's jobs, by priority and owner.
        # The owner of each job, by priority and round, and the rounds that there are, in order.
        self._rounds: dict[int, dict[int, dict[int, str]]] = defaultdict(dict)
        self._order: dict[int, list[int]] = defaultdict(list)
        self._new: dict[int, list[tuple[int, int]]] = defaultdict(list)  # Never claimed, the first one last.
        for turn in sorted(waiting, key=_get_order, reverse=True):
            self._push(turn)
            self._new[turn.priority].append((turn.round, turn.sequence))
        self._unclaimed = {turn.sequence for turn in waiting}

    def __len__(self) -> int:
        return len(self._heap)

    def pop(self) -> Turn:
        """Claim the next job."""
        _, turn = heapq.heappop(self._heap)
        self._owners[turn.priority][turn.owner] -= 1
        jobs = self._rounds[turn.priority][turn.round]
        del jobs[turn.sequence]
        if not jobs:
            del self._rounds[turn.priority][turn.round]
            self._order[turn.priority].remove(turn.round)
        self._unclaimed.discard(turn.sequence)
        return turn

    def has_other(self, turn: Turn) -> bool:
        """Return whether a running job has to give way after its segment."""
        first = self._heap[0][1].priority if self._heap else None
        owners = self._owners[turn.priority]
        return first is not None and (first > turn.priority or owners.total() > owners[turn.owner])

    def give_back(self, turn: Turn) -> None:
        """Have a running job wait for its next turn."""
        priority, new, owners = turn.priority, self._new[turn.priority], self._owners[turn.priority]
        while new and new[-1][1] not in self._unclaimed:
            new.pop()
        earliest = [new[-1][0] if new else 0, *self._order[priority][:1]]
        if owners[turn.owner]:
            earliest.append(self._last[priority, turn.owner] + 1)
        for round_ in self._order[priority]:
            others = [job for job, owner in self._rounds[priority][round_].items() if owner != turn.owner]
            if others:
                earliest.append(round_ + (turn.sequence < max(others)))
                break
        self._push(turn._replace(round=max(earliest)))

    def _push(self, turn: Turn) -> None:
        own = turn.priority, turn.owner
        is_alone = not self._owners[turn.priority][turn.owner]
        self._last[own] = turn.round if is_alone else max(self._last[own], turn.round)
        self._owners[turn.priority][turn.owner] += 1
        if turn.round not in self._rounds[turn.priority]:
            bisect.insort(self._order[turn.priority], turn.round)
        self._rounds[turn.priority].setdefault(turn.round, {})[turn.sequence] = turn.owner
        heapq.heappush(self._heap, (_get_order(turn), turn))


def _get_order(turn: Turn) -> _Order:
    return -turn.priority, turn.round, turn.sequence
