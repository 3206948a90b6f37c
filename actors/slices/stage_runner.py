"""Requests on their way through the stages of one pool, on its slice.

While the slice computes for one request, the next one's inputs are fetched and put on the devices, and the results of
the one before leave. Every stage is a stream of events that ends with one `StageResult`. Payloads wait in the request's
scope; streams carry handles of them.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator
from typing import Any

from actors.errors import RequestFailed, StageLost, StageMoved, StageWaited
from actors.observe.span import Span, Start, What
from actors.pipeline_spec import Chips
from actors.slices.async_slice import AsyncSlice, FailureTracker, to_the_end
from actors.slices.autoscaling import SliceTime
from actors.slices.drain import DrainState
from actors.slices.messages import Event, InputsTaken, SliceRequest, StageResult
from actors.slices.references import RefHandle, RequestScope
from actors.slices.scheduler import Admission, PriorityQueue, StepScheduler
from actors.slices.snapshots import Snapshotter
from cluster.gang.protocol import Group
from wan_tpu.plan import DECODER, ENCODER, Expert, RequestPlan
from wan_tpu.request import ResolvedRequest
from wan_tpu.stage_machine import HandOver, StageMachine, Step

log = logging.getLogger(__name__)

MAX_LEFT = 64  # Payloads remembered for adoption: those of sixteen requests for an encoder are 48.
FETCHED_S = 2.0  # A payload may take this long to those who asked for it before it was adopted.
DRIVER_S = 5.0  # Seconds between two looks whether anybody still waits for a request.


@dataclasses.dataclass(frozen=True)
class PoolOfSlice:
    """What doesn't change: which pool a slice belongs to, and what figures of it are marked with.

    patience_s  how long a request may wait for a place here before it looks for another replica; None: there is none
    """

    pool: str
    stages: tuple[str, ...]
    name: str
    chips: Chips
    snapshot_every: int
    patience_s: float | None


@dataclasses.dataclass
class _Visit:
    """A request on the hosts: the name of its arrays there, and whether they have been taken out by now."""

    held: str
    is_empty: bool = False


class StageRunner:
    """The stages of one slice.

    work       (stage, request) of what is computed or paused
    scheduler  whose turn it is
    time       how long requests keep the slice
    """

    def __init__(
        self,
        where: PoolOfSlice,
        slice_: AsyncSlice,
        snapshotter: Snapshotter,
        drain: DrainState,
        doubts: FailureTracker,
        on_work: Callable[[], object],
    ) -> None:
        """on_work: called whenever `work` has changed."""
        self._where, self._slice, self._snapshotter = where, slice_, snapshotter
        self._drain, self._doubts, self._on_work = drain, doubts, on_work
        self.work: list[tuple[str, str]] = []
        self.scheduler = StepScheduler()
        self.time = SliceTime()
        self._visits = itertools.count(1)
        self._left: deque[tuple[RequestScope, RefHandle]] = deque(maxlen=MAX_LEFT)

    async def encode_text(self, request: SliceRequest, prompt: str) -> AsyncGenerator[Event, None]:
        """Encode a prompt: one `TextEmbedding`."""
        with self._serving(request, ENCODER):
            spans, warnings, ref = await self._compute(request, ENCODER, "one prompt", "encode_text", prompt)
            for span in spans:
                yield span
            yield StageResult(await self._leave(request.scope, ref), warnings=warnings)

    async def encode_image(self, request: SliceRequest, given: ResolvedRequest) -> AsyncGenerator[Event, None]:
        """Encode the image of a request, given as it was made: one `ImageCondition`."""
        shape = request.plan.shapes[ENCODER]
        with self._serving(request, ENCODER):
            async with self._visit(request, self.scheduler.other_places) as visit:
                start = Start()
                group: Group = "side" if given.video is None else "network"  # a video is read from a shared disk
                nbytes = (await self._slice.call("prepare_encode", visit.held, given, group=group)).value
                yield self._span(request.key, ENCODER, "fetch", start, nbytes=nbytes)
                yield InputsTaken(start.elapsed_s, nbytes)
                spans, warnings, ref = await self._compute(request, ENCODER, shape, "encode_image", visit.held)
                visit.is_empty = True
            for span in spans:
                yield span
            yield StageResult(await self._leave(request.scope, ref), warnings=warnings)

    async def check_adapters(self, request: SliceRequest) -> None:
        """Raise what a request's adapters would be refused with here: it is asked before anything is computed."""
        stage = request.plan.experts_on(self._where.stages)[0].stage
        with self._serving(request, stage):
            await self._slice.call("check_adapters", request.plan, group="network")

    async def denoise(
        self, request: SliceRequest, inputs: list[RefHandle | None], state: RefHandle | None, step: int | None
    ) -> AsyncGenerator[Event, None]:
        """Run all steps of this pool's experts that are left: one `DenoiseState`.

        Args:
            request: The request.
            inputs: Prompt, negative prompt or None, image or None.
            state: Where the pool before has left off.
            step: How many steps are done; None for none. Where there is no state, the snapshot after that step is
                loaded. After the last step there is nothing to run.

        Raises:
            StageMoved: The slice is taken away before the last step could be done; a snapshot has been taken.
        """
        key, plan, scope, stages = request.key, request.plan, request.scope, self._where.stages
        machine = StageMachine(plan).with_inputs().at_step(step)
        stage = machine.next_step.stage
        with self._serving(request, stage):
            # What may wait for the network comes before a place is taken, which others could have.
            fetch = Start()
            refs = await scope.get(*inputs, state)
            loaded = None
            if state is None and step is not None:
                loaded = await self._snapshotter.load(request.snapshots, step)
            if plan.request.loras:
                await self._slice.call("fetch_adapters", plan, group="network")
            fetched_s = fetch.elapsed_s
            async with self._visit(request, self.scheduler.places) as visit:
                if fetch.elapsed_s - fetched_s > FETCHED_S / 2:
                    refs = await self._again(scope, [*inputs, state], refs)
                start = Start()
                refs[-1] = loaded or refs[-1]
                nbytes = (await self._slice.side("prepare_denoise", visit.held, plan, *refs)).value
                del refs, loaded  # or the store would keep them until the last step
                yield self._span(key, stage, "fetch", start, nbytes=nbytes)
                yield InputsTaken(fetched_s + start.elapsed_s, nbytes)
                if isinstance(machine.next_step, Step):
                    async with contextlib.aclosing(self._steps(request, machine, visit.held)) as spans:
                        async for span in spans:
                            yield span
                start = Start()
                done, ref = await self._slice.save("collect", visit.held)
                visit.is_empty = True
            handle = await self._leave(scope, ref)
            if isinstance(machine.at_step(done).next_on(stages), HandOver):
                # The next pool starts from this; if that is lost before its first snapshot, nothing is done twice.
                self._snapshotter.keep(request, done, ref)
            yield self._span(key, plan.experts_on(stages)[-1].stage, "fetch", start)
            yield StageResult(handle, done)

    async def _steps(self, request: SliceRequest, machine: StageMachine, held: str) -> AsyncGenerator[Span, None]:
        """Run the steps, between which others may come first."""
        key, plan, scheduler, stages = request.key, request.plan, self.scheduler, self._where.stages
        expert: Expert | None = None
        async with contextlib.AsyncExitStack() as stack:
            try:
                self._drain.check()
                admission = await stack.enter_async_context(scheduler.entered(request.priority, request.came_s))
            except StageMoved as moved:  # the pool before has handed its state over, which is here alone now
                raise moved if machine.step is None else await self._moved(held, request) from None
            gone = await stack.enter_async_context(watched(request.scope))
            with self._working(key, machine.next_step.stage):
                while isinstance(operation := machine.next_on(stages), Step):
                    if scheduler.must_pause(admission):
                        await self._pause(admission, held, request, gone)
                    async with scheduler.device.entered(request.priority):
                        start, before_s = Start(), 0.0
                        if operation.expert != expert:
                            expert, kind = operation.expert, _kind(plan, operation.expert)
                            [before_s] = (await self._slice.call("begin", held, like=kind)).value
                        compile_s, done = (await self._slice.call("step", held, like=kind)).value
                        spans = self._computed(key, expert.stage, start, before_s + compile_s, done)
                    machine = machine.at_step(done)
                    left = machine.steps_left_on(stages)
                    for span in spans:
                        yield span
                    if left and self._drain.too_late_for(left * spans[-1].seconds):
                        raise await self._moved(held, request)
                    if gone.done():
                        gone.result()
                    if left and done % self._where.snapshot_every == 0:
                        self._snapshotter.start(held, request)

    async def decode(self, request: SliceRequest, state: RefHandle) -> AsyncGenerator[Event, None]:
        """Decode final latents: one `EncodedVideo`."""
        plan = request.plan
        with self._serving(request, DECODER):
            fetch = Start()
            [ref] = await request.scope.get(state)
            fetched_s = fetch.elapsed_s
            async with self._visit(request, self.scheduler.other_places) as visit:
                if fetch.elapsed_s - fetched_s > FETCHED_S / 2:
                    [ref] = await self._again(request.scope, [state], [ref])
                start = Start()
                nbytes = (await self._slice.side("prepare_decode", visit.held, plan.request, ref)).value
                del ref
                yield self._span(request.key, DECODER, "fetch", start, nbytes=nbytes)
                yield InputsTaken(fetched_s + start.elapsed_s, nbytes)
                shape = plan.shapes[DECODER]
                spans, warnings, made = await self._compute(request, DECODER, shape, "decode", visit.held)
                visit.is_empty = True
            for span in spans:
                yield span
            yield StageResult(await self._leave(request.scope, made), warnings=warnings)

    async def adopt(self) -> None:
        """Have everything outlive this leader that still waits for its next stage."""
        with self._drain.staying():
            adopting = (scope.adopt(handle) for scope, handle in self._left)
            await asyncio.gather(*adopting, return_exceptions=True)
            await asyncio.sleep(FETCHED_S)

    # ----

    async def _pause(self, admission: Admission, held: str, request: SliceRequest, gone: asyncio.Future[None]) -> None:
        """Let a more urgent request run, and return when this one may go on; a drain moves it at once."""
        granted = self.scheduler.pause(admission)
        self._snapshotter.start(held, request, skip=False)  # it may not run again for long
        await asyncio.wait([granted, gone], return_when=asyncio.FIRST_COMPLETED)
        if not granted.done():
            gone.result()
        try:
            granted.result()
        except StageMoved:
            raise await self._moved(held, request) from None

    async def _moved(self, held: str, request: SliceRequest) -> StageMoved:
        """Return what is raised, once the state is saved."""
        await self._snapshotter.settle(held)
        step = await self._snapshotter.take(held, request)
        where = "from its last snapshot" if step is None else f"after step {step}"
        return StageMoved(f"the slice is being drained; {request.key} goes on elsewhere {where}")

    async def _again(self, scope: RequestScope, handles: list[RefHandle | None], before: list[Any]) -> list[Any]:
        """Return the references of some handles anew: others own the payloads by now where their makers have gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FETCHED_S):
                return await scope.get(*handles)
        return before

    async def _leave(self, scope: RequestScope, ref: Any) -> RefHandle:
        """Leave a payload for its next stage, which outlives this leader where that is about to go."""
        handle = await scope.put(ref)
        self._left.append((scope, handle))
        if self._drain.begun:
            await scope.adopt(handle)
        return handle

    @contextlib.contextmanager
    def _serving(self, request: SliceRequest, stage: str) -> Iterator[None]:
        """Keep the leader until a stage has ended, and note whether the slice is to be doubted."""
        with self._drain.staying(), self._doubts.watching(stage, request.key):
            yield

    @contextlib.asynccontextmanager
    async def _visit(self, request: SliceRequest, places: PriorityQueue) -> AsyncIterator["_Visit"]:
        """Take a place on the devices, and drop what the hosts hold of the request, however it ends.

        It has a name of this visit only: somebody who has lost sight of the request may have sent it here once more.
        """
        visit = _Visit(f"{request.key} {next(self._visits)}")
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._where.patience_s):
                    await stack.enter_async_context(places.entered(request.priority, request.came_s))
            except TimeoutError:
                raise StageWaited(f"{request.key} has waited for a place on {self._where.name}") from None
            self._drain.check()
            try:
                yield visit
            finally:
                await to_the_end(self._let_go(visit))

    async def _let_go(self, visit: "_Visit") -> None:
        await self._snapshotter.settle(visit.held)
        if not visit.is_empty:
            with contextlib.suppress(StageLost, RequestFailed):
                await self._slice.side("drop", visit.held)

    async def _compute(
        self, request: SliceRequest, stage: str, shape: str, method: str, *args: Any
    ) -> tuple[list[Span], tuple[str, ...], Any]:
        """Keep the devices for one call of the hosts; return its spans, warnings and payload."""
        async with self.scheduler.device.entered(request.priority):
            self._drain.check()
            with self._working(request.key, stage):
                start = Start()
                (compile_s, warnings), ref = await self._slice.call(method, *args, like=shape)
                return self._computed(request.key, stage, start, compile_s), tuple(warnings), ref

    def _computed(self, key: str, stage: str, start: Start, compile_s: float, step: int | None = None) -> list[Span]:
        """Return what the slice has done since then: compiled, which comes first or nearly so, and computed."""
        span = self._span(key, stage, "compute", start, step=step)
        if not compile_s:
            return [span]
        compiled = dataclasses.replace(span, what="compile", seconds=compile_s, step=None)
        computed_s = max(0.0, span.seconds - compile_s)
        return [compiled, dataclasses.replace(span, start_s=compiled.end_s, seconds=computed_s)]

    @contextlib.contextmanager
    def _working(self, key: str, stage: str) -> Iterator[None]:
        self.work.append((stage, key))
        self._on_work()
        try:
            with self.time.taken():
                yield
            self._doubts.end(stage)
        finally:
            self.work.remove((stage, key))
            self._on_work()

    def _span(
        self, key: str, stage: str, what: What, start: Start, *, step: int | None = None, nbytes: int | None = None
    ) -> Span:
        where, seconds = self._where, start.elapsed_s
        return Span(
            slice=where.name,
            request=key,
            stage=stage,
            what=what,
            start_s=start.wall_s,
            seconds=seconds,
            step=step,
            nbytes=nbytes,
            pool=where.pool,
            chips=where.chips,
        )


@contextlib.asynccontextmanager
async def watched(scope: RequestScope) -> AsyncIterator[asyncio.Future[None]]:
    """Give what raises `StageLost` once the driver of a request is gone: Serve ends no stream whose reader was killed.

    It is asked beside the work, and one that doesn't answer is not taken for dead.
    """

    async def watch() -> None:
        while True:
            await asyncio.sleep(DRIVER_S)
            try:
                async with asyncio.timeout(DRIVER_S):
                    await scope.check()
            except StageLost:
                raise
            except Exception as error:
                log.info("a driver doesn't say whether it is there: %s", error or type(error).__name__)

    watching = asyncio.create_task(watch())
    try:
        yield watching
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError, StageLost):
            if watching.done():
                watching.result()


def _kind(plan: RequestPlan, expert: Expert) -> Hashable | None:
    """Return what decides how long a step takes and what it needs; None where some are left out, as a cache does."""
    return None if plan.request.cache else (plan.shapes[expert.stage], expert.stage, expert.guided)
