"""A service's workers in a simulated world. Leases, attempts, maintenance and SQLite are real, and processes die."""

import asyncio
import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from actors.api.settings import ServiceSettings
from actors.api.worker import context as worker_context
from actors.api.worker import job_worker, maintenance
from actors.api.worker.context import WorkerContext
from actors.api.worker.job_worker import JobWorker
from actors.jobs.database import Database
from actors.jobs.errors import CommitUncertain, StoreUnavailable
from actors.jobs.store import JobStore
from actors.jobs.tables import File, Job
from actors.jobs.values import JobSettings
from actors.jobs.watching import list_fragments
from actors.slices.snapshots import Snapshots
from tests.actors.simulation.bucket import Bucket, BucketOfProcess
from tests.actors.simulation.media import Media
from tests.actors.simulation.scenario import FAULTS_S, Result, Run
from tests.actors.simulation.slices import video_of
from tests.actors.simulation.submissions import MODEL
from tests.actors.simulation.virtual_time import Stuck, virtual_time
from tests.actors.simulation.world import Process, World
from wan_tpu.request import GenerationRequest

SETTINGS = JobSettings(abandoned_s=40.0)
LASTS_S = 700.0  # A service whose jobs aren't done by then counts as hung.
TIDY_S = 130.0  # Time for leftover files and snapshots to be removed.
FAULTS = (
    "worker",
    "worker",
    "stop",
    "database",
    "answers",
    "down",
    "slow",
    "full",
    "clock",
    "drain",
    "leader",
    "hosts",
)
_COMPILED: dict[Any, Any] = {}


class DatabaseOfProcess(Database):
    """One process's access to the database: it takes time, fails at times, and the answer to a commit may get lost."""

    def __init__(self, address: str, service: "Service", process: Process) -> None:
        super().__init__(address)
        # Processes share compiled statements, or each run would spend half of its time on compiling them.
        self._engine = self._engine.execution_options(compiled_cache=_COMPILED)
        self._service, self._process = service, process

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        with self._connect():
            with super().write() as session:
                yield session
        if self._service.answers_are_lost and self._service.world.random.random() < 0.3:
            raise CommitUncertain("the answer to a commit got lost")

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:  # type: ignore[override]
        with self._connect(), super().read() as session:
            yield session

    @contextlib.contextmanager
    def _connect(self) -> Iterator[None]:
        # The wait comes before the transaction, because no other process may run during a transaction.
        self._process.loop.block(self._service.world.random.choice((0.002, 0.01)))
        self._process.check_thread()
        if self._service.database_is_away:
            raise StoreUnavailable("the database can't be reached")
        yield


@dataclasses.dataclass
class Worker:
    """A worker's process."""

    process: Process
    task: asyncio.Task[None]


class Service:
    """One service over one simulated pipeline."""

    def __init__(self, world: World, address: str, jobs: int) -> None:
        chance = world.random
        self.world, self.address = world, address
        self.run = Run(world, requests=0, faults=False, drivers=1)
        self.storage = Bucket(world)
        self.database_is_away = self.answers_are_lost = False
        self.settings = ServiceSettings(
            database=address, storage="storage", model="m", concurrency=chance.choice((2, 4)), jobs=SETTINGS
        )
        self._numbers = 0
        self.client = self.opening = Process(world.loop, "client")
        self.store = JobStore(DatabaseOfProcess(address, self, self.client), SETTINGS)
        self.workers = [self.start_worker() for _ in range(chance.randint(1, 3))]
        self.jobs = jobs
        self.plans: dict[str, Any] = {}  # The plans of all jobs, by id.
        self.cancelled: set[str] = set()
        self.problems: list[str] = []
        self.watchable = 0  # The number of jobs of which all fragments were stored.

    def start_worker(self) -> Worker:
        """Start a worker, as a replacement for one that has ended."""
        self._numbers += 1
        process = Process(self.world.loop, f"worker {self._numbers}")
        engine = self.run._start_driver(1000 + self._numbers, process).engine
        engine.check_ready = self._ready  # type: ignore[attr-defined]

        async def work() -> None:
            tools = await asyncio.to_thread(self._tools, engine, process)
            await JobWorker(process.name, tools).run()

        return Worker(process, self.world.loop.create_task(work()))

    def _tools(self, engine: Any, process: Process) -> WorkerContext:
        snapshots = Snapshots(BucketOfProcess(self.run.bucket, process))  # type: ignore[arg-type]
        while True:
            self.opening = process  # The worker opens database and storage before it waits for anything.
            try:
                tools = WorkerContext(self.settings, engine, snapshots, pictures=False)
                tools.queue.complete = functools.partial(self._complete, tools.queue.complete)  # type: ignore[method-assign]
                return tools
            except StoreUnavailable:
                self.world.loop.block(1.0)

    def open_database(self, _address: str) -> DatabaseOfProcess:
        """Open the database for the worker that is starting."""
        return DatabaseOfProcess(self.address, self, self.opening)

    def open_storage(self, _location: str) -> Any:
        """Open the storage of results for the worker that is starting."""
        return BucketOfProcess(self.storage, self.opening)

    async def _ready(self) -> None:
        pass

    # ---- a run

    async def live(self) -> None:
        """Run all jobs, with faults meanwhile, and then check the outcomes and what is left over."""
        chance = self.world.random
        for _ in range(chance.randint(0, 5)):
            self.world.later(chance.uniform(0, FAULTS_S), self._break)
        async with asyncio.timeout(LASTS_S):
            await asyncio.gather(*(self._client(number) for number in range(self.jobs)))
            while any(not job.has_ended for job in await self._all()):
                await asyncio.sleep(5.0)
        self.database_is_away = self.answers_are_lost = False
        await asyncio.sleep(TIDY_S)
        await asyncio.to_thread(self._check, await self._all())
        for worker in self.workers:
            worker.task.cancel()
        await asyncio.wait([worker.task for worker in self.workers])

    async def _client(self, number: int) -> None:
        chance = self.world.random
        await asyncio.sleep(chance.uniform(0, 40))
        prompt = {0: "bad", 1: "nan"}.get(chance.randrange(40), "video") + f" {number}"
        request = GenerationRequest(
            prompt=prompt, height=64, width=64, frames=5, steps=chance.randint(2, 6), seed=number
        )
        plan = MODEL.plan(request)
        fields = plan.request.to_json() | {"model": "m", "seconds": None, "loras": []}
        job = Job(owner=chance.choice("ab"), request=fields, model="m", priority=chance.choice((0, 0, 1)))
        job.watched_at = chance.choice((None, 0.0))  # Fragments of a watched one are stored.
        while True:
            try:
                await asyncio.to_thread(self.store.submit, job)
                break
            except CommitUncertain:  # The job may have been accepted.
                break
            except StoreUnavailable:
                await asyncio.sleep(2.0)
        self.plans[job.id] = plan
        if chance.random() < 0.1:
            await asyncio.sleep(chance.uniform(0, 20))
            with contextlib.suppress(StoreUnavailable):
                self.cancelled.add(job.id)
                await asyncio.to_thread(self.store.cancel, job.id)

    async def _all(self) -> list[Job]:
        while True:
            try:
                return list(await asyncio.to_thread(self.store.look_at_all, list(self.plans)))
            except StoreUnavailable:
                await asyncio.sleep(2.0)

    # ---- faults

    def _break(self) -> None:
        chance, world = self.world.random, self.world
        kind, lasts_s = chance.choice(FAULTS), chance.uniform(1, 60)
        pool = self.run.pools[chance.choice(sorted(self.run.pools))]
        replica = chance.choice(pool.replicas)
        if kind in ("worker", "stop"):
            at = chance.randrange(len(self.workers))
            worker = self.workers[at]
            world.tell(f"{worker.process.name} is {'killed' if kind == 'worker' else 'stopped'}")
            if kind == "worker":
                worker.process.dead = True
            else:
                worker.task.cancel()
            self.workers[at] = self.start_worker()
        elif kind in ("database", "answers"):
            name = "database_is_away" if kind == "database" else "answers_are_lost"
            world.tell(f"{name.replace('_', ' ')} for {lasts_s:.0f} s")
            setattr(self, name, True)
            world.later(lasts_s, functools.partial(setattr, self, name, False))
        elif kind in ("down", "full"):
            bucket = chance.choice((self.storage, self.run.bucket))
            world.tell(f"{'results' if bucket is self.storage else 'snapshots'}: the bucket is {kind}")
            setattr(bucket, f"is_{kind}", True)
            world.later(lasts_s, functools.partial(setattr, bucket, f"is_{kind}", False))
        elif kind == "slow":
            world.tell("storage of results is slow")
            self.storage.seconds = 10.0
            world.later(lasts_s, functools.partial(setattr, self.storage, "seconds", 0.02))
        elif kind == "clock":
            world.loop.wall_offset_s += chance.choice((-20.0, -5.0, 5.0, 60.0))
            world.tell("the clock on the wall is set")
        elif kind == "drain" and replica.slice_name not in pool.deadlines:
            pool.drain(replica, chance.choice((2.0, 12.0, 90.0)))
        elif kind == "leader":
            replica.kill("somebody kills it")
        elif kind == "hosts" and replica.slice is not None:
            pool.lose(replica, "its hosts were killed")

    # ---- what must hold

    def _check(self, jobs: list[Job]) -> None:
        if len(jobs) != len(self.plans):
            self.problems.append(f"{len(self.plans) - len(jobs)} jobs that were accepted are gone")
        expected = set()
        for job in jobs:
            self._check_job(job)
            expected |= set(job.results.values())
        if wrong := expected ^ set(self.storage.content):
            self.problems.append(f"left in storage, or lacking there: {sorted(wrong)}")
        if self.run.bucket.content:
            self.problems.append(f"left: snapshots: {sorted(self.run.bucket.content)}")
        with self.store._database.read() as session:
            files = {file.name for file in session.query(File)}
        if files != expected:
            self.problems.append(f"files are recorded that aren't there: {sorted(files ^ expected)}")

    def _complete(self, complete: Callable[..., Job], claimed: Job, *args: Any, **options: Any) -> Job:
        """Complete a job. If it is watchable, check its fragments now, because they are deleted soon."""
        job = complete(claimed, *args, **options)
        fragments = list_fragments(Database(self.address), job.id)
        content = b"".join(self.storage.content.get(fragment.name, b"") for fragment in fragments)
        if job.fragments is not None:
            self.watchable += 1
            if content != video_of(self.plans[job.id]):
                self.problems.append(f"{job.id} is said to be watchable, but its fragments aren't the video")
        return job

    def _check_job(self, job: Job) -> None:
        kind = job.request["prompt"].split()[0]
        code = {"bad": "invalid", "nan": "unhealthy"}.get(kind)
        if job.status == "completed":
            content = self.storage.content.get(job.results["video"])
            if code is not None or content != video_of(self.plans[job.id]):
                self.problems.append(f"{job.id} has become another video: {job.request['prompt']}")
        elif job.error_code == "cancelled" and job.id in self.cancelled:
            pass
        elif job.error_code != code or code is None:
            self.problems.append(f"{job.id} has failed, which is not its fault: {job.error_code}: {job.error_message}")


def simulate_service(seed: int, folder: Path, empty: Path, jobs: int = 12) -> Result:
    """Run one service to its end. `empty` is a database file that has only the schema."""
    address = shutil.copy(empty, folder / f"{seed}.sqlite")
    with virtual_time() as loop, pytest.MonkeyPatch.context() as patch:
        Media(loop).install(patch)
        # Idle workers look for jobs less often than in production, and for orphans more often, to save test time.
        patch.setattr(job_worker, "_LOOK_S", 2.0)
        patch.setattr(maintenance, "_ORPHANS_S", 60.0)
        world = World(loop, seed)
        service: Service | None = None

        async def live() -> None:
            nonlocal service
            service = Service(world, str(address), jobs)
            patch.setattr(worker_context, "open_database", service.open_database)
            patch.setattr(worker_context, "open_storage", service.open_storage)
            await service.live()

        try:
            loop.run_until_complete(live())
        except (Stuck, TimeoutError, RuntimeError) as error:
            if service is None or (isinstance(error, RuntimeError) and not loop.blocked):
                raise
            service.problems += [f"blocked: {where}" for where in loop.blocked] or [f"it never ends: {error!r}"]
        assert service is not None
        world.tell(f"{service.watchable} jobs could be watched to their end")
        return Result(seed, jobs, service.problems, world.story)
