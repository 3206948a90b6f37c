"""Whose turn it is on a slice: one request's alone, or that of a few whose steps are run together."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class Turn:
    """Held by one at a time, or by several of one shape at once; first come, first served.

    Who comes joins those that hold it if there is room and nobody waits. So once somebody of another shape waits,
    nobody new joins, and its turn comes when those that have it now are done.
    """

    def __init__(self, together: int) -> None:
        """together: how many of one shape may hold it at once."""
        self._together = together
        self._shape: str | None = None
        self._holders = 0
        self._waiting: deque[tuple[str | None, asyncio.Future[None]]] = deque()

    def taken(self) -> bool:
        """Whether anybody holds it."""
        return self._holders > 0

    @contextlib.asynccontextmanager
    async def held(self, shape: str | None = None) -> AsyncIterator[None]:
        """Wait for the turn and keep it; shape: None for what must be alone."""
        if not self._waiting and self._has_room(shape):
            self._enter(shape)
        else:
            await self._wait(shape)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, shape: str | None) -> None:
        place = (shape, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            await place[1]
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
                self._admit()  # those behind may have been waiting for this one's turn only
            elif not place[1].cancelled():
                self._leave()  # it was given the turn and cancelled at the same time
            raise

    def _has_room(self, shape: str | None) -> bool:
        return not self._holders or (shape is not None and shape == self._shape and self._holders < self._together)

    def _enter(self, shape: str | None) -> None:
        self._shape = shape
        self._holders += 1

    def _leave(self) -> None:
        self._holders -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._has_room(self._waiting[0][0])):
            shape, place = self._waiting.popleft()
            if not place.cancelled():
                self._enter(shape)
                place.set_result(None)
