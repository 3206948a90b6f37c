"""Places that are given by priority, then in the order of arrival; a few beyond them only to what is more urgent."""

import asyncio
import bisect
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class _Waiting:
    urgency: int  # the negative priority
    number: int
    entered: asyncio.Future[None] = field(compare=False)


class Line:
    """A line before a bounded number of places."""

    def __init__(self, places: int, beyond: int) -> None:
        """beyond: places besides, for one that is more urgent than another inside."""
        self._places, self._beyond = places, beyond
        self._inside: list[int] = []  # priorities
        self._waiting: list[_Waiting] = []  # sorted
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def place(self, priority: int) -> AsyncIterator[None]:
        """Wait for a place and keep it."""
        mine = _Waiting(-priority, next(self._numbers), asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting, mine)
        self._admit()
        try:
            await mine.entered
            yield
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self._inside.remove(priority)
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room(-self._waiting[0].urgency):
            first = self._waiting.pop(0)
            self._inside.append(-first.urgency)
            if not first.entered.cancelled():
                first.entered.set_result(None)

    def _has_room(self, priority: int) -> bool:
        if len(self._inside) < self._places:
            return True
        return len(self._inside) < self._places + self._beyond and priority > min(self._inside)
