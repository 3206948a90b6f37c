"""A worker: takes jobs out of the queue, and has each made."""

import asyncio
import logging
import time

from actors.api.attempt import Attempt, Tools
from actors.api.logs import told
from actors.jobs.values import Lease
from wan_tpu.errors import WanTpuError

log = logging.getLogger(__name__)

_LOOK_S = 0.5  # for a job, when none waited
_AGAIN_S = 2.0  # when database or pipeline didn't answer


class Worker:
    """One per process. What it does when the database or the storage can't be reached: try again."""

    def __init__(self, name: str, tools: Tools) -> None:
        self.name, self._tools = name, tools
        self._running: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(tools.settings.concurrency)
        self._paused_until = 0.0  # of time.monotonic()
        self._doubtful = False  # whether the pipeline can be used
        self._leaving = False

    async def run(self) -> None:
        """Work until `leave` is called, or this is cancelled."""
        try:
            while not self._leaving:
                async with self._places:
                    lease = await self._claim()
                if lease is None:
                    await asyncio.sleep(max(_LOOK_S, self._paused_until - time.monotonic()))
                    continue
                await self._places.acquire()
                await self._start(lease)
        finally:
            await self.leave()

    async def leave(self) -> None:
        """Give back what is under way, for another worker to go on with."""
        self._leaving = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _pause(self, seconds: float) -> None:
        self._paused_until, self._doubtful = time.monotonic() + seconds, True

    async def _claim(self) -> Lease | None:
        if time.monotonic() < self._paused_until:
            return None
        try:
            if self._doubtful:  # no job's attempts are spent on finding out
                await self._tools.ready()
                self._doubtful = False
            return await asyncio.to_thread(self._tools.queue.claim, self.name)
        except WanTpuError as error:
            told(log, "no claim", logging.WARNING, reason=str(error))
            self._paused_until = time.monotonic() + _AGAIN_S
            return None

    async def _start(self, lease: Lease) -> None:
        before = self._running.get(lease.job.id)
        if before is not None:  # its lease had run out; the engine must be rid of it first
            before.cancel()
            await asyncio.wait([before])
        task = asyncio.create_task(Attempt(self._tools, lease, self._pause).run())
        self._running[lease.job.id] = task
        self._tools.meters.under_way.set(len(self._running))
        task.add_done_callback(lambda done: self._ended(lease.job.id, done))

    def _ended(self, job: str, task: asyncio.Task[None]) -> None:
        self._places.release()
        if self._running.get(job) is task:
            del self._running[job]
        self._tools.meters.under_way.set(len(self._running))
        if not task.cancelled() and task.exception() is not None:
            log.error("attempt", exc_info=task.exception())
