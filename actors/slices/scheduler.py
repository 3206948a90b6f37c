"""A queue by priority, and the scheduler of one slice, which pauses a request for a more urgent one."""

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable

# Requests that may be paused at a time: their text keys stay on the devices, beside those of the request that runs.
MAX_PAUSED = 1
# Requests with arrays on the devices at a time: the one that computes, the next one, and one whose results leave.
MAX_PLACES = 3


class Admission:
    """A request's place in a queue: waited for, or granted."""

    def __init__(self, priority: int, came_s: float, number: int) -> None:
        """Queue by priority, then by when it came and its number; a paused request keeps that order."""
        self.priority = priority
        self.order = (-priority, came_s, number)
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: "Admission") -> bool:
        return self.order < other.order


class PriorityQueue:
    """Lets a bounded number of requests inside; the others wait by priority, then in the order of arrival.

    The cost of a request here doesn't grow with the number of those inside.
    """

    def __init__(self, limit: int, urgent: int = 0) -> None:
        """Let `limit` requests inside at a time, and `urgent` more if each is more urgent than another inside."""
        self._limit, self._urgent = limit, urgent
        self._inside: set[Admission] = set()
        self._priorities: Counter[int] = Counter()  # Of the requests inside.
        self._heap: list[Admission] = []  # Those that wait, and some that have left since.
        self._waiting: set[Admission] = set()
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def enter(self, priority: int = 0, came_s: float = 0.0) -> AsyncIterator[Admission]:
        """Wait until there is room, and take it for the block.

        Args:
            priority: The higher goes first.
            came_s: When the request came, if it may have waited elsewhere before.
        """
        admission = Admission(priority, came_s, next(self._numbers))
        try:
            self._enqueue(admission)
            await admission.granted
            yield admission
        finally:
            self._remove(admission)

    def evict(self, error: Callable[[], Exception]) -> None:
        """Raise an error in all requests that wait; those inside go on."""
        waiting, self._heap = sorted(self._waiting), []
        self._waiting.clear()
        for admission in waiting:
            if not admission.granted.done():
                admission.granted.set_exception(error())

    @property
    def _first(self) -> Admission | None:
        """The request that is admitted next, or None."""
        while self._heap and self._heap[0] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _enqueue(self, admission: Admission) -> None:
        self._waiting.add(admission)
        heapq.heappush(self._heap, admission)
        self._admit()

    def _remove(self, admission: Admission) -> None:
        """Forget a request, whether it waits or is inside."""
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
    """Chooses, between two steps, whose denoising step is next on a slice: one request's at a time.

    A place is room for a request's arrays on the devices. Whatever waits for anything but the devices waits outside.

    Attributes:
        device: Held for one call of the slice. Encoding and decoding go between two steps of a request, urgent ones
            first.
        places: The places of requests that denoise.
        other_places: The places of requests that are encoded or decoded.
    """

    def __init__(self, max_paused: int = MAX_PAUSED) -> None:
        """Let at most `max_paused` requests be paused at a time."""
        super().__init__(limit=1)
        self.device = PriorityQueue(limit=1)
        self.places = PriorityQueue(MAX_PLACES, max_paused)
        self.other_places = PriorityQueue(MAX_PLACES, max_paused)
        self._max_paused = max_paused
        self._paused: set[Admission] = set()  # Until they run again, or are removed.

    def must_pause(self, admission: Admission) -> bool:
        """Return whether the request that runs must pause, now that it is between two steps."""
        self._paused.discard(admission)
        first = self._first
        return first is not None and first.priority > admission.priority and len(self._paused) < self._max_paused

    def pause(self, admission: Admission) -> asyncio.Future[None]:
        """Let the more urgent request run; return a future that is done, or raises, when this one may go on."""
        self._exit(admission)
        self._paused.add(admission)
        admission.granted = asyncio.get_running_loop().create_future()
        self._enqueue(admission)
        return admission.granted

    def evict(self, error: Callable[[], Exception]) -> None:
        """Raise an error in all that wait for a step or a place, or are paused; the request that runs goes on."""
        for queue in (self.places, self.other_places):
            queue.evict(error)
        super().evict(error)

    def _remove(self, admission: Admission) -> None:
        self._paused.discard(admission)
        super()._remove(admission)
