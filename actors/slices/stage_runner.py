"""Run requests through the stages of one pool, on one slice.

While the slice computes for one request, the inputs of the next are fetched and put on the devices, and the results of
the previous one are copied out. Every stage is a stream of events that ends with one `StageResult`. Payloads are held
in the request's scope; streams carry only their handles.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Sequence
from typing import Any

from actors.errors import RequestFailed, StageInterrupted, StageMoved, StageQueuedTooLong
from actors.observe.span import Span, SpanKind, Start, split_compute
from actors.pipeline_spec import Chips
from actors.slices.async_slice import AsyncSlice, FailureTracker, wait_despite_cancellation
from actors.slices.autoscaling import SliceTime
from actors.slices.chunk_publisher import ChunkPublisher
from actors.slices.drain import DrainState
from actors.slices.fragments import FragmentTaker, run_concurrently
from actors.slices.handover import PublishedPayloads, fetch_again
from actors.slices.messages import (
    ChunkDenoised,
    EncodedFragment,
    Event,
    InputsTaken,
    PreviewPainted,
    SliceRequest,
    StageResult,
)
from actors.slices.references import RefHandle, watch_driver
from actors.slices.scheduler import Admission, PriorityQueue, StepScheduler
from actors.slices.snapshots import Snapshotter
from cluster.gang.protocol import Lane
from wan_tpu.plan import DECODER, ENCODER, Expert, RequestPlan
from wan_tpu.request import ResolvedRequest
from wan_tpu.stage_machine import HandOver, StageMachine, Step

LOOK_S = 0.05  # Pause between two checks whether the next chunk of latents is there.


@dataclasses.dataclass(frozen=True)
class SliceFacts:
    """Constant facts about a slice: its pool, and what its spans are labelled with."""

    pool: str
    stages: tuple[str, ...]
    name: str
    chips: Chips
    snapshot_every: int  # Steps between two snapshots.
    # How long a request may wait for a place here before it tries another replica; None if the pool has only one
    # replica.
    patience_s: float | None


@dataclasses.dataclass
class Visit:
    """A request on the hosts: the key of its arrays there, and whether there are none (yet, or any more)."""

    host_key: str
    is_empty: bool = False


class StageRunner:
    """The stages of one slice, and the requests that visit it."""

    def __init__(
        self,
        facts: SliceFacts,
        slice_: AsyncSlice,
        snapshotter: Snapshotter,
        drain: DrainState,
        failures: FailureTracker,
        on_work: Callable[[], object],
    ) -> None:
        """Serve a pool's stages. `on_work` is called whenever `work` changes."""
        self._facts, self._slice, self._snapshotter = facts, slice_, snapshotter
        self._drain, self._failures, self._on_work = drain, failures, on_work
        self.work: list[tuple[str, str]] = []  # The stage and the request of everything that is running or paused.
        self.scheduler = StepScheduler()
        self.time = SliceTime()  # How long requests occupy the slice.
        self._visits = itertools.count(1)
        self.published = PublishedPayloads(drain)  # Payloads that their next stage may not have fetched yet.

    async def encode_text(self, request: SliceRequest, prompt: str) -> AsyncGenerator[Event, None]:
        """Encode a prompt; the result is a `TextEmbedding`."""
        with self._serve(request, ENCODER):
            plan, kind = request.plan, "one prompt"
            adapted = (plan,) if plan.adapts_text else ()
            if adapted:
                kind += " with adapters"
                await self._slice.call("fetch_text_adapters", plan, lane="network")
            text = plan.describe_text(prompt)
            call = self._compute(request, ENCODER, kind, "encode_text", text, *adapted)
            async with run_concurrently(call) as encoding:
                if span := await self._find_compiling(request.key, ENCODER, encoding):
                    yield span
                spans, warnings, ref, *seconds = await encoding
            spans[0] = dataclasses.replace(spans[0], chosen=self._explain_choice(request))
            for span in spans:
                yield span
            handle = await self.published.publish(request.scope, ref)
            yield StageResult(handle, warnings=warnings, seconds=next(iter(seconds), None))

    async def encode_image(self, request: SliceRequest, full_request: ResolvedRequest) -> AsyncGenerator[Event, None]:
        """Encode the image that `full_request` contains; the result is an `ImageCondition`."""
        shape = request.plan.shapes[ENCODER]
        with self._serve(request, ENCODER):
            async with self._enter_visit(request, self.scheduler.other_places) as visit:
                start = Start()
                # A video is read from a shared disk, which may be slow and would hold up the side lane.
                lane: Lane = "side" if full_request.video is None else "network"
                nbytes = (await self._slice.call("prepare_encode", visit.host_key, full_request, lane=lane)).value
                yield self._make_first_span(request, ENCODER, start, nbytes)
                yield InputsTaken(start.elapsed_s, nbytes)
                call = self._compute(request, ENCODER, shape, "encode_image", visit.host_key)
                async with run_concurrently(call) as encoding:
                    if span := await self._find_compiling(request.key, ENCODER, encoding):
                        yield span
                    spans, warnings, ref = await encoding
                visit.is_empty = True
            for span in spans:
                yield span
            yield StageResult(await self.published.publish(request.scope, ref), warnings=warnings)

    async def check_adapters(self, request: SliceRequest) -> None:
        """Raise the error that a request's adapters would cause here. Called before anything is computed."""
        stage = request.plan.experts_on(self._facts.stages)[0].stage
        with self._serve(request, stage):
            await self._slice.call("check_adapters", request.plan, lane="network")

    async def denoise(
        self, request: SliceRequest, inputs: list[RefHandle | None], state: RefHandle | None, step: int | None
    ) -> AsyncGenerator[Event, None]:
        """Run all remaining steps of this pool's experts; the result is a `DenoiseState`.

        Args:
            inputs: Prompt, negative prompt or None, image or None.
            state: The state that the previous pool has reached, or None.
            step: How many steps are done, or None. Without a state, the snapshot after that step is loaded. If all
                steps are done, nothing is run.

        Raises:
            StageMoved: The slice will be taken away before the last step can be done; a snapshot has been taken.
        """
        key, plan, scope, stages = request.key, request.plan, request.scope, self._facts.stages
        machine = StageMachine(plan).with_inputs().at_step(step)
        stage = machine.next_step.stage
        publisher = ChunkPublisher(self._slice, self.published, request)
        with self._serve(request, stage), contextlib.closing(publisher) as publishing:
            # Everything that may wait for the network is done before taking a place, which others can use meanwhile.
            fetch = Start()
            refs = await scope.get(*inputs, state)
            loaded, warnings = None, list[str]()
            if state is None and step is not None:
                loaded = await self._snapshotter.load(request.snapshots, step)
            if plan.request.loras:
                warnings = (await self._slice.call("fetch_adapters", plan, lane="network")).value
            fetched_s = fetch.elapsed_s
            async with self._enter_visit(request, self.scheduler.places) as visit:
                refs = await fetch_again(scope, [*inputs, state], refs, fetch.elapsed_s - fetched_s)
                start = Start()
                refs[-1] = loaded or refs[-1]
                args = (*refs, True) if request.previews else refs
                nbytes = (await self._slice.side("prepare_denoise", visit.host_key, plan, *args)).value
                # Chunks that an earlier run published may be lost, together with its slice or driver.
                starts_over = loaded is None or len(plan.chunk_stops) == 1
                chunks = 0 if starts_over else plan.count_denoised_chunks(machine.steps_done)
                del refs, args, loaded  # Otherwise the object store would keep them until the last step.
                yield self._make_first_span(request, stage, start, nbytes)
                yield InputsTaken(fetched_s + start.elapsed_s, nbytes)
                for chunk in range(chunks):
                    await publishing.add(visit.host_key, chunk)
                if isinstance(machine.next_step, Step):
                    steps = self._run_steps(request, machine, visit.host_key, publishing)
                    async with contextlib.aclosing(steps) as spans:
                        async for span in spans:
                            yield span
                start = Start()
                done, ref = await self._slice.save("collect", visit.host_key)
                visit.is_empty = True
            for event in await publishing.take_all():
                yield event
            handle = await self.published.publish(scope, ref)
            if isinstance(machine.at_step(done).next_on(stages), HandOver):
                # If the next pool is lost before its first snapshot, no step of this pool has to be repeated.
                self._snapshotter.keep(request, done, ref)
            yield self._make_span(key, plan.experts_on(stages)[-1].stage, "fetch", start)
            yield StageResult(handle, done, tuple(warnings))

    async def _run_steps(
        self, request: SliceRequest, machine: StageMachine, host_key: str, publishing: ChunkPublisher
    ) -> AsyncGenerator[Span | ChunkDenoised | PreviewPainted, None]:
        """Run the steps of this pool; more urgent requests may run between two of them."""
        key, plan, scheduler, stages = request.key, request.plan, self.scheduler, self._facts.stages
        expert: Expert | None = None
        async with contextlib.AsyncExitStack() as stack:
            try:
                self._drain.check()
                admission = await stack.enter_async_context(scheduler.enter(request.priority, request.arrival_s))
            except StageMoved as moved:  # A state that the previous pool handed over now exists only on this slice.
                raise moved if machine.step is None else await self._save_and_move(host_key, request) from None
            driver_gone = await stack.enter_async_context(watch_driver(request.scope))
            with self._list_work(key, machine.next_step.stage):
                while isinstance(operation := machine.next_on(stages), Step):
                    if scheduler.must_pause(admission):
                        await self._pause(admission, host_key, request, driver_gone)
                    async with scheduler.device.enter(request.priority):
                        start, before_s = Start(), 0.0
                        kind = find_step_kind(plan, operation, begins=operation.expert != expert)
                        if operation.expert != expert:
                            expert = operation.expert
                            async with run_concurrently(self._slice.call("begin", host_key, kind=kind)) as beginning:
                                if span := await self._find_compiling(key, expert.stage, beginning):
                                    yield span
                                [before_s] = (await beginning).value
                        async with run_concurrently(self._slice.call("step", host_key, kind=kind)) as stepping:
                            if span := await self._find_compiling(key, expert.stage, stepping):
                                yield span
                            compile_s, done, *previews = (await stepping).value
                        spans = self._make_spans(key, expert.stage, start, before_s + compile_s, done)
                    machine = machine.at_step(done)
                    steps_left = machine.steps_left_on(stages)
                    for span in spans:
                        yield span
                    for step, picture in previews:
                        yield PreviewPainted(step, picture)
                    if len(plan.chunk_stops) > 1 and done in plan.chunk_stops:
                        await publishing.add(host_key, plan.count_denoised_chunks(done) - 1)
                    for chunk in publishing.take():
                        yield chunk
                    if steps_left and self._drain.is_too_late_for(steps_left * spans[-1].seconds):
                        raise await self._save_and_move(host_key, request)
                    if driver_gone.done():
                        driver_gone.result()
                    if steps_left and done % self._facts.snapshot_every == 0:
                        self._snapshotter.start(host_key, request)

    async def decode(self, request: SliceRequest, state: RefHandle | None) -> AsyncGenerator[Event, None]:
        """Decode final latents. The result is an `EncodedVideo`, after the fragments if the request asks for them.

        Without a state, each chunk of the video is decoded as soon as it is denoised. If it has no chunks, the hosts
        draw the decoder's noise until it is denoised. A place is held only while latents are decoded. The mp4 stays
        open on the hosts from the first chunk to the last.
        """
        scope, plan = request.scope, request.plan
        shape, patience_s, next_fragment = plan.shapes[DECODER], self._facts.patience_s, 0
        count = len(plan.chunk_stops)
        chunks: Sequence[int | None] = [None]
        if state is None and count > 1:
            shape, chunks = f"{shape}, one of {count} chunks", range(count)
        with self._serve(request, DECODER):
            async with self._open_visit(request) as visit:
                if state is None and count == 1:
                    await self._slice.side("draw_ahead", visit.host_key, plan.request)
                    state = await self._wait_for_latents(request)
                else:
                    visit.is_empty = True
                for chunk in chunks:
                    fetch = Start()
                    [ref] = await scope.get(state) if chunk is None else [await self._wait_for_chunk(request, chunk)]
                    fetched_s = 0.0 if chunk is not None else fetch.elapsed_s
                    async with self._take_place(request, self.scheduler.other_places, patience_s):
                        if chunk is None:  # Chunks have been copied to a process that stays.
                            [ref] = await fetch_again(scope, [state], [ref], fetch.elapsed_s - fetched_s)
                        start = Start()
                        args = plan.request, ref, request.fragments, chunk
                        visit.is_empty = False
                        nbytes = (await self._slice.side("prepare_decode", visit.host_key, *args)).value
                        del args, ref
                        yield self._make_first_span(request, DECODER, start, nbytes)
                        yield InputsTaken(fetched_s + start.elapsed_s, nbytes)
                        taker = FragmentTaker(self._slice, visit.host_key, next_fragment)
                        call = self._compute(
                            request, DECODER, shape, "decode", visit.host_key, has_begun=taker.has_begun
                        )
                        async with run_concurrently(call) as decoding:
                            news = self._follow_decoding(request, decoding, taker)
                            async with contextlib.aclosing(news) as events:
                                async for event in events:
                                    yield event
                            spans, warnings, video = await decoding
                        next_fragment = taker.index
                    for span in spans:
                        yield span
                    patience_s = None  # Another replica can take over the video only before its first chunk is decoded.
                visit.is_empty = True
            yield StageResult(await self.published.publish(scope, video), warnings=warnings)

    # ----

    async def _follow_decoding(
        self, request: SliceRequest, decoding: asyncio.Task[Any], taker: FragmentTaker
    ) -> AsyncGenerator[Span | EncodedFragment, None]:
        """Yield that a decoder compiles, if it does, and the video's fragments if the request asks for them."""
        async with run_concurrently(self._find_compiling(request.key, DECODER, decoding)) as compiling:
            if request.fragments:
                async with run_concurrently(taker.take(decoding)) as taking:
                    await asyncio.wait([compiling, taking], return_when=asyncio.FIRST_COMPLETED)
                    if compiling.done() and (span := compiling.result()):
                        yield span
                    fragments = await taking
                while fragments:
                    for fragment in fragments:
                        yield fragment
                    fragments = await taker.take(decoding)
            elif span := await compiling:
                yield span

    async def _find_compiling(self, key: str, stage: str, work: asyncio.Task[Any]) -> Span | None:
        """Wait until work ends, and return None, or until the slice compiles for it: the span until now, then."""
        since = await self._slice.find_compiling(work)
        return None if since is None else self._make_span(key, stage, "compiling", since)

    async def _wait_for_latents(self, request: SliceRequest) -> RefHandle:
        """Return the handle of a request's final latents as soon as it is denoised."""
        while (handle := await request.scope.wait_for_latents()) is None:
            self._drain.check()
        return handle

    async def _wait_for_chunk(self, request: SliceRequest, chunk: int) -> Any:
        """Return the reference of a chunk's latents as soon as it is denoised."""
        while (ref := await request.scope.find_chunk(chunk)) is None:
            await asyncio.sleep(LOOK_S)
            self._drain.check()
        return ref

    async def _pause(
        self, admission: Admission, host_key: str, request: SliceRequest, driver_gone: asyncio.Future[None]
    ) -> None:
        """Let a more urgent request run, and return when this one may go on. A drain moves this one at once."""
        turn = self.scheduler.pause(admission)
        self._snapshotter.start(host_key, request, skip=False)  # It may take long until this request runs again.
        await asyncio.wait([turn, driver_gone], return_when=asyncio.FIRST_COMPLETED)
        if not turn.done():
            driver_gone.result()
        try:
            turn.result()
        except StageMoved:
            raise await self._save_and_move(host_key, request) from None

    async def _save_and_move(self, host_key: str, request: SliceRequest) -> StageMoved:
        """Save a request's state, and return the error that sends the request to another slice."""
        await self._snapshotter.settle(host_key)
        step = await self._snapshotter.take(host_key, request)
        where = "from its last snapshot" if step is None else f"after step {step}"
        return StageMoved(f"the slice is being drained; {request.key} continues on another slice {where}")

    # ---- Places, turns on the devices, and spans.

    @contextlib.contextmanager
    def _serve(self, request: SliceRequest, stage: str) -> Iterator[None]:
        """Keep the leader alive until a stage has ended, and count failures for which the slice may be to blame."""
        with self._drain.keep_leader(), self._failures.track(stage, request.key):
            yield

    @contextlib.asynccontextmanager
    async def _enter_visit(self, request: SliceRequest, places: PriorityQueue) -> AsyncIterator[Visit]:
        """Take a place on the devices for the block. However that ends, the hosts then drop the request's arrays."""
        async with self._take_place(request, places, self._facts.patience_s), self._open_visit(request) as visit:
            yield visit

    @contextlib.asynccontextmanager
    async def _take_place(
        self, request: SliceRequest, places: PriorityQueue, patience_s: float | None = None
    ) -> AsyncIterator[None]:
        """Take a place on the devices for the block; raise `StageQueuedTooLong` if none is free within `patience_s`."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(patience_s):
                    await stack.enter_async_context(places.enter(request.priority, request.arrival_s))
            except TimeoutError:
                raise StageQueuedTooLong(f"{request.key} has waited for a place on {self._facts.name}") from None
            self._drain.check()
            yield

    @contextlib.asynccontextmanager
    async def _open_visit(self, request: SliceRequest) -> AsyncIterator[Visit]:
        """Yield the request's key on the hosts. However the block ends, the hosts then drop the request's arrays.

        Every visit has a key of its own, because a driver that has lost track of a request may send it here again.
        """
        visit = Visit(f"{request.key} {next(self._visits)}")
        try:
            yield visit
        finally:
            await wait_despite_cancellation(self._release(visit))

    async def _release(self, visit: Visit) -> None:
        await self._snapshotter.settle(visit.host_key)
        if not visit.is_empty:
            with contextlib.suppress(StageInterrupted, RequestFailed):
                await self._slice.side("drop", visit.host_key)

    async def _compute(
        self,
        request: SliceRequest,
        stage: str,
        shape: str,
        method: str,
        *args: Any,
        has_begun: asyncio.Event | None = None,
    ) -> tuple[Any, ...]:
        """Hold the devices for one call, and set `has_begun` then.

        Returns:
            The call's spans, its warnings and its payload, and whatever else it has returned.
        """
        async with self.scheduler.device.enter(request.priority):
            self._drain.check()
            with self._list_work(request.key, stage):
                start = Start()
                if has_begun is not None:
                    has_begun.set()
                (compile_s, warnings, *more), ref = await self._slice.call(method, *args, kind=shape)
                return self._make_spans(request.key, stage, start, compile_s), tuple(warnings), ref, *more

    def _make_spans(self, key: str, stage: str, start: Start, compile_s: float, step: int | None = None) -> list[Span]:
        """Return the spans of a call that began at `start`, for compiling and for computing."""
        return split_compute(self._make_span(key, stage, "compute", start, step=step), compile_s)

    @contextlib.contextmanager
    def _list_work(self, key: str, stage: str) -> Iterator[None]:
        """List a request in `work` during the block, and measure how long it occupies the slice."""
        self.work.append((stage, key))
        self._on_work()
        try:
            with self.time.measure():
                yield
            self._failures.clear(stage)
        finally:
            self.work.remove((stage, key))
            self._on_work()

    def _make_first_span(self, request: SliceRequest, stage: str, start: Start, nbytes: int) -> Span:
        """Return the span of moving a request's inputs to the devices. It also says why this slice was chosen."""
        fetched = self._make_span(request.key, stage, "fetch", start, nbytes=nbytes)
        return dataclasses.replace(fetched, chosen=self._explain_choice(request))

    def _explain_choice(self, request: SliceRequest) -> str:
        """Return why the router chose this slice, or "" if it gave no reason."""
        return request.choices.get(self._facts.name.removeprefix(f"{self._facts.pool}/"), "")

    def _make_span(
        self, key: str, stage: str, kind: SpanKind, start: Start, *, step: int | None = None, nbytes: int | None = None
    ) -> Span:
        facts, seconds = self._facts, start.elapsed_s
        return Span(
            slice=facts.name,
            request=key,
            stage=stage,
            kind=kind,
            start_s=start.wall_s,
            seconds=seconds,
            step=step,
            nbytes=nbytes,
            pool=facts.pool,
            chips=facts.chips,
        )


def find_step_kind(plan: RequestPlan, step: Step, *, begins: bool) -> Hashable:
    """Return the key of steps that take equally long; `begins` says that it is the first one since `begin`.

    A cache saves the time of a step only if all of its branches reuse what the step before has left.
    """
    expert = step.expert
    branches = plan.skipped[step.index][: 2 if expert.guided else 1] if plan.skipped is not None else (False,)
    is_skipped = all(branches) and not begins
    return plan.shapes[expert.stage], expert.stage, expert.guided, plan.size_of(expert), is_skipped
