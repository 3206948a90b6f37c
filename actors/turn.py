"""Whose turn it is on a slice: one request's alone, or that of a few whose steps are run together.

A more urgent one takes the turn between two steps: who holds it asks `wanted` there, and gives way with `hold_still`.
"""

import asyncio
import bisect
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable


class Place:
    """A place at the turn, or in the line before it."""

    def __init__(self, shape: str | None, priority: int, number: int) -> None:
        """number: the order of arrival, which one that holds still keeps."""
        self.shape, self.priority, self.number = shape, priority, number
        self.entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def order(self) -> tuple[int, int]:
        """What the line is sorted by: the most urgent first, then who came first."""
        return -self.priority, self.number


class Turn:
    """Held by one at a time, or by several of one shape at once; by priority, then first come, first served.

    Who is first in line joins those that hold it if there is room. So once somebody of another shape is first, nobody
    new joins, and its turn comes when those that have it now are done, or, if it is more urgent, have given way.
    """

    def __init__(self, together: int, still: int = 0) -> None:
        """together: how many of one shape may hold it at once; still: how many may hold still at a time."""
        self._together, self._still = together, still
        self._holders: list[Place] = []
        self._line: list[Place] = []  # sorted
        self._stilled: set[Place] = set()
        self._numbers = itertools.count()

    def taken(self) -> bool:
        """Whether anybody holds it, or holds still."""
        return bool(self._holders or self._stilled)

    @contextlib.asynccontextmanager
    async def held(self, shape: str | None = None, priority: int = 0) -> AsyncIterator[Place]:
        """Wait for the turn and keep it; shape: None for what must be alone."""
        place = Place(shape, priority, next(self._numbers))
        try:
            await self._enter(place)
            yield place
        finally:
            self._leave(place)

    def wanted(self, place: Place) -> bool:
        """Whether this holder is to give way, now that it is between two steps."""
        return place in self._to_give_way()

    def hold_still(self, place: Place) -> asyncio.Future[None]:
        """Give the turn to who wants it more; return what is done when it is this one's again, or raises."""
        self._holders.remove(place)
        self._stilled.add(place)
        place.entered = asyncio.get_running_loop().create_future()
        self._wait(place)
        return place.entered

    def send_away(self, error: Callable[[], Exception]) -> None:
        """Raise this in all that wait or hold still; those that have the turn keep it."""
        waiting, self._line = self._line, []
        for place in waiting:
            if not place.entered.done():
                place.entered.set_exception(error())

    async def _enter(self, place: Place) -> None:
        self._wait(place)
        await place.entered

    def _wait(self, place: Place) -> None:
        bisect.insort(self._line, place, key=lambda one: one.order)
        self._admit()

    def _leave(self, place: Place) -> None:
        """Wherever it is: among the holders, in the line, or sent away."""
        self._stilled.discard(place)
        for where in (self._holders, self._line):
            if place in where:
                where.remove(place)
        self._admit()  # those behind may have been waiting for this one's turn only

    def _has_room(self, shape: str | None) -> bool:
        joins = shape is not None and all(shape == holder.shape for holder in self._holders)
        return not self._holders or (joins and len(self._holders) < self._together)

    def _admit(self) -> None:
        while self._line and (self._line[0].entered.cancelled() or self._has_room(self._line[0].shape)):
            place = self._line.pop(0)
            if not place.entered.cancelled():
                self._holders.append(place)
                self._stilled.discard(place)
                place.entered.set_result(None)

    def _to_give_way(self) -> list[Place]:
        """Return the holders that the first in line takes the turn from: all of them, or of its own shape one."""
        if not self._line:
            return []
        first = self._line[0]
        less = sorted((holder for holder in self._holders if holder.priority < first.priority), key=lambda h: h.order)
        if first.shape is not None and all(first.shape == holder.shape for holder in self._holders):
            less = less[-1:]
        elif len(less) < len(self._holders):
            return []
        return less if len(less) + len(self._stilled) <= self._still else []
