"""One attempt at a job: make its video, renew its lease, and end it exactly once."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from actors.api.worker.context import WorkerContext
from actors.api.worker.failures import blame
from actors.api.worker.fragments import Fragments
from actors.api.worker.job_files import JobFiles
from actors.api.worker.making import JobResults, VideoMaker
from actors.api.worker.progress import Tracker
from actors.jobs.errors import LeaseLost, StoreUnavailable
from actors.jobs.stored_request import count_left
from actors.jobs.tables import Job
from actors.jobs.values import INTERNAL_ERROR, LOST
from actors.observe.logs import log_event
from actors.observe.span import Span

log = logging.getLogger(__name__)


class JobAttempt:
    """One job, from its claim until this worker has ended it or given it back."""

    def __init__(self, context: WorkerContext, job: Job, pause: Callable[[float], Awaitable[None]]) -> None:
        # `pause` stops new claims for a number of seconds, and returns when no claim is under way.
        self._context, self._job, self._pause = context, job, pause
        self._queue, self._limits = context.queue, context.settings.reliability
        self._chips = context.settings.chips
        self._tracker = Tracker(self._job, context.pace.get(self._job.request), self._chips, context.settings.dollars)
        self._files = JobFiles(context, job, pause)
        self._fragments = Fragments(context, job, self._files)
        self._start_s, self._start = time.time(), time.monotonic()
        self._stop_code: str | None = None  # Why the job must stop, or None while it may go on.
        self._lease_lost = False

    async def run(self) -> None:
        """Make the video and end the job. When cancelled, give the job back."""
        log_event(log, "begun", job=self._job.id, attempt=self._job.attempts, worker=self._job.worker)
        maker = VideoMaker(self._context, self._job, self._files, self._fragments, self._tracker, self._note)
        making = asyncio.create_task(maker.run())
        renewal = asyncio.create_task(self._renew_lease(making))
        try:
            await asyncio.wait([making])
            await self._record_end(making)  # The lease is renewed until the end is recorded.
        except BaseException as error:  # The worker shuts down, or can't record the end, so another worker will try.
            making.cancel()
            is_final = isinstance(error, Exception)
            if is_final:
                await self._pause(self._limits.pipeline_pause_s)
            await asyncio.wait([making])
            renewal.cancel()
            with contextlib.suppress(LeaseLost, StoreUnavailable):
                if is_final and not self._may_repeat:
                    message = f"given up after {self._job.attempts} attempts; its end could not be recorded"
                    failed = await asyncio.to_thread(self._queue.fail, self._job, "internal_error", message)
                    await self._clean_up(failed)
                else:
                    await asyncio.to_thread(self._queue.release, self._job)
                    log_event(log, "released", job=self._job.id, worker=self._job.worker)
            raise
        finally:
            renewal.cancel()
            await asyncio.wait([renewal])

    @property
    def _may_repeat(self) -> bool:
        """Whether another attempt may follow. Each finished segment allows for one more: the job makes headway."""
        return self._job.attempts < self._limits.job_attempts + self._headway

    @property
    def _headway(self) -> int:
        request = self._job.request
        return count_left(request) - count_left(request, self._job.finished_segments)

    def _note(self, span: Span) -> None:
        self._tracker.note(span)
        meters = self._context.meters
        if span.kind == "fetch":
            meters.handoff_s.labels(span.stage).observe(span.seconds)
        elif span.kind == "compile":
            meters.compile_s.labels(span.pool, span.stage).observe(span.seconds)
        elif span.kind == "compute":
            meters.slices.add(span.slice, span.seconds)
            meters.chip_s.labels(span.stage).inc(span.seconds * self._chips.get(span.stage, 1))
            if span.step is not None:
                meters.step_s.labels(span.stage).observe(span.seconds)

    async def _renew_lease(self, making: asyncio.Task[Any]) -> None:
        """Renew the lease and report progress. Stop the work if the job must stop or the lease is lost."""
        while True:
            try:
                self._job.progress = self._tracker.estimate()
                stop_code = await asyncio.to_thread(self._queue.renew_lease, self._job)
                self._fragments.look()
            except LeaseLost:
                self._lease_lost = True
                making.cancel()
                return
            except StoreUnavailable as error:
                log_event(log, "lease not renewed", logging.WARNING, job=self._job.id, reason=str(error))
            except Exception:  # If the error persists, the lease runs out; otherwise it is renewed next time.
                log.exception("lease not renewed", extra={"fields": {"job": self._job.id}})
            else:
                if stop_code is not None and self._stop_code is None:
                    self._stop_code = stop_code
                    making.cancel()
            await asyncio.sleep(self._limits.renewal_s)

    async def _record_end(self, making: asyncio.Task[JobResults | None]) -> None:
        job: Job | None
        if not making.cancelled() and making.exception() is None and making.result() is None:
            log_event(log, "gave way", job=self._job.id, worker=self._job.worker, segments=self._headway)
            return
        try:
            if self._lease_lost:
                raise LeaseLost("seen when it was to be renewed")
            if self._stop_code is not None:
                job = await self._files.insist(self._queue.fail, self._job, self._stop_code, "")
            elif making.cancelled():
                job = await self._fail(asyncio.CancelledError("the engine cancelled it, and nobody else did"))
            elif (error := making.exception()) is not None:
                job = await self._fail(error)
            else:
                job = await self._files.insist(self._complete, making.result())
        except LeaseLost:
            log_event(log, "lost", logging.WARNING, job=self._job.id, worker=self._job.worker)
            return
        if job is not None:
            await self._clean_up(job)

    def _complete(self, results: JobResults | None) -> Job:
        assert results is not None
        return self._queue.complete(self._job, results.names, watchable=results.watchable, unwritten=results.unwritten)

    async def _fail(self, error: BaseException) -> Job | None:
        """Fail the job if it is to blame for the error, otherwise give it back. Return the job if it has ended."""
        if isinstance(error, LeaseLost):
            raise error
        code, message = blame(error)
        if code is None:
            await self._pause(self._limits.pipeline_pause_s)
            if self._may_repeat:
                log_event(log, "released", logging.WARNING, job=self._job.id, reason=message)
                await self._files.insist(self._queue.release, self._job)
                return None
            code, message = LOST, f"given up after {self._job.attempts} attempts; the last: {message}"
        if code == INTERNAL_ERROR:
            log.error("job failed", exc_info=error, extra={"fields": {"job": self._job.id}})
            message = "the pipeline failed; its log says why"
        return await self._files.insist(self._queue.fail, self._job, code, message)

    async def _clean_up(self, job: Job) -> None:
        """Drop the snapshots of an ended job, and count it in the metrics."""
        await self._context.engine.forget(job.id)
        seconds = time.monotonic() - self._start
        meters = self._context.meters
        meters.jobs.labels(job.status).inc()
        if job.status == "completed":
            self._tracker.learn(seconds)
            meters.job_s.observe(seconds)
            for stage, used in self._tracker.stage_seconds.items():
                meters.stage_s.labels(stage).observe(used)
        else:
            meters.failures.labels(job.error_code or "").inc()
        if self._context.traces is not None:
            self._context.traces.export(job, self._tracker.times, self._start_s, time.time())
        stage_seconds = {stage: round(used_s, 3) for stage, used_s in job.stage_seconds.items()}
        log_event(log, job.status, job=job.id, code=job.error_code, seconds=round(seconds, 2), stages=stage_seconds)
