"""The denoising steps of the requests that hold a slice's turn: one call runs the next step of all of them.

A round begins when every member has asked for its next step, so nobody is left behind, and a member may come or go
between two rounds. Each is at a step of its own. Members of a pool of both experts may be at different ones: a round
then takes a call for each program.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from actors.errors import RequestFailed
from actors.host_values import StepDone
from wan_tpu.errors import UnhealthyResult

log = logging.getLogger(__name__)

Run = Callable[[Sequence[str]], Awaitable[list[StepDone | UnhealthyResult]]]


@dataclass(frozen=True)
class Stepped:
    """A member's step, and when the slice began with it (`time.time()`)."""

    done: StepDone
    start_s: float


@dataclass(frozen=True)
class _Asked:
    program: str
    answer: asyncio.Future[Stepped]


class Together:
    """The members, by the names under which the hosts hold them, and their rounds."""

    def __init__(self, run: Run, lane: asyncio.Lock) -> None:
        """run: step the members of these names at once, and return what came of each; lane: held meanwhile."""
        self._run, self._lane = run, lane
        self._members: set[str] = set()
        self._asked: dict[str, _Asked] = {}
        self._round: asyncio.Task[None] | None = None
        self._stepping: set[str] = set()
        self._apart = False

    @contextlib.asynccontextmanager
    async def member(self, held: str) -> AsyncIterator[None]:
        """Be one: from now on rounds wait until this one asks. At the end none of its steps is running."""
        self.join(held)
        try:
            yield
        finally:
            await self.leave(held)

    def join(self, held: str) -> None:
        """Be one again, after `leave`."""
        self._members.add(held)

    async def leave(self, held: str) -> None:
        """Be none any more, so that the others needn't wait; a second time does nothing."""
        self._members.discard(held)
        self._asked.pop(held, None)
        self._begin_round()
        if held in self._stepping and self._round is not None:
            await asyncio.wait([self._round])

    async def step(self, held: str, program: str) -> Stepped:
        """Run a member's next step, with those of all others whose next one is of the same program.

        Raises what is this member's own: `RequestFailed`; or everybody's: `StageLost`.
        """
        asked = _Asked(program, asyncio.get_running_loop().create_future())
        self._asked[held] = asked
        self._begin_round()
        return await asked.answer

    def _begin_round(self) -> None:
        if self._round is None and self._asked and self._members <= set(self._asked):
            asked, self._asked = self._asked, {}
            self._stepping = set(asked)
            self._round = asyncio.create_task(self._go_round(asked))

    async def _go_round(self, asked: dict[str, _Asked]) -> None:
        groups: dict[str, dict[str, asyncio.Future[Stepped]]] = {}
        for held, one in asked.items():
            groups.setdefault(held if self._apart else one.program, {})[held] = one.answer
        try:
            for group in groups.values():
                if await self._step(group) is not None:
                    await self._step_apart(group)
        finally:
            self._round, self._stepping = None, set()
            self._begin_round()

    async def _step(self, group: dict[str, asyncio.Future[Stepped]]) -> RequestFailed | None:
        """Step a group and answer it; of several, return a failure that may be of one of them, unanswered."""
        try:
            async with self._lane:
                start = time.time()
                results = await self._run(list(group))
        except RequestFailed as failed:
            if len(group) > 1:
                return failed
            _answer(group.values(), failed)
        except BaseException as error:
            _answer(group.values(), error)
            if not isinstance(error, Exception):
                raise
        else:
            for answer, done in zip(group.values(), results, strict=True):
                if isinstance(done, UnhealthyResult):
                    _answer([answer], RequestFailed(f"step: {done}", "unhealthy"))
                else:
                    _answer([answer], Stepped(done, start))
        return None

    async def _step_apart(self, group: dict[str, asyncio.Future[Stepped]]) -> None:
        """Step each alone: the failure is of one of them, or of having them together (no room, say)."""
        for held, answer in group.items():
            await self._step({held: answer})
        if all(answer.done() and not answer.cancelled() and not answer.exception() for answer in group.values()):
            self._apart = True
            log.error("requests that can be stepped alone can't be together: from now on each is stepped alone")


def _answer(answers: Iterable[asyncio.Future[Stepped]], result: Stepped | BaseException) -> None:
    for answer in answers:
        if answer.done():  # cancelled meanwhile
            continue
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(result)
