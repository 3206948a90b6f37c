"""A worker: takes jobs out of the queue, and has each made."""

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from actors.api.worker.attempt import Attempt
from actors.api.worker.context import WorkerContext
from actors.api.worker.maintenance import maintenance
from actors.jobs.tables import Job
from actors.observe.logs import log_event
from wan_tpu.errors import WanTpuError

log = logging.getLogger(__name__)

_URGENT = 2  # jobs beyond `concurrency` that are taken when they are more urgent than one that is under way
_LOOK_S = 0.5  # for a job, when none waited
_AGAIN_S = 2.0  # when database or pipeline didn't answer
_THREADS = 32  # beside one for each job: a storage that hangs takes those, and leases are renewed all the same


class JobWorker:
    """One per process. What it does when the database or the storage can't be reached: try again."""

    def __init__(self, name: str, tools: WorkerContext) -> None:
        self.name, self._tools = name, tools
        self._running: dict[str, tuple[asyncio.Task[None], int]] = {}  # job -> attempt, priority
        self._ended_one = asyncio.Event()
        self._paused_until = 0.0  # of time.monotonic()
        self._doubtful = True  # whether engine and storage are to be tried before the next claim: one of them failed
        self._claiming = asyncio.Lock()

    async def run(self) -> None:
        """Work until this is cancelled; what is under way is given back then, for another worker to go on with."""
        threads = _THREADS + self._tools.settings.concurrency + _URGENT
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(maintenance(self.name, self._tools))
            while True:
                job = await self._claim()
                if job is not None:
                    await self._start(job, tasks)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(_LOOK_S, self._paused_until - time.monotonic())):
                        await self._ended_one.wait()
                self._ended_one.clear()

    async def _pause(self, seconds: float) -> None:
        self._paused_until = time.monotonic() + seconds
        async with self._claiming:  # a claim under way would take the job that is about to be given back
            self._doubtful = True

    async def _claim(self) -> Job | None:
        """Claim a job if one more may run; beyond `concurrency` only one of a higher priority than one that runs."""
        most, running = self._tools.settings.concurrency, [priority for _, priority in self._running.values()]
        if time.monotonic() < self._paused_until or len(running) >= most + _URGENT:
            return None
        above = min(running) if len(running) >= most else None
        try:
            async with self._claiming:
                if self._doubtful:  # neither a job's attempts nor hours of slices are spent on finding out
                    await self._tools.engine.check_ready()
                    await asyncio.to_thread(self._tools.storage.probe)
                    self._doubtful = False
                claim, model = self._tools.queue.claim, self._tools.settings.model
                return await asyncio.to_thread(claim, self.name, above=above, model=model)
        except WanTpuError as error:
            log_event(log, "no claim", logging.WARNING, reason=str(error))
        except Exception:  # a worker that ended would leave the queue to others, which would end likewise
            log.exception("no claim")
        self._paused_until = time.monotonic() + _AGAIN_S
        return None

    async def _start(self, job: Job, tasks: asyncio.TaskGroup) -> None:
        before = self._running.get(job.id)
        if before is not None:  # its lease had run out; the engine must be rid of it first
            before[0].cancel()
            await asyncio.wait([before[0]])
        self._running[job.id] = tasks.create_task(self._attempt(job)), job.priority
        self._tools.meters.under_way.set(len(self._running))

    async def _attempt(self, job: Job) -> None:
        try:
            await Attempt(self._tools, job, self._pause).run()
        except Exception:  # others go on
            log.exception("attempt")
        finally:
            del self._running[job.id]
            self._tools.meters.under_way.set(len(self._running))
            self._ended_one.set()
