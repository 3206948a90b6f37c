"""Who is next: a queue by priority, and the scheduler of one slice's steps, which pauses for who is more urgent."""

import asyncio
import bisect
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable

MOST_PAUSED = 1  # requests at a time: their text keys stay on the devices, beside those of the one that runs


class Admission:
    """A request's place in a queue: waited for, or granted."""

    def __init__(self, priority: int, number: int) -> None:
        """number: the order of arrival, which a paused request keeps."""
        self.priority = priority
        self.order = (-priority, number)
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class PriorityQueue:
    """A bounded number of requests inside, the others wait: by priority, then in the order of arrival."""

    def __init__(self, limit: int, urgent: int = 0) -> None:
        """limit: requests inside at a time; urgent: besides, for those more urgent than another inside."""
        self._limit, self._urgent = limit, urgent
        self._inside: list[Admission] = []
        self._waiting: list[Admission] = []  # sorted
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def entered(self, priority: int = 0) -> AsyncIterator[Admission]:
        """Wait until there is room, and take it for the block."""
        admission = Admission(priority, next(self._numbers))
        try:
            self._enqueue(admission)
            await admission.granted
            yield admission
        finally:
            self._leave(admission)

    def _enqueue(self, admission: Admission) -> None:
        bisect.insort(self._waiting, admission, key=lambda one: one.order)
        self._admit()

    def _leave(self, admission: Admission) -> None:
        """Forget a request wherever it is."""
        for requests in (self._inside, self._waiting):
            if admission in requests:
                requests.remove(admission)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].priority):
            first = self._waiting.pop(0)
            if not first.granted.cancelled():
                self._inside.append(first)
                first.granted.set_result(None)

    def _has_room(self, priority: int) -> bool:
        if len(self._inside) < self._limit:
            return True
        least = min((one.priority for one in self._inside), default=priority)
        return len(self._inside) < self._limit + self._urgent and priority > least


class StepScheduler(PriorityQueue):
    """Whose denoising step is next on a slice: one request at a time. The choice is made between two steps.

    device  held for one call of the slice; encoding and decoding go between two steps of a request, first come first
    """

    def __init__(self, most_paused: int = MOST_PAUSED) -> None:
        """most_paused: how many requests may be paused at a time."""
        super().__init__(limit=1)
        self.device = asyncio.Lock()
        self._most_paused = most_paused
        self._paused: set[Admission] = set()  # until they run again, or leave

    def must_pause(self, admission: Admission) -> bool:
        """Whether the request that runs is to pause, now that it is between two steps."""
        self._paused.discard(admission)
        urgent = bool(self._waiting) and self._waiting[0].priority > admission.priority
        return urgent and len(self._paused) < self._most_paused

    def pause(self, admission: Admission) -> asyncio.Future[None]:
        """Let the more urgent request run; return what is done when this one may go on, or raises."""
        self._inside.remove(admission)
        self._paused.add(admission)
        admission.granted = asyncio.get_running_loop().create_future()
        self._enqueue(admission)
        return admission.granted

    def evict(self, error: Callable[[], Exception]) -> None:
        """Raise this in all that wait or are paused; the one that runs goes on."""
        waiting, self._waiting = self._waiting, []
        for admission in waiting:
            if not admission.granted.done():
                admission.granted.set_exception(error())

    def _leave(self, admission: Admission) -> None:
        self._paused.discard(admission)
        super()._leave(admission)
