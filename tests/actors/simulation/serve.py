"""Stand-ins for Ray Serve: pools whose replicas are started, health-checked and replaced, and handles to the pools."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorDiedError, RayTaskError

from actors.observe.status_actor import StatusActor
from actors.observe.status_board import StatusBoard
from actors.pipeline_spec import PipelineSettings
from actors.reliability import ReliabilitySettings
from actors.slices import router
from actors.slices.dependencies import LeaderDependencies
from actors.slices.leader import SliceLeader
from actors.slices.messages import SliceRequest
from cluster.errors import SliceLost
from cluster.layout import Pool
from tests.actors.simulation.bucket import Bucket, BucketOfProcess
from tests.actors.simulation.ray_objects import Objects, StatusHandle
from tests.actors.simulation.slices import Slice, find_drain_s
from tests.actors.simulation.world import CALL_S, Process, World


class Leader(SliceLeader):
    """A leader that doesn't report its programs to Serve."""

    async def _register_program(self, shape: str) -> str:  # type: ignore[override]
        return shape


class Replica:
    """A process that leads a slice."""

    def __init__(self, pool: "PoolOfReplicas", name: str, slice_name: str) -> None:
        self.pool, self.name, self.slice_name = pool, name, slice_name
        self.process = Process(pool.world.loop, f"{pool.pool.name}/{name}")
        self.leader: Any = None
        self.slice: Slice | None = None
        self.streams: set[Stream] = set()
        self._tasks = [pool.world.loop.create_task(self._live())]

    def take(self, _spec: Any, _host_class: Any, _checkpoint: Any, stages: Any, *_: Any, **options: Any) -> Slice:
        """Give the leader its slice."""
        world = self.pool.world
        world.loop.block(world.random.uniform(1, 4))
        self.process.check_thread()
        if self.slice_name in self.pool.deadlines:
            raise SliceLost(f"{self.slice_name} is taken away")
        host = None if self.pool.make_host is None else self.pool.make_host(stages)
        self.slice = Slice(world, self.process, self.slice_name, stages, options["timeouts"], host)
        self.slice.on_loss = lambda why: self.pool.on_loss(self, why)
        return self.slice

    def take_no_calls(self) -> None:
        """Stop routing calls to this replica."""
        if self in self.pool.ready:
            self.pool.ready.remove(self)

    def kill(self, why: str) -> None:
        """End the process at once. Its slice ends with it, and the objects that it owns are lost."""
        if self.process.dead:
            return
        self.pool.world.tell(f"{self.process.name} ends: {why}")
        self.process.dead = True
        self.take_no_calls()
        self.pool.lose(self, why)
        for stream in list(self.streams):
            stream.fail(ActorDiedError())
        self.pool.replace(self)

    async def _live(self) -> None:
        pool, world = self.pool, self.pool.world
        dependencies = LeaderDependencies(
            self.name,
            StatusActor("pipeline", StatusHandle(pool.status, self.process)),
            BucketOfProcess(pool.bucket, self.process),  # type: ignore[arg-type]
            take=self.take,
            find_drain_s=find_drain_s(world, self.process, pool.deadlines),
            store=Objects(self.process),
            end_process=lambda: self.kill("it ends itself"),
        )
        self.leader = Leader.__new__(Leader)
        try:
            await self.leader.__init__(pool.pool, pool.settings, dependencies)  # type: ignore[misc]
        except Exception as error:
            self.kill(f"it can't be started: {error}")
            return
        if self.process.dead:
            return
        pool.ready.append(self)
        pool.route_waiting()
        while not self.process.dead and pool.health_s:
            await asyncio.sleep(pool.health_s)
            try:
                async with asyncio.timeout(20 * pool.health_s):
                    # While a replica starts, Serve's controller asks, and the replica itself.
                    await asyncio.gather(self.leader.check_health(), self.leader.check_health())
            except Exception as error:
                self.kill(f"it isn't healthy: {error!r}")


class PoolOfReplicas:
    """A deployment with one replica per slice. A replica that ends is replaced."""

    def __init__(
        self,
        world: World,
        pool: Pool,
        settings: PipelineSettings,
        status: StatusBoard,
        bucket: Bucket,
        slices: int,
        health_s: float = ReliabilitySettings.health_s,
    ) -> None:
        self.world, self.pool, self.settings, self.status, self.bucket = world, pool, settings, status, bucket
        self.health_s = health_s
        self.make_host: Callable[[tuple[str, ...]], Any] | None = None  # Makes hosts; None for simulated ones.
        self.deadlines: dict[str, float] = {}  # When each slice that is being drained is taken away.
        self.waiting: deque[Stream] = deque()
        self.ready: list[Replica] = []  # The replicas that accept calls.
        self._names = itertools.count()
        self.on_loss: Callable[[Replica, str], object] = lambda replica, why: None
        self.replicas = [self._start(f"{pool.name}-{i}") for i in range(slices)]

    def lose(self, replica: Replica, why: str) -> None:
        """Lose a replica's slice, after noting what is lost with it."""
        self.on_loss(replica, why)
        if replica.slice is not None:
            replica.slice.lose(SliceLost(f"{replica.slice_name}: {why}"))

    def let_go(self, replica: Replica) -> None:
        """Have a replica end once it is idle, as when a pool is scaled down."""
        self.world.tell(f"{replica.process.name} is to go")
        replica.take_no_calls()

        def look() -> None:
            if not replica.process.dead and not replica.streams:
                replica.kill("it had nothing more to do")
            elif not replica.process.dead:
                self.world.later(0.2, look)

        look()

    def replace(self, lost: Replica) -> None:
        """Start a replica in place of another, on a new slice if the old one was taken away."""

        def start() -> None:
            if lost not in self.replicas:
                return
            self.deadlines.pop(lost.slice_name, None)
            self.replicas[self.replicas.index(lost)] = self._start(lost.slice_name)

        wait_s = max(0.0, self.deadlines.get(lost.slice_name, 0.0) - self.world.loop.now)
        self.world.later(wait_s + self.world.random.uniform(0.5, 3), start)

    def grow(self) -> None:
        """Start another replica, on a slice of its own."""
        self.replicas.append(self._start(f"{self.pool.name}-new-{len(self.replicas)}"))

    def drain(self, replica: Replica, left_s: float) -> None:
        """Announce that a replica's slice will be taken away, and take it away."""
        name = replica.slice_name
        self.world.tell(f"{name} is drained, {left_s:.0f} s are left")
        self.deadlines[name] = self.world.loop.now + left_s

        def take() -> None:
            if not replica.process.dead and replica.slice is not None and not replica.slice.is_lost:
                self.lose(replica, "it was taken away")

        self.world.later(left_s, take)

    def route_waiting(self) -> None:
        """Route waiting calls to replicas that are ready."""
        while self.waiting and (ready := self.ready):
            stream = self.waiting.popleft()
            stream.begin(_choose_best(ready, stream._args[0]))

    def _start(self, slice_name: str) -> Replica:
        return Replica(self, f"r{next(self._names)}", slice_name)


def _choose_best(ready: list[Replica], request: SliceRequest) -> Replica:
    """Return the replica that `actors.slices.router` prefers."""
    avoid = request.avoid

    def rank(replica: Replica) -> tuple[bool, int, bool]:
        return router.rank_replica(replica.name, len(replica.streams), holds_program=True, avoid=avoid)

    return min(router.sample(ready, rank), key=rank)


class Handle:
    """A driver's handle to a pool."""

    def __init__(self, pool: PoolOfReplicas, driver: Process) -> None:
        names = ("check_adapters", "encode_text", "encode_image", "denoise", "decode")
        self._methods = {name: _Remote(pool, driver, name) for name in names}

    def __getattr__(self, name: str) -> "_Remote":
        return self._methods[name]

    def options(self, **_: Any) -> "Handle":
        return self

    def shutdown(self) -> None:
        pass


class _Remote:
    def __init__(self, pool: PoolOfReplicas, driver: Process, method: str) -> None:
        self._pool, self._driver, self._method = pool, driver, method

    def remote(self, *args: Any) -> "Stream":
        return Stream(self._pool, self._driver, self._method, args)


class Stream:
    """A call of a replica that returns a stream of results."""

    def __init__(self, pool: PoolOfReplicas, driver: Process, method: str, args: tuple[Any, ...]) -> None:
        self._pool, self._driver, self._method, self._args = pool, driver, method, args
        self._loop = pool.world.loop
        self._events: deque[Any] = deque()
        self._error: BaseException | None = None
        self._is_over = False
        self._news: asyncio.Future[None] | None = None
        self._replica: Replica | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop.call_later(CALL_S, self._route)

    def _route(self) -> None:
        if self._is_over or self._driver.dead:
            return
        if ready := self._pool.ready:
            self.begin(_choose_best(ready, self._args[0]))
        else:
            self._pool.waiting.append(self)

    def begin(self, replica: Replica) -> None:
        """Run the call on a replica."""
        if self._is_over or self._driver.dead:
            return
        self._replica = replica
        replica.streams.add(self)
        self._task = self._loop.create_task(self._run(replica))

    async def _run(self, replica: Replica) -> None:
        try:
            async for event in getattr(replica.leader, self._method)(*self._args):
                if replica.process.dead:
                    return
                self._events.append(event)
                self._tell()
        except BaseException as error:
            if not replica.process.dead:
                # Ray wraps the exception of a remote method in the same way.
                self._end(RayTaskError(self._method, "", error) if isinstance(error, Exception) else error)
        else:
            if not replica.process.dead:
                self._end(StopAsyncIteration())

    def fail(self, error: BaseException) -> None:
        """End the stream with an error for whoever reads it."""
        self._end(error)

    def cancel(self) -> None:
        """Cancel the call, which ends a moment later."""
        self._is_over = True
        if self._task is not None:
            self._loop.call_later(CALL_S, self._task.cancel)

    def _end(self, error: BaseException) -> None:
        if self._replica is not None:
            self._replica.streams.discard(self)
        if not self._is_over:
            self._is_over, self._error = True, error
            self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done() and not self._driver.dead:
            self._news.set_result(None)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        while not self._events:
            if self._error is not None:
                raise self._error
            self._news = self._loop.create_future()
            await self._news
        return self._events.popleft()
