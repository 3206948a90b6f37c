"""The actor that leads one slice: a small process on a CPU node that takes requests through the stages of its pool.

While the slice computes for one request, the next one's inputs are fetched and put on the devices, and the results of
the one before leave. Every stage is a stream: spans as they end, then one `StageResult`. Payloads wait in the request's
scope; streams carry handles of them.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from typing import Any

import ray
from ray import serve

from actors.errors import RequestFailed, StageFailed, StageLost, StageMoved
from actors.observe.span import Span, What
from actors.observe.status_actor import Activity, ReplicaSeen, StatusActor
from actors.pipeline_spec import Chips, PipelineSettings
from actors.slices.async_slice import AsyncSlice, Doubts, to_the_end
from actors.slices.autoscaling import LOAD, SliceTime
from actors.slices.drain import Drain
from actors.slices.messages import Event, HostProgress, SliceRequest, StageResult
from actors.slices.references import RefHandle, RequestScope
from actors.slices.scheduler import Admission, StepScheduler
from actors.slices.snapshots import Snapshots, Snapshotter
from cluster.draining import draining_for
from cluster.errors import CallFailed, DeviceFailed, SliceLost
from cluster.gang.slice import take
from cluster.layout import Pool
from wan_tpu.errors import InvalidInput
from wan_tpu.progress import counted
from wan_tpu.request import ResolvedRequest
from wan_tpu.spec import DECODER, ENCODER, Expert, RequestPlan

log = logging.getLogger(__name__)

SHAPES = 64  # that a leader is remembered to hold programs of, for routing
LEFT = 64  # payloads that a leader remembers to have made: those of sixteen requests for an encoder are 48
FETCHED_S = 2.0  # that a payload may take to those who asked for it before it was adopted
LEAVE_S = 0.5  # between the loss of a slice and the end of its leader: callers are told first
DRIVER_S = 5.0  # between two looks whether anybody still waits for a request


class SliceLeader:
    """A replica of a pool. Serve restarts it when its slice is lost; its callers go on elsewhere."""

    async def __init__(self, pool: Pool, settings: PipelineSettings) -> None:  # type: ignore[misc]
        """Take a slice, start its hosts, and let them read the weights of the pool's stages.

        Serve waits for it, and can end this process meanwhile: for its slice a leader may wait for days.
        """
        self._leaving = contextlib.ExitStack()  # what is let go of with this leader
        self._settings, self._stages, self._pool = settings, pool.stages, pool.name
        replica = serve.get_replica_context().replica_id.unique_id
        self._name = f"{self._pool}/{replica}"
        self._status = StatusActor.connect(settings.name)
        self._work: list[tuple[str, str]] = []  # stage and request, of what is computed or paused
        self._visits = itertools.count(1)
        self._holding: set[str] = set()  # what keeps it here: arrays that the hosts hold, payloads on their way
        self._doubts = Doubts(replica, self._replace)
        self._left: deque[tuple[RequestScope, RefHandle]] = deque(maxlen=LEFT)  # payloads for their next stage
        self._ended = False
        self._start_s: dict[str, float] = {}  # seconds of each phase of the start
        self._drain = Drain(self._name)
        self._time = SliceTime()
        self._scheduler = StepScheduler()
        self._where, self._software, start = "", dict[str, str](), time.time()
        self._report("starting", f"takes a {pool.slice} and starts its hosts")
        snapshots = Snapshots(settings.snapshots)
        await asyncio.to_thread(self._start, pool, snapshots)
        chips: Chips = "emulated" if settings.chips == "real" and self._hosts.emulated else settings.chips
        self._did: Callable[..., Span] = functools.partial(Span, slice=self._name, pool=self._pool, chips=chips)
        self._slice = AsyncSlice(self._hosts, self._lost)
        self._snapshotter = Snapshotter(self._slice, snapshots)
        self._status.started(self._pool, self._start_s)
        phases = ", ".join(f"{phase} in {seconds:.1f} s" for phase, seconds in self._start_s.items())
        self._report("idle", f"ready after {time.time() - start:.1f} s: {phases}")
        log.info("%s leads %s, ready after %.1f s: %s", self._name, self._where, time.time() - start, phases)

    def _start(self, pool: Pool, snapshots: Snapshots) -> None:
        settings = self._settings
        with contextlib.ExitStack() as starting:  # what is let go of when it can't be started
            try:
                snapshots.clean()
                self._hosts = take(
                    pool.slice,
                    settings.host_class,
                    *(settings.checkpoint, pool.stages, pool.mesh, settings.dtype, settings.executables),
                    name=self._name,
                    timeouts=settings.timeouts,
                    tell=lambda text: self._report("starting", text),
                )
                starting.callback(self._hosts.close)
                self._where, self._software = self._hosts.describe(), self._hosts.software
                self._load()
            except Exception as error:
                cause = error.__cause__ if isinstance(error, CallFailed) else error
                refused = isinstance(cause, InvalidInput)  # what would be refused again
                self._report("refused" if refused else "failed", str(cause if refused else error))
                raise  # the report stays, for whoever waits for this pool
            starting.callback(self._status.gone, self._name)
            self._leaving = starting.pop_all()

    def _load(self) -> None:
        """Have the hosts read their weights, and compile what is asked for ahead of the first request."""
        start = time.time()
        limit_s = self._settings.timeouts.build_s  # without progress
        self._hosts.call("load", timeout_s=limit_s, on_progress=self._telling("loading"))
        self._start_s = self._hosts.start_s | {"read": time.time() - start}
        start = time.time()
        for request in self._settings.warm_up:
            self._hosts.call("warm_up", request, timeout_s=limit_s, on_progress=self._telling("compiling"))
        if self._settings.warm_up:
            self._start_s["compiled"] = time.time() - start

    def _telling(self, activity: Activity) -> Callable[[HostProgress], None]:
        return lambda now: self._report(activity, f"{now.item}, {counted(now.done, now.total, now.unit)}")

    # ---- the stages

    async def encode_text(self, request: SliceRequest, prompt: str) -> AsyncIterator[Event]:
        """Encode a prompt: one `TextEmbedding`."""
        async for event in self._compute(request, ENCODER, "one prompt", "encode_text", prompt):
            yield event

    async def encode_image(self, request: SliceRequest, given: ResolvedRequest) -> AsyncIterator[Event]:
        """Encode the image of a request, given as it was made: one `ImageCondition`."""
        shape = request.plan.shapes[ENCODER]
        await self._hold(shape)
        start = time.time()
        async with self._held(request.key, ENCODER) as held:
            nbytes = (await self._slice.side("prepare_encode", held, given)).value
            yield self._span(request.key, ENCODER, "fetch", start, nbytes=nbytes)
            async for event in self._compute(request, ENCODER, shape, "encode_image", held):
                yield event

    async def denoise(
        self, request: SliceRequest, inputs: list[RefHandle | None], state: RefHandle | None, snapshot: int | None
    ) -> AsyncIterator[Event]:
        """Run all steps of this pool's experts: one `DenoiseState`.

        inputs    prompt, negative prompt or None, image or None
        state     where the pool before has left off
        snapshot  the step of the one to go on from, in place of a state

        Raises `StageMoved` when the slice is taken away before the last step could be done, a snapshot taken.
        """
        key, plan, scope = request.key, request.plan, request.scope
        experts = tuple(expert for expert in plan.experts if expert.stage in self._stages)
        done, last = snapshot or experts[0].start, experts[-1].stop
        await self._hold(plan.shapes[experts[0].stage])
        async with self._held(key, experts[0].stage) as held:
            start = time.time()
            refs = await scope.get(*inputs, state)
            if snapshot is not None:
                refs[-1] = await self._snapshotter.load(request.snapshots, snapshot)
            nbytes = (await self._slice.side("prepare_denoise", held, plan, *refs)).value
            del refs  # or the store would keep them until the last step
            yield self._span(key, experts[0].stage, "fetch", start, nbytes=nbytes)
            self._drain.check()
            async with self._scheduler.entered(request.priority) as admission:
                with self._working(key, experts[0].stage):
                    checked_s, expert = time.monotonic(), None
                    while done < last:
                        if self._scheduler.must_pause(admission):
                            await self._pause(admission, held, request)
                        async with self._scheduler.device:
                            start, before_s = time.time(), 0.0
                            if expert is None or done >= expert.stop:
                                expert = next(one for one in experts if done < one.stop)
                                kind = _kind(plan, expert)
                                before_s, expert = (await self._slice.call("begin", held, like=kind)).value
                            compile_s, done = (await self._slice.call("step", held, like=kind)).value
                            spans = self._computed(key, expert.stage, start, before_s + compile_s, done)
                        for span in spans:
                            yield span
                        if self._drain.too_late_for((last - done) * span.seconds):
                            raise await self._moved(held, request)
                        if done % self._settings.snapshot_every == 0 and done < plan.request.steps:
                            self._snapshotter.start(held, request.snapshots)
                        if time.monotonic() > checked_s + DRIVER_S:  # Serve ends no stream whose reader was killed
                            await scope.check()
                            checked_s = time.monotonic()
            start = time.time()
            done, ref = await self._slice.side("collect", held)
            if done < plan.request.steps:
                # The next pool starts from this; if that is lost before its first snapshot, nothing is done twice.
                await self._snapshotter.save(request.snapshots, done, ref)
            yield self._span(key, experts[-1].stage, "fetch", start)
            yield StageResult(await self._leave(scope, ref), done)

    async def decode(self, request: SliceRequest, state: RefHandle) -> AsyncIterator[Event]:
        """Decode final latents: one `EncodedVideo`."""
        plan = request.plan
        await self._hold(plan.shapes[DECODER])
        start = time.time()
        async with self._held(request.key, DECODER) as held:
            [ref] = await request.scope.get(state)
            nbytes = (await self._slice.side("prepare_decode", held, plan.request, ref)).value
            del ref
            yield self._span(request.key, DECODER, "fetch", start, nbytes=nbytes)
            async for event in self._compute(request, DECODER, plan.shapes[DECODER], "decode", held):
                yield event

    async def profile(self, output: str, seconds: float) -> tuple[str, int]:
        """Trace what the slice computes for so long, into a folder or gs://; return the run's name, bytes of a host."""
        run = f"{self._pool}-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
        await self._slice.side("start_profile")
        try:
            await asyncio.sleep(seconds)
        finally:
            stopped = await self._slice.side("stop_profile", output, run)
        return run, stopped.value

    async def held(self) -> list[str]:
        """Return what the hosts hold: a request's id, and which visit of it."""
        return (await self._slice.side("keys")).value

    # ---- what Serve asks

    @serve.multiplexed(max_num_models_per_replica=SHAPES)
    async def _programs(self, shape: str) -> str:
        """Hold a shape's programs: Serve passes it to `actors.slices.router`."""
        return shape

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report how long requests keep the slice, for `actors.slices.autoscaling`."""
        return {LOAD: self._time.seconds / self._settings.scale_wait_s}

    async def check_health(self) -> None:
        """End when the slice is gone, and when it is drained and nothing runs on it any more."""
        await self._slice.run(self._hosts.check)
        self._status.replica(self._name, self._reported)  # to one that was restarted, and knows nothing
        left_s = draining_for(host.node_id for host in self._hosts.hosts)
        if left_s is not None and not self._drain.begun:
            self._drain.begin(left_s)
            self._scheduler.evict(self._drain.moved)
            self._report("draining", f"its hosts are taken away in {left_s:.0f} s")
            log.warning("%s is being drained, %.0f s left", self._name, left_s)
            self._adopting = asyncio.create_task(self._adopt())
        elif self._drain.begun and not self._holding and not self._work:
            self._hosts.close()
            self._end()

    def __del__(self) -> None:
        self._leaving.close()

    # ----

    async def _pause(self, admission: Admission, held: str, request: SliceRequest) -> None:
        """Let a more urgent request run, and return when this one may go on; a drain moves it at once."""
        granted = self._scheduler.pause(admission)
        self._snapshotter.start(held, request.snapshots, skip=False)  # it may not run again for long
        while not granted.done():
            await asyncio.wait([granted], timeout=DRIVER_S)
            if not granted.done():
                await request.scope.check()
        try:
            granted.result()
        except StageMoved:
            raise await self._moved(held, request) from None

    async def _moved(self, held: str, request: SliceRequest) -> StageMoved:
        """Return what is raised, once the state is saved."""
        await self._snapshotter.settle(held)
        step = await self._snapshotter.take(held, request.snapshots)
        where = "from its last snapshot" if step is None else f"after step {step}"
        return StageMoved(f"the slice is being drained; {request.key} goes on elsewhere {where}")

    async def _leave(self, scope: RequestScope, ref: ray.ObjectRef) -> RefHandle:
        """Leave a payload for its next stage, which outlives this leader where that is about to go."""
        handle = await scope.put(ref)
        self._left.append((scope, handle))
        if self._drain.begun:
            await scope.adopt(handle)
        return handle

    async def _adopt(self) -> None:
        """Have everything outlive this leader that still waits for its next stage."""
        with self._staying():
            await asyncio.gather(*(scope.adopt(handle) for scope, handle in self._left))
            await asyncio.sleep(FETCHED_S)

    @contextlib.contextmanager
    def _staying(self) -> Iterator[None]:
        """Don't end, though drained, before the block does."""
        name = f"work {next(self._visits)}"
        self._holding.add(name)
        try:
            yield
        finally:
            self._holding.remove(name)

    async def _hold(self, shape: str) -> None:
        self._drain.check()
        await self._programs(shape)

    @contextlib.asynccontextmanager
    async def _held(self, key: str, stage: str) -> AsyncIterator[str]:
        """Give the name under which the hosts hold a request's arrays for a stage, and drop them, however it ends.

        A name for this visit only: somebody who has lost sight of the request may have sent it here once more.
        """
        held = f"{key} {next(self._visits)}"
        self._holding.add(held)
        try:
            with self._doubts.watching(stage, key):
                yield held
        finally:
            self._holding.remove(held)
            await to_the_end(self._let_go(held))

    async def _let_go(self, held: str) -> None:
        await self._snapshotter.settle(held)
        with contextlib.suppress(StageLost, RequestFailed):
            await self._slice.side("drop", held)

    async def _compute(
        self, request: SliceRequest, stage: str, shape: str, method: str, *args: Any
    ) -> AsyncIterator[Event]:
        """Keep the devices for one call of the hosts; others' steps go on after it."""
        with self._staying():
            async with self._scheduler.device:
                self._drain.check()
                with self._working(request.key, stage):
                    start = time.time()
                    (compile_s, warnings), ref = await self._slice.call(method, *args, like=shape)
                    spans = self._computed(request.key, stage, start, compile_s)
            for span in spans:
                yield span
            yield StageResult(await self._leave(request.scope, ref), warnings=tuple(warnings))

    def _computed(self, key: str, stage: str, start_s: float, compile_s: float, step: int | None = None) -> list[Span]:
        """Return what the slice has done since then: compiled, which comes first or nearly so, and computed."""
        span = self._span(key, stage, "compute", start_s + compile_s, step=step)
        compiled = dataclasses.replace(span, what="compile", start_s=start_s, end_s=span.start_s, step=None)
        return [compiled, span] if compile_s else [span]

    @contextlib.contextmanager
    def _working(self, key: str, stage: str) -> Iterator[None]:
        self._work.append((stage, key))
        self._report("busy")
        try:
            with self._doubts.watching(stage, key), self._time.taken():
                yield
            self._doubts.end(stage)
        finally:
            self._work.remove((stage, key))
            self._report("busy" if self._work else "idle")

    def _span(self, key: str, stage: str, what: What, start_s: float, **more: int | None) -> Span:
        return self._did(request=key, stage=stage, what=what, start_s=start_s, end_s=time.time(), **more)

    def _report(self, activity: Activity, detail: str = "") -> None:
        """Tell the status what this leader does."""
        if self._ended or (self._drain.begun and activity != "draining"):
            return
        work, now = tuple(self._work), time.time()
        self._reported = ReplicaSeen(self._pool, self._where, activity, detail, work, now, self._software)
        self._status.replica(self._name, self._reported)

    def _lost(self, lost: SliceLost) -> StageLost:
        log.error("%s", lost)
        self._end()
        return (StageFailed if isinstance(lost, DeviceFailed) else StageLost)(str(lost))

    def _replace(self, why: str) -> None:
        if not self._ended:
            log.error("%s is replaced: %s", self._name, why)
            self._hosts.close()
            self._end()

    def _end(self) -> None:
        """End this process, since it leads nothing any more; Serve starts another at once."""
        if not self._ended:
            self._ended = True
            self._drain.begin(0.0)  # who comes before the end is sent on: the loss has cost its attempt already
            self._status.gone(self._name)
            asyncio.get_running_loop().call_later(LEAVE_S, os._exit, 1)


def _kind(plan: RequestPlan, expert: Expert) -> Hashable | None:
    """Return what decides how long a step takes and what it needs; None where some are left out, as a cache does."""
    return None if plan.request.cache else (plan.shapes[expert.stage], expert.stage, expert.guided)
