"""Who is next: a queue by priority, and the scheduler of one slice, which pauses a request for a more urgent one."""

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable

MOST_PAUSED = 1  # requests at a time: their text keys stay on the devices, beside those of the one that runs
# Requests whose arrays lie on the devices at a time: of the one that computes, of the next one, and of one that leaves.
MOST_HELD = 3


class Admission:
    """A request's place in a queue: waited for, or granted."""

    def __init__(self, priority: int, came_s: float, number: int) -> None:
        """came_s, number: the order of arrival, which a paused request keeps."""
        self.priority = priority
        self.order = (-priority, came_s, number)
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: "Admission") -> bool:
        return self.order < other.order


class PriorityQueue:
    """A bounded number of requests inside, the others wait: by priority, then in the order of arrival.

    What a request costs here doesn't grow with the number of those inside.
    """

    def __init__(self, limit: int, urgent: int = 0) -> None:
        """limit: requests inside at a time; urgent: besides, for those more urgent than another inside."""
        self._limit, self._urgent = limit, urgent
        self._inside: set[Admission] = set()
        self._priorities: Counter[int] = Counter()  # of those inside
        self._heap: list[Admission] = []  # those that wait, and some that have left since
        self._waiting: set[Admission] = set()
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def entered(self, priority: int = 0, came_s: float = 0.0) -> AsyncIterator[Admission]:
        """Wait until there is room, and take it for the block.

        came_s  when the request was made, where it may have waited elsewhere before
        """
        admission = Admission(priority, came_s, next(self._numbers))
        try:
            self._enqueue(admission)
            await admission.granted
            yield admission
        finally:
            self._leave(admission)

    def evict(self, error: Callable[[], Exception]) -> None:
        """Raise this in all that wait; those inside go on."""
        waiting, self._heap = sorted(self._waiting), []
        self._waiting.clear()
        for admission in waiting:
            if not admission.granted.done():
                admission.granted.set_exception(error())

    @property
    def _first(self) -> Admission | None:
        """The next one that waits."""
        while self._heap and self._heap[0] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _enqueue(self, admission: Admission) -> None:
        self._waiting.add(admission)
        heapq.heappush(self._heap, admission)
        self._admit()

    def _leave(self, admission: Admission) -> None:
        """Forget a request wherever it is."""
        self._waiting.discard(admission)
        self._exit(admission)
        self._admit()

    def _exit(self, admission: Admission) -> None:
        if admission in self._inside:
            self._inside.remove(admission)
            self._priorities[admission.priority] -= 1
            if not self._priorities[admission.priority]:
                del self._priorities[admission.priority]

    def _admit(self) -> None:
        while (first := self._first) is not None and self._has_room(first.priority):
            self._waiting.remove(first)
            if not first.granted.cancelled():
                self._inside.add(first)
                self._priorities[first.priority] += 1
                first.granted.set_result(None)

    def _has_room(self, priority: int) -> bool:
        if len(self._inside) < self._limit:
            return True
        return len(self._inside) < self._limit + self._urgent and priority > min(self._priorities, default=priority)


class StepScheduler(PriorityQueue):
    """Whose denoising step is next on a slice: one request at a time. The choice is made between two steps.

    places  for requests that denoise, and others for those that are encoded or decoded: a place is for arrays on the
            devices, and everything that waits for something else than the devices waits outside
    device  held for one call of the slice; encoding and decoding go between two steps of a request, urgent ones first
    """

    def __init__(self, most_paused: int = MOST_PAUSED) -> None:
        """most_paused: how many requests may be paused at a time."""
        super().__init__(limit=1)
        self.device = PriorityQueue(limit=1)
        self.places = PriorityQueue(MOST_HELD, most_paused)
        self.other_places = PriorityQueue(MOST_HELD, most_paused)
        self._most_paused = most_paused
        self._paused: set[Admission] = set()  # until they run again, or leave

    def must_pause(self, admission: Admission) -> bool:
        """Whether the request that runs is to pause, now that it is between two steps."""
        self._paused.discard(admission)
        first = self._first
        return first is not None and first.priority > admission.priority and len(self._paused) < self._most_paused

    def pause(self, admission: Admission) -> asyncio.Future[None]:
        """Let the more urgent request run; return what is done when this one may go on, or raises."""
        self._exit(admission)
        self._paused.add(admission)
        admission.granted = asyncio.get_running_loop().create_future()
        self._enqueue(admission)
        return admission.granted

    def evict(self, error: Callable[[], Exception]) -> None:
        """Raise this in all that wait for a step or a place, or are paused; the one that runs goes on."""
        for queue in (self.places, self.other_places):
            queue.evict(error)
        super().evict(error)

    def _leave(self, admission: Admission) -> None:
        self._paused.discard(admission)
        super()._leave(admission)
