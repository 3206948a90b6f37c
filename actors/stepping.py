"""The steps of requests on one slice: who takes them when, and when one holds still for a more urgent one, or moves.

The choice is made between steps, never in one. A request that holds still keeps its arrays on the devices, and a
snapshot of its state is taken; its next step is the one that it would have taken.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from actors.calls import Calls
from actors.errors import StageMoved
from actors.exchange import Shelf
from actors.host_values import Plan
from actors.keeping import Keeping
from actors.leaving import Leaving
from actors.timeline import Span
from actors.together import Together
from actors.turn import Place, Turn
from wan_tpu.expert import Expert

HELD_STILL = 1  # turns that may be held still at a time: their text keys stay on the devices, beside those that step
DRIVER_S = 5.0  # between two looks whether anybody still waits for a request


@dataclass(frozen=True)
class Visit:
    """A request at the slice.

    key, kept  names of the request and of its snapshots; held  under which the hosts hold it
    experts    those of this pool, whose steps it is here for
    """

    key: str
    held: str
    kept: str
    plan: Plan
    experts: tuple[Expert, ...]
    priority: int
    shelf: Shelf

    @property
    def stage(self) -> str:
        """The first of its stages here."""
        return self.experts[0].stage

    @property
    def last(self) -> int:
        """How many steps are done at the end."""
        return max(expert.stop for expert in self.experts)


class Stepping:
    """One slice's."""

    def __init__(
        self,
        calls: Calls,
        keeping: Keeping,
        leaving: Leaving,
        lane: asyncio.Lock,
        *,
        batch: int,
        snapshot_every: int,
        at: Callable[[str, str], AbstractContextManager[None]],
        span: Callable[[str, str, float, int], Span],
    ) -> None:
        """at: held while a request (key, stage) has its turn; span: makes one of key, stage, start and step."""
        self.turn = Turn(batch, HELD_STILL * batch)
        self._together = Together(lambda held: calls.call("step", held), lane)
        self._calls, self._keeping, self._leaving, self._lane = calls, keeping, leaving, lane
        self._snapshot_every, self._at, self._span = snapshot_every, at, span

    async def run(self, visit: Visit, done: int) -> AsyncGenerator[Span, None]:
        """Run the steps after the first `done`, a span each.

        Raises `StageMoved` when the slice is taken away before the last step could be done, a snapshot taken.
        """
        self._leaving.check()
        async with self.turn.held(visit.plan.shapes[visit.stage], visit.priority) as place:
            with self._at(visit.key, visit.stage):
                async with self._together.member(visit.held):
                    async for span in self._steps(visit, done, place):
                        yield span

    async def _steps(self, visit: Visit, done: int, place: Place) -> AsyncIterator[Span]:
        asked = time.monotonic()
        while done < visit.last:
            async with self._lane:
                begun: float | None = time.time()
                expert = await self._calls.call("begin", visit.held)
            while done < expert.stop:
                if self.turn.wanted(place):
                    await self._hold_still(visit, place)
                    begun = None
                stepped = await self._together.step(visit.held, visit.plan.shapes[expert.stage])
                done = stepped.done.step
                span = self._span(visit.key, expert.stage, begun or stepped.start_s, done)
                begun = None
                yield span
                if self._leaving.must_go((visit.last - done) * span.seconds):
                    await self._together.leave(visit.held)  # the others go on while this one's state is copied out
                    raise await self._moved(visit)
                if done % self._snapshot_every == 0 and done < visit.plan.request.steps:
                    self._keeping.beside(visit.held, visit.kept)
                if time.monotonic() > asked + DRIVER_S:  # Serve doesn't end a stream whose reader was killed
                    await visit.shelf.check()
                    asked = time.monotonic()

    async def _hold_still(self, visit: Visit, place: Place) -> None:
        """Return when it is this one's turn again; a drain moves it at once."""
        await self._together.leave(visit.held)
        entered = self.turn.hold_still(place)
        self._keeping.beside(visit.held, visit.kept)
        while not entered.done():
            await asyncio.wait([entered], timeout=DRIVER_S)
            if not entered.done():
                await visit.shelf.check()
        try:
            entered.result()
        except StageMoved:
            raise await self._moved(visit) from None
        self._together.join(visit.held)

    async def _moved(self, visit: Visit) -> StageMoved:
        """Return what is raised, once the state is saved."""
        await self._keeping.settled(visit.held)
        step = await self._keeping.now(visit.held, visit.kept)
        return StageMoved(f"the slice is being drained; {visit.key} goes on elsewhere after step {step}")
