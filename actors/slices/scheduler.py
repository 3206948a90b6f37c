"""A queue by priority, and the scheduler of one slice, which pauses a request for a more urgent one."""

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable

# The most requests that are paused at a time. Their text keys stay on the devices beside those of the running request.
MAX_PAUSED = 1
# The most requests with arrays on the devices: one that computes, the next one, and one whose results are copied out.
MAX_PLACES = 3


class Admission:
    """A request's place in a queue, which is granted or still waited for."""

    def __init__(self, priority: int, arrival_s: float, number: int) -> None:
        """Queue by priority, then by time of arrival, then by number. A paused request keeps its position."""
        self.priority = priority
        self.order = (-priority, arrival_s, number)
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: "Admission") -> bool:
        return self.order < other.order


class PriorityQueue:
    """Admits a bounded number of requests. The others wait, ordered by priority and then by arrival.

    The cost of an admission doesn't grow with the number of admitted requests.
    """

    def __init__(self, limit: int, urgent: int = 0) -> None:
        """Admit `limit` requests at a time, and up to `urgent` more that are more urgent than an admitted one."""
        self._limit, self._urgent = limit, urgent
        self._inside: set[Admission] = set()
        self._priorities: Counter[int] = Counter()  # How many admitted requests have each priority.
        self._heap: list[Admission] = []  # The waiting requests, and some that have stopped waiting.
        self._waiting: set[Admission] = set()
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def enter(self, priority: int = 0, arrival_s: float = 0.0) -> AsyncIterator[Admission]:
        """Wait until there is room, and hold it for the block; `arrival_s` counts if a request waited elsewhere."""
        admission = Admission(priority, arrival_s, next(self._numbers))
        try:
            self._enqueue(admission)
            await admission.granted
            yield admission
        finally:
            self._remove(admission)

    def evict(self, error: Callable[[], Exception]) -> None:
        """Raise an error in all waiting requests; admitted requests go on."""
        waiting, self._heap = sorted(self._waiting), []
        self._waiting.clear()
        for admission in waiting:
            if not admission.granted.done():
                admission.granted.set_exception(error())

    @property
    def _first(self) -> Admission | None:
        while self._heap and self._heap[0] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _enqueue(self, admission: Admission) -> None:
        self._waiting.add(admission)
        heapq.heappush(self._heap, admission)
        self._admit()

    def _remove(self, admission: Admission) -> None:
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
    """Chooses, after each denoising step, which request runs the next step on a slice. Only one runs at a time.

    A place is room for a request's arrays on the devices. A request that waits for anything but the devices, such as a
    download, doesn't hold a place.
    """

    def __init__(self, max_paused: int = MAX_PAUSED) -> None:
        """Allow at most `max_paused` requests to be paused at a time."""
        super().__init__(limit=1)
        # Held for one call of the slice. Encoding and decoding run between two steps of a request, urgent requests
        # first.
        self.device = PriorityQueue(limit=1)
        self.places = PriorityQueue(MAX_PLACES, max_paused)  # The places of requests that are denoised.
        self.other_places = PriorityQueue(MAX_PLACES, max_paused)  # The places of requests that are encoded or decoded.
        self._max_paused = max_paused
        self._paused: set[Admission] = set()  # Requests are in here until they run again or are removed.

    def must_pause(self, admission: Admission) -> bool:
        """Return whether the running request, which is between two steps, must pause."""
        self._paused.discard(admission)
        first = self._first
        return first is not None and first.priority > admission.priority and len(self._paused) < self._max_paused

    def pause(self, admission: Admission) -> asyncio.Future[None]:
        """Let the more urgent request run. The returned future is done when this request may go on, or raises."""
        self._exit(admission)
        self._paused.add(admission)
        admission.granted = asyncio.get_running_loop().create_future()
        self._enqueue(admission)
        return admission.granted

    def evict(self, error: Callable[[], Exception]) -> None:
        """Raise an error in all requests that are paused, or wait for a step or a place; the running one goes on."""
        for queue in (self.places, self.other_places):
            queue.evict(error)
        super().evict(error)

    def _remove(self, admission: Admission) -> None:
        self._paused.discard(admission)
        super()._remove(admission)
