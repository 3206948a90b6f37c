"""A semaphore that serves keys fairly: the one that has used it least goes first."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_HALF_LIFE_S = 60.0  # Half of a key's use is forgotten in this time.
_HEAVY_S = 2.0  # Keys that have used more than this must leave one place free for others.


class FairSemaphore:
    """A number of places in total and per key. Heavy users come last, and leave one place free.

    Work under way isn't interrupted, so the free place is what keeps others from waiting for its end.
    """

    def __init__(self, places: int, of_a_key: int) -> None:
        self._free, self._of_a_key, self._of_the_heavy = places, of_a_key, max(1, places - 1)
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._in_place: dict[str, int] = defaultdict(int)
        self._used: dict[str, tuple[float, float]] = {}  # Seconds, and when they were counted, by key.

    def list_full(self) -> list[str]:
        """Return the keys that have as many places as they may, or wait for more."""
        return [*self._waiting, *(key for key, count in self._in_place.items() if count >= self._of_a_key)]

    @contextlib.asynccontextmanager
    async def take_turn(self, key: str) -> AsyncIterator[None]:
        """Wait for a place, and keep it until the block ends."""
        await self.enter(key)
        start = time.monotonic()
        try:
            yield
        finally:
            self.leave(key, time.monotonic() - start)

    async def enter(self, key: str) -> None:
        """Wait for a place, and take it."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(place)
        self._fill()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # The place was assigned at the same moment.
                self.leave(key, 0.0)
            else:
                self._stop_waiting(key, place)
            raise

    def leave(self, key: str, seconds: float) -> None:
        """Give a place back that was used for so long."""
        self._free += 1
        self._in_place[key] -= 1
        self._used[key] = self._measure_use(key) + seconds, time.monotonic()
        if not self._in_place[key]:
            del self._in_place[key]
        for idle in [other for other in self._used if self._measure_use(other) < 0.01 and other not in self._in_place]:
            del self._used[idle]
        self._fill()

    def _fill(self) -> None:
        while self._free:
            heavy = sum(count for key, count in self._in_place.items() if self._measure_use(key) > _HEAVY_S)
            able = [
                key
                for key in self._waiting
                if self._in_place.get(key, 0) < self._of_a_key
                and (heavy < self._of_the_heavy or self._measure_use(key) <= _HEAVY_S)
            ]
            if not able:
                return
            key = min(able, key=lambda candidate: (self._in_place.get(candidate, 0), self._measure_use(candidate)))
            first = self._waiting[key][0]
            self._stop_waiting(key, first)
            if key in self._waiting:
                self._waiting[key] = self._waiting.pop(key)  # Behind its equals.
            if first.done():  # Its task was cancelled, and hasn't noticed yet.
                continue
            self._free -= 1
            self._in_place[key] += 1
            first.set_result(None)

    def _stop_waiting(self, key: str, place: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key, [])
        if place in waiting:
            waiting.remove(place)
        if not waiting:
            self._waiting.pop(key, None)

    def _measure_use(self, key: str) -> float:
        """Return the seconds that a key has used, half of which are forgotten every minute."""
        seconds, moment = self._used.get(key, (0.0, 0.0))
        return seconds * 0.5 ** ((time.monotonic() - moment) / _HALF_LIFE_S)


class Work:
    """A few threads for work whose amount clients control, so that the event loop stays responsive."""

    def __init__(self, threads: int, of_a_key: int | None = None) -> None:
        """Set up so many threads, of which one key may have `of_a_key` at a time: all but one if omitted."""
        most = max(1, threads - 1) if of_a_key is None else of_a_key
        self._threads, self._turns = ThreadPoolExecutor(threads, "work"), FairSemaphore(threads, most)

    async def run(self, key: str, work: Callable[..., T], *args: object) -> T:
        """Call a function in a thread when it is the key's turn, and return its result."""
        async with self._turns.take_turn(key):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
