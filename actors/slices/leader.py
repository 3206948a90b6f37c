"""The actor that leads one slice: a small process on a CPU node, a replica of Ray Serve.

It takes the slice, keeps it in order, and ends with it; what requests do there is `actors.slices.stage_runner`.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable

from ray import serve

from actors.errors import StageFailed, StageLost
from actors.observe.status_actor import RENEW_S, Activity, ReplicaStatus
from actors.pipeline_spec import Chips, PipelineSettings
from actors.slices.async_slice import AsyncSlice, FailureTracker
from actors.slices.autoscaling import LOAD
from actors.slices.drain import DrainState
from actors.slices.messages import Event, HostProgress, SliceRequest
from actors.slices.references import RefHandle
from actors.slices.snapshots import Snapshots, Snapshotter
from actors.slices.stage_runner import PoolOfSlice, StageRunner
from actors.slices.surroundings import Surroundings
from cluster.errors import CallFailed, DeviceFailed, SliceLost
from cluster.layout import Pool
from wan_tpu.errors import InvalidInput
from wan_tpu.plan import DECODER, ENCODER
from wan_tpu.progress import counted
from wan_tpu.request import ResolvedRequest

log = logging.getLogger(__name__)

MAX_PROGRAMS = 64  # Shapes a leader is remembered to hold programs of, for routing.
LEAVE_S = 0.5  # Between the loss of a slice and the end of its leader: callers are told first.
PATIENCE_S = 10.0  # A request that has waited here for so long looks whether another replica is free by now.
DRAIN_ANSWER_S = 2.0  # Ray may take this long to say whether hosts are drained; then it isn't known.


class SliceLeader:
    """A replica of a pool. Serve restarts it when its slice is lost; its callers go on elsewhere."""

    async def __init__(  # type: ignore[misc]
        self, pool: Pool, settings: PipelineSettings, surroundings: Surroundings | None = None
    ) -> None:
        """Take a slice, start its hosts, and let them read the weights of the pool's stages.

        Serve waits for it, and can end this process meanwhile: for its slice a leader may wait for days.
        """
        self._leaving = contextlib.ExitStack()  # what is let go of with this leader
        self._around = surroundings or Surroundings.of_replica(settings)
        self._settings, self._pool, self._stages = settings, pool.name, pool.stages
        self._name = f"{self._pool}/{self._around.replica}"
        self._status = self._around.status
        self._runner: StageRunner | None = None
        self._ended = False
        self._start_s: dict[str, float] = {}  # seconds of each phase of the start
        self._drain = DrainState(self._name)
        self._asked_for_drain: asyncio.Future[float | None] | None = None
        self._where, self._software, start = "", dict[str, str](), time.monotonic()
        self._report("starting", f"takes a {pool.slice} and starts its hosts")
        snapshots = Snapshots(self._around.snapshots)
        telling = asyncio.create_task(self._tell_again())  # a start takes long, and may be silent
        try:
            await asyncio.to_thread(self._start, pool, snapshots)
        finally:
            telling.cancel()
        self._slice = AsyncSlice(self._hosts, self._lost)
        chips: Chips = "emulated" if settings.chips == "real" and self._hosts.emulated else settings.chips
        self._runner = StageRunner(
            PoolOfSlice(
                self._pool,
                self._stages,
                self._name,
                chips,
                settings.snapshot_every,
                PATIENCE_S if pool.replicas.maximum > 1 else None,
            ),
            self._slice,
            Snapshotter(self._slice, snapshots, self._around.store, self._drain.staying),
            self._drain,
            FailureTracker(self._around.replica, self._replace),
            self._report_work,
        )
        self._status.started(self._pool, self._start_s)
        took_s, phases = time.monotonic() - start, ", ".join(f"{p} in {s:.1f} s" for p, s in self._start_s.items())
        self._report("idle", f"ready after {took_s:.1f} s: {phases}")
        log.info("%s leads %s, ready after %.1f s: %s", self._name, self._where, took_s, phases)

    def _start(self, pool: Pool, snapshots: Snapshots) -> None:
        settings = self._settings
        with contextlib.ExitStack() as starting:  # what is let go of when it can't be started
            try:
                snapshots.clean()
                self._hosts = self._around.take(
                    pool.slice,
                    settings.host_class,
                    *(settings.checkpoint, pool.stages, pool.mesh, settings.dtype, settings.executables),
                    *(settings.kernels, settings.collectives),
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

    async def _tell_again(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._status.replica(self._name, self._reported)

    def _load(self) -> None:
        """Have the hosts read their weights, and compile what is asked for ahead of the first request."""
        start = time.monotonic()
        limit_s = self._settings.timeouts.build_s  # without progress
        self._hosts.call("load", timeout_s=limit_s, on_progress=self._telling("loading"))
        self._start_s = self._hosts.start_s | {"read": time.monotonic() - start}
        start = time.monotonic()
        for request in self._settings.warm_up:
            self._hosts.call("warm_up", request, timeout_s=limit_s, on_progress=self._telling("compiling"))
        if self._settings.warm_up:
            self._start_s["compiled"] = time.monotonic() - start

    def _telling(self, activity: Activity) -> Callable[[HostProgress], None]:
        return lambda now: self._report(activity, f"{now.item}, {counted(now.done, now.total, now.unit)}")

    # ---- the stages, as Serve calls them

    async def encode_text(self, request: SliceRequest, prompt: str) -> AsyncIterator[Event]:
        """Encode a prompt, as `StageRunner.encode_text`."""
        async with contextlib.aclosing(self._stages_of(request).encode_text(request, prompt)) as events:
            async for event in events:
                yield event

    async def encode_image(self, request: SliceRequest, given: ResolvedRequest) -> AsyncIterator[Event]:
        """Encode a request's image, as `StageRunner.encode_image`."""
        await self._programs(request.plan.shapes[ENCODER])
        async with contextlib.aclosing(self._stages_of(request).encode_image(request, given)) as events:
            async for event in events:
                yield event

    async def check_adapters(self, request: SliceRequest) -> AsyncIterator[Event]:
        """Look at a request's adapters, as `StageRunner.check_adapters`: a stream, as all calls, that has no event."""
        await self._stages_of(request).check_adapters(request)
        no_events: tuple[Event, ...] = ()
        for event in no_events:
            yield event

    async def denoise(
        self, request: SliceRequest, inputs: list[RefHandle | None], state: RefHandle | None, step: int | None
    ) -> AsyncIterator[Event]:
        """Run the steps that are left here, as `StageRunner.denoise`."""
        await self._programs(request.plan.shapes[request.plan.experts_on(self._stages)[0].stage])
        async with contextlib.aclosing(self._stages_of(request).denoise(request, inputs, state, step)) as events:
            async for event in events:
                yield event

    async def decode(self, request: SliceRequest, state: RefHandle) -> AsyncIterator[Event]:
        """Decode final latents, as `StageRunner.decode`."""
        await self._programs(request.plan.shapes[DECODER])
        async with contextlib.aclosing(self._stages_of(request).decode(request, state)) as events:
            async for event in events:
                yield event

    def _stages_of(self, request: SliceRequest) -> StageRunner:
        """Return what runs a request's stages; raises `StageMoved` when no new request is taken any more."""
        self._drain.check()
        assert self._runner is not None
        return self._runner

    async def profile(self, output: str, seconds: float) -> tuple[str, int]:
        """Trace what the slice computes for so long, into a folder or gs://; return the run's name, bytes of a host."""
        run = f"{self._pool}-{time.strftime('%Y-%m-%d-%H-%M-%S')}-{secrets.token_hex(2)}"
        try:
            await self._slice.side("start_profile", run)
            await asyncio.sleep(seconds)
        except BaseException:  # one host of several may have begun
            with contextlib.suppress(Exception):
                await self._slice.side("cancel_profile", run)
            raise
        stopped = await self._slice.call("stop_profile", output, run, group="network")
        return run, stopped.value

    async def held(self) -> list[str]:
        """Return what the hosts hold: a request's id, and which visit of it."""
        return (await self._slice.side("keys")).value

    # ---- what Serve asks

    @serve.multiplexed(max_num_models_per_replica=MAX_PROGRAMS)
    async def _programs(self, shape: str) -> str:
        """Hold a shape's programs: Serve passes it to `actors.slices.router`."""
        return shape

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report how long requests keep the slice, for `actors.slices.autoscaling`."""
        seconds = 0.0 if self._runner is None else self._runner.time.seconds
        return {LOAD: seconds / self._settings.scale_wait_s}

    async def check_health(self) -> None:
        """End when the slice is gone, and when it is drained and nothing runs on it any more."""
        await self._slice.run(self._hosts.check)
        self._status.replica(self._name, self._reported)  # to one that was restarted, and knows nothing
        if self._drain.is_over:
            self._close()
        elif (left_s := await self._left_s()) is not None:
            if not self._drain.begun:
                self._begin_drain(left_s)
            self._drain.begin(left_s)

    def __del__(self) -> None:
        self._leaving.close()

    # ----

    def _begin_drain(self, left_s: float) -> None:
        assert self._runner is not None
        self._report("draining", f"its hosts are taken away in {left_s:.0f} s")
        self._drain.begin(left_s)
        self._runner.scheduler.evict(self._drain.moved)
        log.warning("%s is being drained, %.0f s left", self._name, left_s)
        self._adopting = asyncio.create_task(self._runner.adopt())

    async def _left_s(self) -> float | None:
        """Return how long the hosts are there still, None where they stay, or where Ray doesn't say now."""
        if self._asked_for_drain is None:
            nodes = [host.node_id for host in self._hosts.hosts]
            loop = asyncio.get_running_loop()
            self._asked_for_drain = loop.run_in_executor(None, self._around.draining_for, nodes)
        await asyncio.wait([self._asked_for_drain], timeout=DRAIN_ANSWER_S)
        if not self._asked_for_drain.done():
            return None  # asked again, one thread at a time
        asked, self._asked_for_drain = self._asked_for_drain, None
        try:
            return asked.result()
        except Exception as error:
            log.warning("%s: Ray doesn't say whether it is drained: %s", self._name, error)
            return None

    def _report_work(self) -> None:
        assert self._runner is not None
        self._report("busy" if self._runner.work else "idle")

    def _report(self, activity: Activity, detail: str = "") -> None:
        """Tell the status what this leader does."""
        if self._ended or self._drain.begun:
            return
        work = () if self._runner is None else tuple(self._runner.work)
        self._reported = ReplicaStatus(self._pool, self._where, activity, detail, work, time.time(), self._software)
        self._status.replica(self._name, self._reported)

    def _lost(self, lost: SliceLost) -> StageLost:
        log.error("%s", lost)
        self._end()
        return (StageFailed if isinstance(lost, DeviceFailed) else StageLost)(str(lost))

    def _replace(self, why: str) -> None:
        if not self._ended:
            log.error("%s is replaced: %s", self._name, why)
            self._close()

    def _close(self) -> None:
        """End, and give the slice back, which Ray may take a while for."""
        self._end()
        asyncio.get_running_loop().run_in_executor(None, self._hosts.close)

    def _end(self) -> None:
        """End this process, since it leads nothing any more; Serve starts another at once."""
        if not self._ended:
            self._ended = True
            self._drain.begin(0.0)  # who comes before the end is sent on: the loss has cost its attempt already
            self._status.gone(self._name)
            asyncio.get_running_loop().call_later(LEAVE_S, self._around.end_process)
