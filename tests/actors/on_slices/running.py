"""A pipeline that runs on an emulated cluster, seen from outside: its requests, and the processes there are to kill."""

import asyncio
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import psutil
import ray

from actors.engine import Fragment, GeneratedVideo
from actors.errors import RequestFailed
from actors.observe.span import Span
from actors.observe.status_actor import StatusActor
from actors.pipeline.driver import PipelineDriver
from cluster.emulation import ray_nodes
from cluster.emulation.cluster import EmulatedCluster
from cluster.inventory import LiveSlice, list_slices
from cluster.layout import Layout
from tests.children import start_module
from tests.waiting import SECONDS
from wan_tpu import GenerationRequest


class RunningRequest:
    """One request under way: its spans so far, and its video."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.spans: list[Span] = []
        self.fragments: list[Fragment] = []
        self.changed = threading.Condition()
        self.future: Future[GeneratedVideo] = Future()
        self.task: asyncio.Task[GeneratedVideo] | None = None

    def on_event(self, span: Span) -> None:
        with self.changed:
            self.spans.append(span)
            self.changed.notify_all()

    def steps(self, stage: str) -> list[int]:
        return [s.step for s in self.spans if s.stage == stage and s.step is not None]

    def wait_for(self, stage: str, step: int | None = None) -> Span:
        """Return the first span of a stage, or of its step: what comes next is under way."""

        def find_span() -> Span | None:
            span = next((s for s in self.spans if s.stage == stage and step in (None, s.step)), None)
            assert span or not self.future.done(), f"{self.id} has ended: {self.future.exception() or 'done'}"
            return span

        with self.changed:
            assert self.changed.wait_for(find_span, SECONDS), f"{stage} {step} of {self.id} doesn't come"
            span = find_span()
            assert span is not None
            return span

    def video(self, timeout_s: float = SECONDS) -> bytes:
        return self.future.result(timeout_s).mp4

    def cancel(self) -> None:
        assert self.task is not None
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


class Running:
    """The pipeline, in an event loop of its own."""

    def __init__(self, cluster: EmulatedCluster, layout: Layout, pipeline: PipelineDriver) -> None:
        self.cluster, self.layout, self.pipeline = cluster, layout, pipeline
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def start(
        self,
        id: str,
        request: GenerationRequest,
        pipeline: PipelineDriver | None = None,
        priority: int = 0,
        *,
        fragments: bool = False,
    ) -> RunningRequest:
        making = RunningRequest(id)
        on_fragment = making.fragments.append if fragments else None

        async def run() -> None:
            making.task = asyncio.current_task()
            try:
                driver = pipeline or self.pipeline
                plan = driver.model.plan(request)
                video = await driver.generate(
                    plan, id=id, on_event=making.on_event, priority=priority, on_fragment=on_fragment
                )
            except BaseException as error:
                if isinstance(error, RequestFailed) and error.code != "lost":
                    await driver.forget(id)
                making.future.set_exception(error)
            else:
                await driver.forget(id)
                making.future.set_result(video)
            with making.changed:
                making.changed.notify_all()

        asyncio.run_coroutine_threadsafe(run(), self.loop)
        return making

    def ask(self, pool: str, method: str, *args: object) -> object:
        """Call a replica of a pool."""

        async def run() -> object:
            handle = self.pipeline._connection._handles[pool]
            return await getattr(handle, method).remote(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(SECONDS)

    def slices(self, pool: str) -> list[LiveSlice]:
        """Return the slices that a pool's replicas hold."""
        return [s for s in list_slices() if s.holder is not None and s.holder.split("/")[0] == pool]

    def host(self, pool: str, rank: int = 0) -> psutil.Process:
        """Return the process of a host of the pool's only slice."""
        [slice_] = self.slices(pool)
        [process] = self.hosts(slice_.name, rank)
        return process

    def hosts(self, slice_name: str, rank: int) -> list[psutil.Process]:
        """Return the host processes on a node: one, or none."""
        folder = self.cluster.temp / self.cluster._host(slice_name, rank).name
        return [process for process in ray_nodes.processes(folder) if "HostActor" in title(process)]

    def processes(self) -> list[psutil.Process]:
        return ray_nodes.processes(self.cluster.temp)

    def all_hosts(self) -> list[psutil.Process]:
        return [process for process in self.processes() if "HostActor" in title(process)]

    def leaders(self, pool: str) -> list[psutil.Process]:
        """Return the processes of a pool's Serve replicas."""
        return [
            process for process in self.processes() if "ServeReplica" in title(process) and f":{pool}" in title(process)
        ]

    def settle(self, timeout_s: float = SECONDS) -> None:
        """Wait until every pool has its slices, and check that nothing else is held by anybody."""
        deadline = time.monotonic() + timeout_s
        while (wrong := self.wrong()) is not None:
            assert time.monotonic() < deadline, wrong
            time.sleep(0.2)

    def wrong(self) -> str | None:
        """Say what is not as it should be when nobody makes a video; None when all is."""
        slices = list_slices()
        holders = [s.holder for s in slices if s.holder]
        for pool in self.layout.pools:
            replicas = [h for h in holders if h.split("/")[0] == pool.name]
            if not pool.replicas.minimum <= len(replicas) <= pool.replicas.maximum:
                return f"{pool.name} holds {replicas}"
        if any("," in holder for holder in holders) or len(set(holders)) != len(holders):
            return f"slices are shared: {holders}"
        whole = [s for s in slices if not s.missing]
        chips = sum(s.spec.chips for s in whole if s.spec and not s.holder)
        if ray.available_resources().get("TPU", 0) != chips:
            return f"{ray.available_resources().get('TPU', 0)} chips are free, of slices that nobody holds {chips}"
        hosts = sum(len(s.hosts) for s in slices if s.holder)
        if len(self.all_hosts()) != hosts:
            return f"{len(self.all_hosts())} processes of hosts, not {hosts}: {[title(p) for p in self.all_hosts()]}"
        seen = StatusActor.connect(self.pipeline.spec.settings.name).read()
        idle = sum(replica.activity == "idle" for replica in seen.replicas.values())
        if idle < len(holders):
            return f"{idle} of {len(holders)} replicas are ready: {seen.replicas}"
        return None

    def close(self) -> None:
        self.pipeline.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def in_one_process(
    checkpoint: Path, request: GenerationRequest, devices: int, folder: Path, *others: GenerationRequest
) -> Callable[[], dict[str, np.ndarray]]:
    """Start the request in one process with so many CPU devices; return what waits for its results.

    With one device it makes the others, too.
    """
    (folder / "request.pickle").write_bytes(pickle.dumps((request, *others)))
    environment = os.environ | {
        "NPROC": str(max(os.cpu_count() or 1, 2)),  # as cluster/gang/host_actor.py sets it: sums are cut by it
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    files, log = (folder / "request.pickle", folder / "made.npz"), folder / "log"
    module = "tests.actors.on_slices.reference_video"
    worker = start_module(module, checkpoint, *files, environment=environment, output=log)

    def results() -> dict[str, np.ndarray]:
        worker.join(SECONDS)
        worker.kill()
        assert worker.exitcode == 0, log.read_text()[-3000:]
        return dict(np.load(folder / "made.npz"))

    return results
