"""One simulated run, determined by a seed: pools, drivers, requests and faults, and checks when it is over."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from actors.engine import Fragment
from actors.errors import RequestFailed
from actors.observe.meters import PipelineMeters
from actors.observe.status_actor import StatusActor
from actors.observe.status_board import StatusBoard
from actors.pipeline.connection import PipelineConnection
from actors.pipeline.driver import PipelineDriver
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.slices.references import RefStore
from actors.slices.snapshots import Snapshots
from cluster.layout import Layout
from tests.actors.simulation.bucket import Bucket, BucketOfProcess
from tests.actors.simulation.checks import KILLED, check_submission, find_leftovers
from tests.actors.simulation.faults import break_something
from tests.actors.simulation.ray_objects import ActorHandle, RefStoreActor, StatusHandle
from tests.actors.simulation.serve import Handle, PoolOfReplicas, Replica
from tests.actors.simulation.submissions import MODEL, Submission, plan_of
from tests.actors.simulation.virtual_time import Stuck, virtual_time
from tests.actors.simulation.world import Process, World
from wan_tpu.storage.base import StorageError

LAYOUTS = {
    "four pools": {"text": ["encoder"], "high": ["denoise_high"], "low": ["denoise_low"], "vae": ["decoder"]},
    "two pools": {"encoder-decoder": ["encoder", "decoder"], "experts": ["denoise_high", "denoise_low"]},
    "three pools": {"encoder-decoder": ["encoder", "decoder"], "high": ["denoise_high"], "low": ["denoise_low"]},
    "one pool": {"whole": ["encoder", "denoise_high", "denoise_low", "decoder"]},
}
FAULTS_S = 60.0  # Faults happen until then; afterwards all remaining requests must be completed.
SETTLE_S = 120.0  # Time after the last fault for uploads, replacement replicas and the removal of orphans.
HEALTH_S = 5.0  # Pause between health checks of a replica, which aren't under test, so a few of them are enough.
LIMIT_S = 4000.0  # A run that takes longer counts as hung.


@dataclasses.dataclass
class Driver:
    """A driver's process."""

    process: Process
    engine: PipelineDriver
    ref_store: RefStoreActor
    handle: ActorHandle
    death: asyncio.Future[None]


class Run:
    """One world, from its beginning until everything has ended."""

    def __init__(
        self,
        world: World,
        *,
        requests: int | None = None,
        faults: bool = True,
        layout_name: str | None = None,
        slices: int | None = None,
        drivers: int | None = None,
        health_s: float = HEALTH_S,
        spec: PipelineSpec | None = None,
        in_chunks: bool = False,
    ) -> None:
        """Set up a run. Whatever isn't specified is chosen at random."""
        chance = world.random
        self.world, self.faults, self._in_chunks = world, faults, in_chunks
        self.status, self.bucket = StatusBoard(PipelineMeters(), world.loop.time), Bucket(world)
        self.spec = spec or self._choose_spec(layout_name, slices)
        self.pools = {
            pool.name: PoolOfReplicas(
                world, pool, self.spec.settings, self.status, self.bucket, pool.replicas.maximum, health_s
            )
            for pool in self.spec.layout.pools
        }
        for pool in self.pools.values():
            pool.on_loss = self._excuse
        self.drivers = [self._start_driver(i) for i in range(drivers or chance.randint(1, 3))]
        self.submissions = [
            self._choose_submission(i) for i in range(chance.randint(10, 60) if requests is None else requests)
        ]
        self._numbers, self.was_drained = len(self.drivers), False
        self.problems: list[str] = []

    def _choose_spec(self, layout_name: str | None, slices: int | None) -> PipelineSpec:
        chance = self.world.random
        layout = LAYOUTS[layout_name or chance.choice(sorted(LAYOUTS))]
        pools = "\n".join(
            f"  {name}: {{stages: [{', '.join(stages)}], slice: v6e-1, "
            f"replicas: {{min: 1, max: {slices or chance.randint(1, 3)}}}}}"
            for name, stages in layout.items()
        )
        settings = PipelineSettings("checkpoint", "snapshots", snapshot_every=chance.choice((2, 5)))
        return PipelineSpec(Layout.parse(f"pools:\n{pools}\n", "here"), settings, MODEL, lasting=True)

    def _start_driver(self, number: int, process: Process | None = None) -> Driver:
        world = self.world
        process = process or Process(world.loop, f"driver {number}")
        actor = RefStoreActor()
        handle = ActorHandle(world.loop, process, actor)
        snapshots = Snapshots(BucketOfProcess(self.bucket, process))  # type: ignore[arg-type]
        status = StatusActor("pipeline", StatusHandle(self.status, process))
        handles = {name: Handle(pool, process) for name, pool in self.pools.items()}
        connection = PipelineConnection(self.spec, status, snapshots, handles)  # type: ignore[arg-type]
        engine = PipelineDriver(self.spec, connection, RefStore(handle))
        return Driver(process, engine, actor, handle, world.loop.create_future())

    def _choose_submission(self, number: int) -> Submission:
        chance = self.world.random
        prompt, is_bad = f"video {number}", chance.random()
        if self.faults and is_bad < 0.03:
            prompt = f"{'bad' if is_bad < 0.015 else 'nan'} {number}"
        kind = chance.choice(("text", "text", "image", "read image", "video", "plain"))
        kind = "open" if kind == "text" and number % 3 == 0 else kind  # Found without a further random number.
        steps = chance.randint(2, 6)
        plan = plan_of(steps, "chunks", prompt, number) if self._in_chunks else plan_of(steps, kind, prompt, number)
        priority = chance.choice((0, 0, 0, 0, 1))
        submission = Submission(f"request-{number}", plan, priority, chance.uniform(0, 40))
        submission.fragments = [] if number % 2 else None
        if chance.random() < 0.08:
            submission.cancel_s = chance.uniform(0, 30)
        return submission

    # ---- a run

    async def run(self) -> None:
        """Run all requests, with faults meanwhile, and then check the outcomes and what is left over."""
        if self.faults:
            for _ in range(self.world.random.randint(0, 5)):
                self.world.later(self.world.random.uniform(0, FAULTS_S), functools.partial(break_something, self))
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(self._client(submission) for submission in self.submissions))
        until_s = max(FAULTS_S, self.world.loop.now, self.world.hung_until_s) + SETTLE_S
        while self.world.loop.now < until_s and (self.world.loop.now < FAULTS_S or find_leftovers(self)):
            await asyncio.sleep(1.0)
            await self._remove_orphans()
        for submission in self.submissions:
            self.problems += check_submission(self, submission)
        self.problems += [f"left: {kind}: {values}" for kind, values in find_leftovers(self).items()]

    async def _remove_orphans(self) -> None:
        """Remove snapshots of ended requests whose drivers were killed before they could, as workers do."""
        snapshots = Snapshots(BucketOfProcess(self.bucket, Process(self.world.loop, "maintenance")))  # type: ignore[arg-type]
        with contextlib.suppress(StorageError):  # The next round tries again, as a worker's maintenance does.
            for submission in self.submissions:
                if submission.is_orphaned:
                    await asyncio.to_thread(snapshots.delete_all_of, submission.id)

    async def _client(self, submission: Submission) -> None:
        """Have one video made as batches and workers do: retry it if it is lost, and forget it once it is durable."""
        await asyncio.sleep(submission.at_s)
        while not submission.ended:
            submission.driver = driver = self.world.random.choice(self.drivers)
            making = self.world.loop.create_task(self._make(submission, driver))
            if submission.cancel_s is not None:
                cancel_s, submission.cancel_s = submission.cancel_s, None
                await asyncio.wait([making], timeout=cancel_s)
                if not making.done():
                    making.cancel()
                    self.world.tell(f"{submission.id} is cancelled")
                    self.excuse(submission.id, "it was cancelled")
                    await asyncio.wait([making], timeout=100.0)
                    if not making.done():
                        self.problems.append(f"{submission.id} doesn't end though it is cancelled")
                        return
                    if self.world.random.random() < 0.5:
                        submission.ended, submission.failure = 1, "cancelled"
                        await self._forget(submission, driver)
                        continue
            await asyncio.wait([making, driver.death], return_when=asyncio.FIRST_COMPLETED)
            if not making.done():  # The driver was killed, so another one makes the video.
                continue
            if not making.cancelled() and (error := making.exception()) is not None:
                self.problems.append(f"{submission.id} has failed in an unknown way: {error!r}")
                submission.ended, submission.failure = 1, "cancelled"

    async def _make(self, submission: Submission, driver: Driver) -> None:
        def note(span: Any) -> None:
            assert span.seconds >= 0, span
            if span.step is not None and submission.first_step_s is None:
                submission.first_step_s = self.world.loop.now

        def note_fragment(fragment: Fragment) -> None:
            if not driver.process.dead:
                fragments.append(fragment)

        fragments: list[Fragment] = []
        try:
            video = await driver.engine.generate(
                submission.plan,
                id=submission.id,
                on_event=note,
                priority=submission.priority,
                on_fragment=None if submission.fragments is None else note_fragment,
            )
        except RequestFailed as failed:
            if driver.process.dead:
                await asyncio.get_running_loop().create_future()
            if failed.code == "lost":
                self.world.tell(f"{submission.id} is lost, and submitted again: {failed}")
                self.excuse(submission.id, "it was lost")
                await asyncio.sleep(5.0)
                return
            submission.failure = failed.code
            self.world.tell(f"{submission.id} has failed: {failed.code}: {failed}")
        else:
            if driver.process.dead:
                await asyncio.get_running_loop().create_future()
            submission.video = video.mp4
            if submission.fragments is not None:
                submission.fragments = fragments
            self.world.tell(f"{submission.id} is made")
            await asyncio.sleep(self.world.random.choice((0.0, 0.5)))  # The time until the video is durable.
            if driver.process.dead:
                await asyncio.get_running_loop().create_future()
        submission.ended += 1
        await self._forget(submission, driver)

    async def _forget(self, submission: Submission, driver: Driver) -> None:
        submission.forgetting = self.world.loop.create_task(driver.engine.forget(submission.id))
        await asyncio.wait([submission.forgetting, driver.death], return_when=asyncio.FIRST_COMPLETED)

    # ---- faults

    def kill_driver(self, at: int) -> None:
        """Kill a driver; another one takes its place."""
        driver = self.drivers[at]
        self.world.tell(f"{driver.process.name} is killed")
        driver.process.dead = True
        driver.death.set_result(None)
        written = {id_ for pool in self.pools.values() for replica in pool.ready for id_ in _list_written(replica)}
        for submission in self.submissions:
            if submission.driver is driver and not submission.ended:
                self.excuse(submission.id, KILLED)
                submission.is_orphaned = True
            # The deletion of its snapshots stops. A slice that still writes one can't ask whether it is needed.
            is_forgotten = submission.forgetting is None or submission.forgetting.done()
            submission.is_orphaned |= submission.driver is driver and (submission.id in written or not is_forgotten)
        self.drivers[at] = self._start_driver(self._numbers)
        self._numbers += 1

    def _excuse(self, replica: Replica, why: str) -> None:
        """Note which requests may repeat steps: those whose payloads a replica holds, sends or has published."""
        keys = [] if replica.slice is None else replica.slice.host.list_keys()
        lost = {name.rpartition(" ")[0] for name in keys}
        lost |= {stream._args[0].key for stream in replica.streams}
        for driver in self.drivers:
            scopes = {scope._number: id_ for id_, pairs in driver.engine._scopes.items() for _, scope in pairs}
            for number, there in driver.ref_store._scopes.items():
                if any(ref.owner is replica.process for ref in there.values()):
                    lost.add(scopes.get(number, ""))
        for id_ in lost:
            self.excuse(id_, why)
        written = _list_written(replica)
        for submission in self.submissions:
            submission.is_orphaned |= submission.id in written  # Nobody checks any more whether it is still needed.

    def excuse(self, id_: str, why: str) -> None:
        """Note a reason why steps of a request may be repeated."""
        self.world.excuses[id_].append((self.world.loop.now, why))

    def excuse_all(self, why: str) -> None:
        """Note a reason why steps of any unfinished request may be repeated."""
        for submission in self.submissions:
            if not submission.ended:
                self.excuse(submission.id, why)


def _list_written(replica: Replica) -> set[str]:
    """Return the ids of the requests of which a replica is writing a snapshot."""
    runner = getattr(replica.leader, "_runner", None)
    return set() if runner is None else {name.rpartition(".")[0] for name in runner._snapshotter._writing}


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended."""

    seed: int
    videos: int
    problems: list[str]
    story: list[tuple[float, str]]

    def tell(self) -> str:
        """Return what happened and what is wrong as text."""
        lines = [f"{when:8.2f} s  {event}" for when, event in self.story]
        return "\n".join([f"seed {self.seed}:", *lines, "wrong:", *(f"  {problem}" for problem in self.problems)])


@contextlib.contextmanager
def limit_garbage_collection() -> Iterator[Callable[[], object]]:
    """Collect garbage only when the yielded function is called, and ignore objects that existed before.

    Examining all of Ray's modules after each run would take as long as the run.
    """
    calls, hook = itertools.count(1), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None  # Coroutines of killed processes are collected half-way through.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda: None if next(calls) % 20 else gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
        gc.collect()
        sys.unraisablehook = hook


def simulate(seed: int, *, requests: int | None = None, faults: bool = True, in_chunks: bool = False) -> Result:
    """Run one world to its end. With `in_chunks`, its videos are denoised chunk by chunk."""
    random.seed(seed)
    with virtual_time() as loop:
        world = World(loop, seed)
        run: Run | None = None

        async def live() -> None:
            nonlocal run
            run = Run(world, requests=requests, faults=faults, in_chunks=in_chunks)
            await run.run()

        try:
            loop.run_until_complete(live())
        except (Stuck, TimeoutError, RuntimeError) as error:
            if run is None or (isinstance(error, RuntimeError) and not loop.blocked):
                raise
            where = [f"the event loop was blocked: {where}" for where in loop.blocked]
            run.problems += where or [f"it never ends: {error!r}"]
            run.problems += [f"{submission.id} has not ended" for submission in run.submissions if not submission.ended]
        assert run is not None
        return Result(seed, len(run.submissions), run.problems, world.story)
