"""A worker: takes jobs out of the queue, and has each made."""

import asyncio
import contextlib
import logging
import time

from actors.api.attempt import Attempt, Tools
from actors.api.logs import told
from actors.jobs.values import Lease
from wan_tpu.errors import WanTpuError

log = logging.getLogger(__name__)

_LOOK_S = 0.5  # for a job, when none waited
_COUNT_S = 5.0  # between two looks at what replicas have compiled
_AGAIN_S = 2.0  # when database or pipeline didn't answer


class Worker:
    """One per process. What it does when the database or the storage can't be reached: try again."""

    def __init__(self, name: str, tools: Tools) -> None:
        self.name, self._tools = name, tools
        self._running: dict[str, tuple[asyncio.Task[None], int]] = {}  # job -> attempt, priority
        self._ended_one = asyncio.Event()
        self._paused_until = 0.0  # of time.monotonic()
        self._doubtful = False  # whether the pipeline can be used
        self._claiming = asyncio.Lock()
        self._leaving = False

    async def run(self) -> None:
        """Work until `leave` is called, or this is cancelled."""
        counting = asyncio.create_task(self._count_compilations())
        try:
            while not self._leaving:
                lease = await self._claim()
                if lease is not None:
                    await self._start(lease)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(_LOOK_S, self._paused_until - time.monotonic())):
                        await self._ended_one.wait()
                self._ended_one.clear()
        finally:
            counting.cancel()
            await self.leave()

    async def leave(self) -> None:
        """Give back what is under way, for another worker to go on with."""
        self._leaving = True
        running = [task for task, _ in self._running.values()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _count_compilations(self) -> None:
        while True:
            try:
                for one in await self._tools.engine.compiled():
                    self._tools.meters.compile_s.labels(one.pool, one.program).observe(one.seconds)
            except Exception:  # figures: jobs go on without
                log.exception("compilations")
            await asyncio.sleep(_COUNT_S)

    async def _pause(self, seconds: float) -> None:
        self._paused_until = time.monotonic() + seconds
        async with self._claiming:  # a claim under way would take the job that is about to be given back
            self._doubtful = True

    async def _claim(self) -> Lease | None:
        """Take a job if there is a place; beyond `concurrency` only one more urgent than another that runs."""
        settings, running = self._tools.settings, [priority for _, priority in self._running.values()]
        if time.monotonic() < self._paused_until or len(running) >= settings.concurrency + settings.urgent:
            return None
        above = min(running) if len(running) >= settings.concurrency else None
        try:
            async with self._claiming:
                if self._doubtful:  # no job's attempts are spent on finding out
                    await self._tools.ready()
                    self._doubtful = False
                return await asyncio.to_thread(self._tools.queue.claim, self.name, above=above)
        except WanTpuError as error:
            told(log, "no claim", logging.WARNING, reason=str(error))
            self._paused_until = time.monotonic() + _AGAIN_S
            return None

    async def _start(self, lease: Lease) -> None:
        before = self._running.get(lease.job.id)
        if before is not None:  # its lease had run out; the engine must be rid of it first
            before[0].cancel()
            await asyncio.wait([before[0]])
        task = asyncio.create_task(Attempt(self._tools, lease, self._pause).run())
        self._running[lease.job.id] = task, lease.job.priority
        self._tools.meters.under_way.set(len(self._running))
        task.add_done_callback(lambda done: self._ended(lease.job.id, done))

    def _ended(self, job: str, task: asyncio.Task[None]) -> None:
        if job in self._running and self._running[job][0] is task:
            del self._running[job]
        self._ended_one.set()
        self._tools.meters.under_way.set(len(self._running))
        if not task.cancelled() and task.exception() is not None:
            log.error("attempt", exc_info=task.exception())
