"""Foresee when jobs end: follow the queue's rule, segment by segment, with all segments taking equally long."""

import bisect
import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Sequence

from actors.jobs.queries import Turn

_HALF = 0.5  # What is left on average of a segment that is being made.
_Order = tuple[int, int, int]  # Jobs are claimed in this order.


@dataclasses.dataclass(frozen=True)
class Foresight:
    """What will happen to the jobs that wait or run. Times are in multiples of a segment's duration."""

    ends: dict[int, float]  # When each job will have ended, by its sequence.
    pauses: dict[int, float]  # How long each running job will wait while others have their turns, by its sequence.
    # When each waiting job will be claimed for the first time, in that order, after each job's order.
    starts: list[tuple[_Order, float]]
    free: float  # When a place will be free that none of them needs.

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
    pauses = {turn.sequence: ends[turn.sequence] - (max(1, turn.segments_left) - _HALF) for turn in running}
    first = sorted((_get_order(turn), starts[turn.sequence]) for turn in waiting)
    return Foresight(ends, pauses, first, now if free is None else free)


class _Queue:
    """The waiting jobs. It does what `WorkQueue.claim` and `give_way` do in the database."""

    def __init__(self, waiting: Sequence[Turn]) -> None:
        self._jobs: dict[tuple[int, str], list[Turn]] = defaultdict(list)  # In order, by priority and owner.
        for turn in sorted(waiting, key=_get_order):
            self._jobs[turn.priority, turn.owner].append(turn)

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def pop(self) -> Turn:
        """Claim the next job."""
        jobs = min(self._jobs.values(), key=lambda jobs: _get_order(jobs[0]))
        turn = jobs.pop(0)
        if not jobs:
            del self._jobs[turn.priority, turn.owner]
        return turn

    def has_other(self, turn: Turn) -> bool:
        """Return whether a running job has to give way after its segment."""
        return any(
            priority > turn.priority or (priority == turn.priority and owner != turn.owner)
            for priority, owner in self._jobs
        )

    def give_back(self, turn: Turn) -> None:
        """Have a running job wait for its owner's next turn."""
        others = [
            jobs for (priority, owner), jobs in self._jobs.items() if priority == turn.priority and owner != turn.owner
        ]
        own = self._jobs[turn.priority, turn.owner]
        if others:
            first = min(jobs[0].round for jobs in others)
            last = max(job.sequence for jobs in others for job in jobs if job.round == first)
            older = [job.round + 1 for job in own if job.sequence < turn.sequence]
            turn = turn._replace(round=max([first + (turn.sequence < last), *older]))
            for index, job in enumerate(own):
                if job.sequence > turn.sequence and job.round >= turn.round:
                    own[index] = job._replace(round=job.round + 1)
        bisect.insort(own, turn, key=_get_order)


def _get_order(turn: Turn) -> _Order:
    return -turn.priority, turn.round, turn.sequence
