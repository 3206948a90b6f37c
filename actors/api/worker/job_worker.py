"""The worker's main loop: claim jobs from the queue and run an attempt at each."""

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from actors.api.segments import can_read
from actors.api.worker.attempt import JobAttempt
from actors.api.worker.context import WorkerContext
from actors.api.worker.fragments import AT_ONCE
from actors.api.worker.job_files import check_folder
from actors.api.worker.maintenance import maintain
from actors.jobs.tables import Job
from actors.observe.logs import log_event
from wan_tpu.errors import WanTpuError

log = logging.getLogger(__name__)

_URGENT = 2  # The most jobs claimed beyond `concurrency`, each more urgent than a running one.
_LOOK_S = 0.5  # Pause between two polls of an empty queue.
_AGAIN_S = 2.0  # Pause after the database or the pipeline failed to answer.
# Besides those of each job, for its result and its fragments. Leases are thus renewed even while storage hangs.
_THREADS = 32


class JobWorker:
    """The worker of a process. When the database or the storage can't be reached, it tries again."""

    def __init__(self, name: str, context: WorkerContext) -> None:
        self.name, self._context = name, context
        self._running: dict[str, tuple[asyncio.Task[None], int]] = {}  # Attempt and priority, by job.
        self._job_ended = asyncio.Event()
        self._paused_until = 0.0  # On the clock of time.monotonic().
        self._must_check = True  # Whether to check engine and storage before the next claim, as after a failure.
        self._claiming = asyncio.Lock()

    async def run(self) -> None:
        """Work until this is cancelled. Unfinished jobs are then given back for another worker to resume."""
        threads = _THREADS + (2 + AT_ONCE) * (self._context.settings.concurrency + _URGENT)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(maintain(self.name, self._context))
            while True:
                job = await self._claim()
                if job is not None:
                    await self._start(job, tasks)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(_LOOK_S, self._paused_until - time.monotonic())):
                        await self._job_ended.wait()
                self._job_ended.clear()

    async def _pause(self, seconds: float) -> None:
        self._paused_until = time.monotonic() + seconds
        async with self._claiming:  # Otherwise a claim under way could take a job that is about to be given back.
            self._must_check = True

    async def _claim(self) -> Job | None:
        """Claim a job if one more may run. Beyond `concurrency`, it must have a higher priority than a running one."""
        most, running = self._context.settings.concurrency, [priority for _, priority in self._running.values()]
        if time.monotonic() < self._paused_until or len(running) >= most + _URGENT or self._context.held.is_full:
            return None
        above = min(running) if len(running) >= most else None
        try:
            async with self._claiming:
                if self._must_check:  # During an outage, claims would use up jobs' attempts and slices' time.
                    await self._context.engine.check_ready()
                    await asyncio.to_thread(self._context.storage.probe)
                    await asyncio.to_thread(check_folder)
                    self._must_check = False
                self._context.settings.limits.check_disk(self._context.storage)
                claim, model = self._context.queue.claim, self._context.settings.model
                return await asyncio.to_thread(claim, self.name, above=above, model=model, can_run=can_read)
        except WanTpuError as error:
            log_event(log, "no claim", logging.WARNING, reason=str(error))
        except Exception:  # If this ended the worker, the others would hit the same error and end one by one.
            log.exception("no claim")
        self._paused_until = time.monotonic() + _AGAIN_S
        return None

    async def _start(self, job: Job, tasks: asyncio.TaskGroup) -> None:
        before = self._running.get(job.id)
        if before is not None:  # The job's lease had run out. The engine must drop the job before it starts again.
            before[0].cancel()
            await asyncio.wait([before[0]])
        self._running[job.id] = tasks.create_task(self._attempt(job)), job.priority
        self._context.meters.under_way.set(len(self._running))

    async def _attempt(self, job: Job) -> None:
        try:
            await JobAttempt(self._context, job, self._pause).run()
        except Exception:  # An error in one attempt must not stop the others.
            log.exception("attempt")
        finally:
            del self._running[job.id]
            self._context.meters.under_way.set(len(self._running))
            self._job_ended.set()
