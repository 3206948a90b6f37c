"""Places that are taken in turn by key: who has used them least goes first."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_HALF_LIFE_S = 60.0  # of what a key has used
_HEAVY_S = 2.0  # what a key has used that leaves one place to others


class FairSemaphore:
    """So many places, of a key so many. Those that have taken them long come last, and leave one free.

    What is under way isn't interrupted: the place that is left is where others don't wait for its end.
    """

    def __init__(self, places: int, of_a_key: int) -> None:
        self._free, self._of_a_key, self._of_the_heavy = places, of_a_key, max(1, places - 1)
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._in_place: dict[str, int] = defaultdict(int)
        self._used: dict[str, tuple[float, float]] = {}  # key -> seconds, as of when

    @contextlib.asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for a place, and have it."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(mine)
        self._fill()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # the place was given at that moment
                self._leave(key, 0.0)
            else:
                self._no_longer(key, mine)
            raise
        start = time.monotonic()
        try:
            yield
        finally:
            self._leave(key, time.monotonic() - start)

    def _leave(self, key: str, seconds: float) -> None:
        self._free += 1
        self._in_place[key] -= 1
        self._used[key] = self._spent(key) + seconds, time.monotonic()
        if not self._in_place[key]:
            del self._in_place[key]
        for idle in [other for other in self._used if self._spent(other) < 0.01 and other not in self._in_place]:
            del self._used[idle]
        self._fill()

    def _fill(self) -> None:
        """Give the free places away."""
        while self._free:
            heavy = sum(count for key, count in self._in_place.items() if self._spent(key) > _HEAVY_S)
            able = [
                key
                for key in self._waiting
                if self._in_place.get(key, 0) < self._of_a_key
                and (heavy < self._of_the_heavy or self._spent(key) <= _HEAVY_S)
            ]
            if not able:
                return
            key = min(able, key=lambda one: (self._in_place.get(one, 0), self._spent(one)))
            first = self._waiting[key][0]
            self._no_longer(key, first)
            if first.done():  # who waited was cancelled, and hasn't noticed yet
                continue
            self._free -= 1
            self._in_place[key] += 1
            first.set_result(None)

    def _no_longer(self, key: str, one: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key, [])
        if one in waiting:
            waiting.remove(one)
        if not waiting:
            self._waiting.pop(key, None)

    def _spent(self, key: str) -> float:
        """Return the seconds that a key has used, of which half is forgotten every minute."""
        seconds, moment = self._used.get(key, (0.0, 0.0))
        return seconds * 0.5 ** ((time.monotonic() - moment) / _HALF_LIFE_S)


class Work:
    """Few threads, for work of the processor whose size a client chooses: an event loop answers others meanwhile."""

    def __init__(self, threads: int) -> None:
        self._threads, self._turns = ThreadPoolExecutor(threads, "work"), FairSemaphore(threads, max(1, threads - 1))

    async def run(self, key: str, work: Callable[..., T], *args: object) -> T:
        """Return what a function returns, called in the key's turn."""
        async with self._turns.turn(key):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
