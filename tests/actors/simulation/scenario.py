"""One simulated run: pools, drivers, requests and faults, all by a seed; and what must hold when it is over."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image

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
from scripts.simulation.simulated import SimulatedSpec
from tests.actors.simulation.serve import Handle, PoolOfReplicas, Replica
from tests.actors.simulation.stand_ins import (
    ActorHandle,
    Bucket,
    BucketOfProcess,
    Process,
    RefStoreActor,
    StatusHandle,
    World,
    video_of,
)
from tests.actors.simulation.virtual_time import Stuck, virtual_time
from wan_tpu.families.wan.presets import PRESETS
from wan_tpu.request import GenerationRequest
from wan_tpu.spec import RequestPlan

MODEL = SimulatedSpec(PRESETS["wan2.2-i2v-a14b"])
LAYOUTS = {
    "four pools": {"text": ["encoder"], "high": ["denoise_high"], "low": ["denoise_low"], "vae": ["decoder"]},
    "two pools": {"ends": ["encoder", "decoder"], "experts": ["denoise_high", "denoise_low"]},
    "three pools": {"ends": ["encoder", "decoder"], "high": ["denoise_high"], "low": ["denoise_low"]},
    "one pool": {"whole": ["encoder", "denoise_high", "denoise_low", "decoder"]},
}
FAULTS = (
    "drain",
    "drain",
    "drain",
    "leave",
    "leader",
    "hosts",
    "device",
    "hang",
    "sick",
    "down",
    "slow",
    "full",
    "silent",
    "driver",
    "clock",
    "ray",
    "evict",
    "hub",
)
FAULTS_S = 60.0  # Until when something may break; what is left then must be made.
KILLED = "its driver was killed"
SETTLE_S = 120.0  # What may take this long afterwards: uploads, replicas that come back, orphans.
HEALTH_S = 5.0  # Between two looks at a replica: what isn't under test needn't be simulated so often.
LIMIT_S = 4000.0  # A run that lasts longer hangs.


@dataclasses.dataclass
class Driver:
    """A process that has videos made."""

    process: Process
    engine: PipelineDriver
    ref_store: RefStoreActor
    handle: ActorHandle
    death: asyncio.Future[None]


@dataclasses.dataclass
class Asked:
    """A request, and what became of it."""

    id: str
    plan: RequestPlan
    priority: int
    at_s: float
    cancel_s: float | None = None
    video: bytes | None = None
    failure: str | None = None
    ended: int = 0
    first_step_s: float | None = None
    is_orphaned: bool = False
    driver: Driver | None = None


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
        in_flight: int = 16,
        spec: PipelineSpec | None = None,
    ) -> None:
        """What is left open is decided by the world's chance."""
        chance = world.random
        self.world, self.faults = world, faults
        self.status, self.bucket = StatusBoard(PipelineMeters(), world.loop.time), Bucket(world)
        self.spec = spec or self._any_spec(layout_name, in_flight, slices)
        self.pools = {
            pool.name: PoolOfReplicas(
                world, pool, self.spec.settings, self.status, self.bucket, pool.replicas.maximum, health_s
            )
            for pool in self.spec.layout.pools
        }
        for pool in self.pools.values():
            pool.on_loss = self._excuse
        self.drivers = [self._driver(i) for i in range(drivers or chance.randint(1, 3))]
        self.asked = [self._ask(i) for i in range(chance.randint(10, 60) if requests is None else requests)]
        self._numbers, self.was_drained = len(self.drivers), False
        self.problems: list[str] = []

    def _any_spec(self, layout_name: str | None, in_flight: int, slices: int | None) -> PipelineSpec:
        chance = self.world.random
        layout = LAYOUTS[layout_name or chance.choice(sorted(LAYOUTS))]
        pools = "\n".join(
            f"  {name}: {{stages: [{', '.join(stages)}], slice: v6e-1, "
            f"replicas: {{min: 1, max: {slices or chance.randint(1, 3)}}}}}"
            for name, stages in layout.items()
        )
        settings = PipelineSettings(
            "checkpoint", "snapshots", snapshot_every=chance.choice((2, 5)), in_flight=in_flight
        )
        return PipelineSpec(Layout.parse(f"pools:\n{pools}\n", "here"), settings, MODEL, lasting=True)

    def _driver(self, number: int, process: Process | None = None) -> Driver:
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

    def _ask(self, number: int) -> Asked:
        chance = self.world.random
        prompt, kind = f"video {number}", chance.random()
        if self.faults and kind < 0.03:
            prompt = f"{'bad' if kind < 0.015 else 'nan'} {number}"
        plan = plan_of(chance.randint(2, 6), chance.choice(("text", "text", "image", "video", "plain")), prompt, number)
        priority = chance.choice((0, 0, 0, 0, 1))
        asked = Asked(f"request-{number}", plan, priority, chance.uniform(0, 40))
        if chance.random() < 0.08:
            asked.cancel_s = chance.uniform(0, 30)
        return asked

    # ---- a run

    async def run(self) -> None:
        """Have everything made, with faults meanwhile; then look at what is left."""
        if self.faults:
            for fault in range(self.world.random.randint(0, 5)):
                self.world.later(self.world.random.uniform(0, FAULTS_S), functools.partial(self._break, fault))
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(self._client(asked) for asked in self.asked))
        until_s = self.world.loop.now + SETTLE_S
        while self.world.loop.now < until_s and (self.world.loop.now < FAULTS_S or self._left()):
            await asyncio.sleep(1.0)
            await self._remove_orphans()
        for asked in self.asked:
            self._check_one(asked)
        self.problems += [f"left: {what}: {there}" for what, there in self._left().items()]

    async def _remove_orphans(self) -> None:
        """Remove snapshots of ended requests whose drivers were killed before they could, as workers do."""
        snapshots = Snapshots(BucketOfProcess(self.bucket, Process(self.world.loop, "maintenance")))  # type: ignore[arg-type]
        for asked in self.asked:
            if asked.is_orphaned:
                await asyncio.to_thread(snapshots.delete_all_of, asked.id)

    async def _client(self, asked: Asked) -> None:
        """Have one video made, as batches and workers do: again when it was lost, forgotten when it is durable."""
        await asyncio.sleep(asked.at_s)
        while not asked.ended:
            asked.driver = driver = self.world.random.choice(self.drivers)
            making = self.world.loop.create_task(self._make(asked, driver))
            if asked.cancel_s is not None:
                cancel_s, asked.cancel_s = asked.cancel_s, None
                await asyncio.wait([making], timeout=cancel_s)
                if not making.done():
                    making.cancel()
                    self.world.tell(f"{asked.id} is cancelled")
                    self._excuse_one(asked.id, "it was cancelled")
                    await asyncio.wait([making], timeout=100.0)
                    if not making.done():
                        self.problems.append(f"{asked.id} doesn't end though it is cancelled")
                        return
                    if self.world.random.random() < 0.5:
                        asked.ended, asked.failure = 1, "cancelled"
                        await self._forget(asked, driver)
                        continue
            await asyncio.wait([making, driver.death], return_when=asyncio.FIRST_COMPLETED)
            if not making.done():  # its driver was: another one makes it
                continue
            if not making.cancelled() and (error := making.exception()) is not None:
                self.problems.append(f"{asked.id} has failed in an unknown way: {error!r}")
                asked.ended, asked.failure = 1, "cancelled"

    async def _make(self, asked: Asked, driver: Driver) -> None:
        def note(span: Any) -> None:
            assert span.seconds >= 0, span
            if span.step is not None and asked.first_step_s is None:
                asked.first_step_s = self.world.loop.now

        try:
            made = await driver.engine.generate(asked.plan, id=asked.id, on_event=note, priority=asked.priority)
        except RequestFailed as failed:
            if driver.process.dead:
                await asyncio.get_running_loop().create_future()
            if failed.code == "lost":
                self.world.tell(f"{asked.id} is lost, and asked for again: {failed}")
                self._excuse_one(asked.id, "it was lost")
                await asyncio.sleep(5.0)
                return
            asked.failure = failed.code
            self.world.tell(f"{asked.id} has failed: {failed.code}: {failed}")
        else:
            if driver.process.dead:
                await asyncio.get_running_loop().create_future()
            asked.video = made.mp4
            self.world.tell(f"{asked.id} is made")
            await asyncio.sleep(self.world.random.choice((0.0, 0.5)))  # until it is durable
            if driver.process.dead:
                await asyncio.get_running_loop().create_future()
        asked.ended += 1
        await self._forget(asked, driver)

    async def _forget(self, asked: Asked, driver: Driver) -> None:
        forgetting = self.world.loop.create_task(driver.engine.forget(asked.id))
        await asyncio.wait([forgetting, driver.death], return_when=asyncio.FIRST_COMPLETED)
        asked.is_orphaned |= not forgetting.done()

    # ---- faults

    def _break(self, number: int) -> None:
        chance, world = self.world.random, self.world
        pool = self.pools[chance.choice(sorted(self.pools))]
        replica = chance.choice(pool.replicas)
        kind = chance.choice(FAULTS)
        lasts_s = chance.uniform(1, 30)
        if kind == "drain" and replica.slice_name not in pool.deadlines:
            self.was_drained = True
            pool.drain(replica, chance.choice((2.0, 8.0, 12.0, 30.0, 90.0)))
        elif kind == "leave":
            pool.let_go(replica)
        elif kind == "leader":
            replica.kill("somebody kills it")
        elif kind == "hosts" and replica.slice is not None:
            world.tell(f"hosts of {replica.slice_name} are killed")
            pool.lost(replica, "its hosts were killed")
        elif kind in ("device", "hang") and replica.slice is not None:
            replica.slice.next_fault = kind
        elif kind == "sick" and replica.slice is not None:
            world.tell(f"the disk of {replica.slice_name} is full")
            replica.slice.is_sick = True
        elif kind in ("down", "full"):
            world.tell(f"the bucket is {kind} for {lasts_s:.0f} s")
            setattr(self.bucket, f"is_{kind}", True)
            self.bucket.was_ill = True
            world.later(lasts_s, functools.partial(setattr, self.bucket, f"is_{kind}", False))
        elif kind == "slow":
            world.tell(f"the bucket is slow for {lasts_s:.0f} s")
            self.bucket.seconds = chance.choice((2.0, 20.0))
            self.bucket.was_ill = True
            world.later(lasts_s, functools.partial(setattr, self.bucket, "seconds", 0.02))
        elif kind == "silent":
            driver = chance.choice(self.drivers)
            world.tell(f"the reference store of {driver.process.name} is silent for {lasts_s:.0f} s")
            driver.handle.silent_until_s = world.loop.now + lasts_s
        elif kind == "driver":
            at = chance.randrange(len(self.drivers))
            self._kill_driver(at)
        elif kind == "clock":
            world.loop.wall_offset_s += chance.choice((-3600.0, -5.0, 5.0, 3600.0))
            world.tell("the clock on the wall is set")
        elif kind == "ray":
            world.tell(f"Ray's control store is silent for {lasts_s:.0f} s")
            world.ray_is_silent_until_s = world.loop.now + lasts_s
        elif kind == "evict":
            stores = [there for driver in self.drivers for there in driver.ref_store._scopes.items()]
            if stores:
                scope, there = chance.choice(stores)
                world.tell(f"payloads of scope {scope} are evicted")
                for ref in there.values():
                    ref.is_evicted = True
                self._excuse_all("payloads were evicted")
        elif kind == "hub":
            world.hub_is_down = True
            world.later(lasts_s, functools.partial(setattr, world, "hub_is_down", False))

    def _kill_driver(self, at: int) -> None:
        gone = self.drivers[at]
        self.world.tell(f"{gone.process.name} is killed")
        gone.process.dead = True
        gone.death.set_result(None)
        for asked in self.asked:
            if asked.driver is gone and not asked.ended:
                self._excuse_one(asked.id, KILLED)
                asked.is_orphaned = True
        self.drivers[at] = self._driver(self._numbers)
        self._numbers += 1

    def _excuse(self, replica: Replica, why: str) -> None:
        """Note whose steps may be repeated: what is lost is on the hosts, on its way, or waits for its next stage."""
        held = [] if replica.slice is None else replica.slice.host.keys()
        lost = {name.rpartition(" ")[0] for name in held}
        lost |= {stream._args[0].key for stream in replica.streams}
        for driver in self.drivers:
            scopes = {scope._number: id_ for id_, (_, scope) in driver.engine._kept.items()}
            for number, there in driver.ref_store._scopes.items():
                if any(ref.owner is replica.process for ref in there.values()):
                    lost.add(scopes.get(number, ""))
        for id_ in lost:
            self._excuse_one(id_, why)
        runner = getattr(replica.leader, "_runner", None)
        written = set() if runner is None else {name.rpartition(".")[0] for name in runner._snapshotter._writing}
        for asked in self.asked:
            asked.is_orphaned |= asked.id in written  # nobody asks any more whether it is still needed

    def _excuse_one(self, id_: str, why: str) -> None:
        self.world.excuses[id_].append((self.world.loop.now, why))

    def _excuse_all(self, why: str) -> None:
        for asked in self.asked:
            if not asked.ended:
                self._excuse_one(asked.id, why)

    # ---- what must hold

    def _check_one(self, asked: Asked) -> None:
        kind = asked.plan.request.prompt.split()[0]
        expected = {"bad": "invalid", "nan": "unhealthy"}.get(kind)
        if asked.ended != 1:
            self.problems.append(f"{asked.id} has ended {asked.ended} times")
        elif asked.failure not in (expected, "cancelled") and not (asked.failure is None and expected is not None):
            self.problems.append(f"{asked.id} has failed as {asked.failure}, which is not its fault")
        elif asked.failure is None and asked.video != video_of(asked.plan):
            self.problems.append(f"{asked.id} has become another video")
        done = [step for step, _, _ in self.world.steps[asked.id]]
        repeated, excuses = len(done) - len(set(done)), self.world.excuses[asked.id]
        # What a loss costs, where snapshots can be written: the steps since the last one, which was being written.
        # What nobody waits for any more is noticed after some seconds.
        each = {why: self.spec.settings.snapshot_every + (11 if why == KILLED else 1) for _, why in excuses}
        worst = sum(each[why] for _, why in excuses) if not self.bucket.was_ill else 0
        # Without a snapshot, a drain takes a request back to the last one that could be written.
        unexplained = not excuses and not (self.bucket.was_ill and self.was_drained)
        if repeated and (unexplained or repeated > worst > 0):
            self.problems.append(
                f"{asked.id}: {repeated} steps were repeated: {self.world.steps[asked.id]}; reasons: {excuses}"
            )
        if asked.failure is None and set(done) != set(range(asked.plan.first_step + 1, asked.plan.request.steps + 1)):
            self.problems.append(f"{asked.id}: steps were left out: {done}")

    def _left(self) -> dict[str, Any]:
        """Return what is there still, though nobody makes anything."""
        left: dict[str, Any] = defaultdict(list)
        for pool in self.pools.values():
            if len(pool.ready) != len(pool.replicas):
                left["replicas that don't come back"].append(pool.pool.name)
            for replica in pool.ready:
                runner = replica.leader._runner
                scheduler = runner.scheduler
                queues = [scheduler, scheduler.device, scheduler.places, scheduler.other_places]
                found = {
                    "held on hosts": replica.slice.host.keys() if replica.slice else None,
                    "streams": replica.streams,
                    "work": runner.work,
                    "queued": [one for queue in queues for one in (*queue._inside, *queue._waiting)],
                    "paused": scheduler._paused,
                    "staying": replica.leader._drain._staying,
                    "snapshots being taken": [*runner._snapshotter._copying, *runner._snapshotter._writing],
                }
                for what, there in found.items():
                    if there:
                        left[what].append((replica.process.name, there))
        for driver in self.drivers:
            queues = [driver.engine._queue, *driver.engine._connection._queues.values()]
            inside = [one for queue in queues for one in (*queue._inside, *queue._waiting)]
            if inside or driver.engine._inside or driver.ref_store._scopes:
                left["in a driver"].append((driver.process.name, inside, driver.ref_store._scopes))
        self.status.refresh()
        # One whose driver was killed before it could name it is remembered for an hour.
        named = {asked.id for asked in self.asked if not asked.is_orphaned}
        if requests := self.status.seen().requests.keys() & named:
            left["said to be under way"] = sorted(requests)
        if self.bucket.content and not self.bucket.failures:
            left["snapshots"] = sorted(self.bucket.content)
        return left


@functools.cache
def _plan(steps: int, kind: str) -> RequestPlan:
    given: dict[str, Any] = {"guidance_scale": 1.0, "guidance_scale_2": 1.0} if kind == "plain" else {}
    request = GenerationRequest(prompt="p", height=64, width=64, frames=5, steps=steps, **given)
    plan = MODEL.plan(request, image=kind == "image")
    if kind == "video":  # the first steps are left out
        first = steps // 3
        experts = [dataclasses.replace(one, start=max(first, one.start)) for one in plan.experts if one.stop > first]
        plan = dataclasses.replace(plan, experts=tuple(experts))
        plan = dataclasses.replace(plan, request=dataclasses.replace(plan.request, video=__file__, strength=0.7))
    return plan


def plan_of(steps: int, kind: str, prompt: str, seed: int) -> RequestPlan:
    """Return the plan of a request: of a text, with an image, with a video of which it is a change, or unguided."""
    plan = _plan(steps, kind)
    image: Any = _PICTURE if kind == "image" else None
    request = dataclasses.replace(plan.request, prompt=prompt, seed=seed, image=image)
    return dataclasses.replace(plan, request=request, prompts=(prompt, *plan.prompts[1:]))


_PICTURE = Image.new("RGB", (8, 8))


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended."""

    seed: int
    videos: int
    problems: list[str]
    story: list[tuple[float, str]]

    def tell(self) -> str:
        """Return what happened and what is wrong, for people."""
        lines = [f"{when:8.2f} s  {what}" for when, what in self.story]
        return "\n".join([f"seed {self.seed}:", *lines, "wrong:", *(f"  {problem}" for problem in self.problems)])


@contextlib.contextmanager
def little_garbage(every: int = 20) -> Iterator[Callable[[], object]]:
    """Look for garbage now and then, at a call of what this gives, and through nothing that was there before.

    Going through all of Ray's modules after each run would take as long as the run.
    """
    calls, hook = itertools.count(1), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None  # Coroutines of killed processes are found in the midst of things.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda: None if next(calls) % every else gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
        gc.collect()
        sys.unraisablehook = hook


def simulate(seed: int, *, requests: int | None = None, faults: bool = True) -> Result:
    """Run one world to its end."""
    random.seed(seed)
    with virtual_time() as loop:
        world = World(loop, seed)
        run: Run | None = None

        async def live() -> None:
            nonlocal run
            run = Run(world, requests=requests, faults=faults)
            await run.run()

        try:
            loop.run_until_complete(live())
        except (Stuck, TimeoutError, RuntimeError) as error:
            if run is None or (isinstance(error, RuntimeError) and not loop.blocked):
                raise
            where = [f"the event loop was blocked: {where}" for where in loop.blocked]
            run.problems += where or [f"it never ends: {error!r}"]
            run.problems += [f"{asked.id} has not ended" for asked in run.asked if not asked.ended]
        assert run is not None
        return Result(seed, len(run.asked), run.problems, world.story)
