"""The actor that leads one slice: a small process on a CPU node, and a replica of a Ray Serve deployment.

It takes the slice, watches over it, and ends with it. `actors.slices.stage_runner` runs the requests' stages on it.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable

from ray import serve

from actors.errors import StageFailed, StageInterrupted
from actors.observe.status_actor import RENEW_S, Activity, ReplicaStatus
from actors.pipeline_spec import Chips, PipelineSettings
from actors.slices.async_slice import AsyncSlice, FailureTracker
from actors.slices.autoscaling import LOAD
from actors.slices.dependencies import LeaderDependencies
from actors.slices.drain import DrainState
from actors.slices.messages import Event, HostProgress, SliceRequest
from actors.slices.references import RefHandle
from actors.slices.snapshots import Snapshots, Snapshotter
from actors.slices.stage_runner import SliceFacts, StageRunner
from cluster.errors import CallFailed, DeviceFailed, SliceLost
from cluster.layout import Pool
from wan_tpu.errors import InvalidInput
from wan_tpu.plan import DECODER, ENCODER
from wan_tpu.progress import format_count
from wan_tpu.request import ResolvedRequest

log = logging.getLogger(__name__)

MAX_ROUTED_PROGRAMS = 64  # Programs the router remembers per replica.
END_DELAY_S = 0.5  # Time between the loss of a slice and the end of its leader, for errors to reach the callers.
DRAIN_ANSWER_S = 2.0  # How long a health check waits for Ray to say whether the hosts are being drained.


class SliceLeader:
    """A replica of a pool. Serve restarts it when its slice is lost; its callers continue elsewhere."""

    async def __init__(  # type: ignore[misc]
        self, pool: Pool, settings: PipelineSettings, dependencies: LeaderDependencies | None = None
    ) -> None:
        """Take a slice, start its hosts, and have them read the weights of the pool's stages.

        A leader may have to wait days for its slice. Serve waits as well, and can end this process meanwhile.
        """
        self._resources = contextlib.ExitStack()  # Closed when this leader is deleted.
        self._dependencies = dependencies or LeaderDependencies.of_replica(settings)
        self._settings, self._pool, self._stages = settings, pool.name, pool.stages
        self._name = f"{self._pool}/{self._dependencies.replica}"
        self._status = self._dependencies.status
        self._runner: StageRunner | None = None
        self._ended = False
        self._start_s: dict[str, float] = {}  # The seconds that each phase of the start took.
        self._drain = DrainState(self._name, settings.reliability.hand_over_s)
        self._drain_answer: asyncio.Future[float | None] | None = None
        self._description, self._software, start = "", dict[str, str](), time.monotonic()
        self._report("starting", f"takes a {pool.slice} and starts its hosts")
        snapshots = Snapshots(self._dependencies.snapshots)
        renewal = asyncio.create_task(self._renew_report())  # A start takes long, and may report nothing by itself.
        try:
            await asyncio.to_thread(self._start, pool, snapshots)
        finally:
            renewal.cancel()
        self._slice = AsyncSlice(self._hosts, self._end_after_loss)
        chips: Chips = "emulated" if settings.chips == "real" and self._hosts.emulated else settings.chips
        self._runner = StageRunner(
            SliceFacts(
                self._pool,
                self._stages,
                self._name,
                chips,
                settings.snapshot_every,
                settings.reliability.replica_wait_s if pool.replicas.maximum > 1 else None,
            ),
            self._slice,
            Snapshotter(self._slice, snapshots, self._dependencies.store, self._drain.keep_leader),
            self._drain,
            FailureTracker(self._dependencies.replica, settings.reliability.slice_attempts, self._replace),
            self._report_work,
        )
        self._status.report_start(self._pool, self._start_s)
        took_s, phases = time.monotonic() - start, ", ".join(f"{p} in {s:.1f} s" for p, s in self._start_s.items())
        self._report("idle", f"ready after {took_s:.1f} s: {phases}")
        log.info("%s leads %s, ready after %.1f s: %s", self._name, self._description, took_s, phases)

    def _start(self, pool: Pool, snapshots: Snapshots) -> None:
        settings = self._settings
        with contextlib.ExitStack() as resources:  # Closed if the start fails.
            try:
                snapshots.clean()
                self._hosts = self._dependencies.take(
                    pool.slice,
                    settings.host_class,
                    *(settings.checkpoint, pool.stages, pool.mesh, settings.dtype, settings.executables),
                    *(settings.kernels, settings.collectives, settings.preview_decoder),
                    name=self._name,
                    timeouts=settings.reliability,
                    on_status=lambda text: self._report("starting", text),
                )
                resources.callback(self._hosts.close)
                self._description, self._software = self._hosts.describe(), self._hosts.software
                self._load()
            except Exception as error:
                cause = error.__cause__ if isinstance(error, CallFailed) else error
                is_final = isinstance(cause, InvalidInput)  # Another start would fail in the same way.
                self._report("refused" if is_final else "failed", str(cause if is_final else error))
                raise  # The report stays, so that whoever waits for this pool learns the reason.
            resources.callback(self._status.report_gone, self._name)
            self._resources = resources.pop_all()

    async def _renew_report(self) -> None:
        """Repeat the last report before the status forgets it."""
        while True:
            await asyncio.sleep(RENEW_S)
            self._status.report_replica(self._name, self._reported)

    def _load(self) -> None:
        """Have the hosts read their weights, and compile the programs of `warm_up` ahead of the first request."""
        start = time.monotonic()
        limit_s = self._settings.reliability.build_s  # Seconds without progress.
        self._hosts.call("load", timeout_s=limit_s, on_progress=self._make_progress_report("loading"))
        self._start_s = self._hosts.start_s | {"read": time.monotonic() - start}
        start = time.monotonic()
        for request in self._settings.warm_up:
            report = self._make_progress_report("compiling")
            results = self._hosts.call("warm_up", request, timeout_s=limit_s, on_progress=report)
            for refusal in results.value:
                size = f"{request.width}x{request.height}"
                log.warning("%s: requests for %s will be refused if they need %s", self._name, size, refusal)
        if self._settings.warm_up:
            self._start_s["compiled"] = time.monotonic() - start

    def _make_progress_report(self, activity: Activity) -> Callable[[HostProgress], None]:
        return lambda now: self._report(activity, f"{now.item}, {format_count(now.done, now.total, now.unit)}")

    # ---- The stages, as Serve calls them; `StageRunner` describes them.

    async def encode_text(self, request: SliceRequest, prompt: str) -> AsyncIterator[Event]:
        async with contextlib.aclosing(self._get_runner().encode_text(request, prompt)) as events:
            async for event in events:
                yield event

    async def encode_image(self, request: SliceRequest, full_request: ResolvedRequest) -> AsyncIterator[Event]:
        await self._register_program(request.plan.shapes[ENCODER])
        async with contextlib.aclosing(self._get_runner().encode_image(request, full_request)) as events:
            async for event in events:
                yield event

    async def check_adapters(self, request: SliceRequest) -> AsyncIterator[Event]:
        """Check a request's adapters, as `StageRunner.check_adapters`. The stream, like that of all calls, is empty."""
        await self._get_runner().check_adapters(request)
        no_events: tuple[Event, ...] = ()
        for event in no_events:
            yield event

    async def denoise(
        self, request: SliceRequest, inputs: list[RefHandle | None], state: RefHandle | None, step: int | None
    ) -> AsyncIterator[Event]:
        await self._register_program(request.plan.shapes[request.plan.experts_on(self._stages)[0].stage])
        async with contextlib.aclosing(self._get_runner().denoise(request, inputs, state, step)) as events:
            async for event in events:
                yield event

    async def decode(self, request: SliceRequest, state: RefHandle | None) -> AsyncIterator[Event]:
        await self._register_program(request.plan.shapes[DECODER])
        async with contextlib.aclosing(self._get_runner().decode(request, state)) as events:
            async for event in events:
                yield event

    def _get_runner(self) -> StageRunner:
        """Return the runner of the slice's stages; raise `StageMoved` when new requests are refused."""
        self._drain.check()
        assert self._runner is not None
        return self._runner

    async def profile(self, output: str, seconds: float) -> tuple[str, int]:
        """Trace what the slice computes.

        Returns:
            The run's name, and how many bytes one host wrote.
        """
        run = f"{self._pool}-{time.strftime('%Y-%m-%d-%H-%M-%S')}-{secrets.token_hex(2)}"
        try:
            await self._slice.side("start_profile", run)
            await asyncio.sleep(seconds)
        except BaseException:  # Some hosts may have begun their traces.
            with contextlib.suppress(Exception):
                await self._slice.side("cancel_profile", run)
            raise
        results = await self._slice.call("stop_profile", output, run, lane="network")
        return run, results.value

    async def list_host_keys(self) -> list[str]:
        """Return the keys of all requests on the hosts: a request's id, and the number of its visit."""
        return (await self._slice.side("list_keys")).value

    # ---- What Serve asks.

    @serve.multiplexed(max_num_models_per_replica=MAX_ROUTED_PROGRAMS)
    async def _register_program(self, program: str) -> str:
        """Record that this replica holds a program; Serve tells `actors.slices.router`."""
        return program

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report how long requests occupy the slice, for `actors.slices.autoscaling`."""
        seconds = 0.0 if self._runner is None else self._runner.time.seconds
        return {LOAD: seconds / self._settings.scale_wait_s}

    async def check_health(self) -> None:
        """End this leader if its slice is lost, or drained and idle; begin a drain if the hosts will be taken away."""
        await self._slice.run(self._hosts.check)
        self._status.report_replica(self._name, self._reported)  # A restarted status actor has lost earlier reports.
        if self._drain.is_over:
            self._close()
        elif (left_s := await self._read_seconds_left()) is not None:
            if not self._drain.has_begun:
                self._begin_drain(left_s)
            self._drain.begin(left_s)

    def __del__(self) -> None:
        self._resources.close()

    # ----

    def _begin_drain(self, left_s: float) -> None:
        assert self._runner is not None
        self._report("draining", f"its hosts are taken away in {left_s:.0f} s")
        self._drain.begin(left_s)
        self._runner.scheduler.evict(self._drain.build_refusal)
        log.warning("%s is being drained, %.0f s left", self._name, left_s)
        self._adoption = asyncio.create_task(self._runner.published.adopt_all())

    async def _read_seconds_left(self) -> float | None:
        """Return in how many seconds the hosts will be taken away; None if they stay, or if Ray doesn't say."""
        if self._drain_answer is None:
            nodes = [host.node_id for host in self._hosts.hosts]
            loop = asyncio.get_running_loop()
            self._drain_answer = loop.run_in_executor(None, self._dependencies.find_drain_s, nodes)
        answer = self._drain_answer
        await asyncio.wait([answer], timeout=DRAIN_ANSWER_S)
        if not answer.done():
            return None  # The next check waits for the same answer, so that only one thread waits for Ray.
        if self._drain_answer is answer:  # Serve doesn't wait for one check before it begins another.
            self._drain_answer = None
        try:
            return answer.result()
        except Exception as error:
            log.warning("%s: Ray doesn't report whether it is being drained: %s", self._name, error)
            return None

    def _report_work(self) -> None:
        assert self._runner is not None
        self._report("busy" if self._runner.work else "idle")

    def _report(self, activity: Activity, detail: str = "") -> None:
        if self._ended or self._drain.has_begun:
            return
        work = () if self._runner is None else tuple(self._runner.work)
        self._reported = ReplicaStatus(
            self._pool, self._description, activity, detail, work, time.time(), self._software
        )
        self._status.report_replica(self._name, self._reported)

    def _end_after_loss(self, error: SliceLost) -> StageInterrupted:
        """End this leader because its slice is lost; return the error for its callers."""
        log.error("%s", error)
        self._end()
        return (StageFailed if isinstance(error, DeviceFailed) else StageInterrupted)(str(error))

    def _replace(self, why: str) -> None:
        if not self._ended:
            log.error("%s is replaced: %s", self._name, why)
            self._close()

    def _close(self) -> None:
        """End this leader, and give the slice back, which may take Ray a while."""
        self._end()
        asyncio.get_running_loop().run_in_executor(None, self._hosts.close)

    def _end(self) -> None:
        """End this process, which no longer leads a slice; Serve starts another at once."""
        if not self._ended:
            self._ended = True
            # Requests that still arrive are sent elsewhere as in a drain, which costs them no attempt.
            self._drain.begin(0.0)
            self._status.report_gone(self._name)
            asyncio.get_running_loop().call_later(END_DELAY_S, self._dependencies.end_process)
