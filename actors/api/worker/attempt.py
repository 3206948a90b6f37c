"""One attempt of a worker at a job: have it made, renew its lease, and end it exactly once."""

import asyncio
import contextlib
import hashlib
import io
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from PIL import Image

from actors.api.catalogue import Catalogue
from actors.api.variants import VARIANTS
from actors.api.worker.context import WorkerContext
from actors.api.worker.previews import BrokenVideo, previews
from actors.api.worker.progress import Tracker
from actors.errors import PipelineError, RequestFailed
from actors.jobs.errors import CommitUncertain, LeaseLost, StoreUnavailable
from actors.jobs.stored_request import BESIDE
from actors.jobs.tables import Job
from actors.jobs.values import BROKEN_VIDEO, INPUT_LOST, INTERNAL_ERROR, INVALID, LOST
from actors.observe.logs import log_event
from actors.observe.span import Span
from wan_tpu.errors import InvalidRequest, WanTpuError
from wan_tpu.request import FIELDS, GenerationRequest
from wan_tpu.storage.base import Missing, Storage, StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")
_HEARTBEAT_S = 1.0  # how late a person sees a step, and a worker that it is to stop
_PAUSE_S = 5.0  # before the next claim, when the pipeline as a whole can't be used
_ATTEMPTS = 20  # of a job, while it is the pipeline or the database that fails, not the job
_READS = 8  # attempts to read an input, with growing pauses
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0  # between two attempts to store a result


class InputGone(Exception):
    """Storage answers, and doesn't have what the job was accepted with: no other attempt would find it."""


class Attempt:
    """One job, from its claim until this worker is rid of it."""

    def __init__(self, tools: WorkerContext, job: Job, pause: Callable[[float], Awaitable[None]]) -> None:
        """pause: stops claims for so many seconds; returns when none is under way."""
        self._tools, self._job, self._pause = tools, job, pause
        self._queue, self._storage = tools.queue, tools.storage
        self._chips = tools.settings.chips
        self._tracker = Tracker(self._job, tools.pace.of(self._job.request), self._chips, tools.settings.dollars)
        self._start_s, self._start = time.time(), time.monotonic()
        self._stopped: str | None = None  # why the job is to stop
        self._lost = False

    async def run(self) -> None:
        """Make the video and end the job; when cancelled, give it back."""
        log_event(log, "begun", job=self._job.id, attempt=self._job.attempts, worker=self._job.worker)
        making = asyncio.create_task(self._make())
        heartbeats = asyncio.create_task(self._send_heartbeats(making))
        try:
            await asyncio.wait([making])
            await self._end(making)  # the lease is renewed until that is recorded
        except BaseException as error:  # the worker shuts down, or the end can't be recorded: another has a try
            making.cancel()
            refused = isinstance(error, Exception)
            if refused:
                await self._pause(_PAUSE_S)
            await asyncio.wait([making])
            heartbeats.cancel()
            with contextlib.suppress(LeaseLost, StoreUnavailable):
                if refused and self._job.attempts >= _ATTEMPTS:
                    message = f"given up after {self._job.attempts} attempts; its end could not be recorded"
                    await self._ended(await asyncio.to_thread(self._queue.fail, self._job, "internal_error", message))
                else:
                    await asyncio.to_thread(self._queue.release, self._job)
                    log_event(log, "released", job=self._job.id, worker=self._job.worker)
            raise
        finally:
            heartbeats.cancel()
            await asyncio.wait([heartbeats])

    async def _make(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the results' names in storage, once they are there, and warnings."""
        try:
            request = await self._insist(_request, self._job, self._storage, self._tools.settings.catalogue)
        except Missing:
            raise InputGone("an image of it isn't in storage any more; send the request again") from None
        except StorageError as error:  # told as the pipeline's, or every job that waits would fail
            raise PipelineError("its image can't be read now") from error
        engine = self._tools.engine
        plan = engine.model.plan(request)  # now: jobs outlive upgrades, and their adapters may have moved
        video = await engine.generate(plan, id=self._job.id, on_event=self._note, priority=self._job.priority)
        made = {"video": video.mp4}
        if self._tools.previews:
            size = {name: int(self._job.request[name]) for name in ("height", "width", "frames")}
            made |= await asyncio.to_thread(previews, video.mp4, **size)
        prefix = f"{self._job.id}.{self._job.attempts}"  # a name of this attempt and content, that no other has
        names = {
            variant: f"{prefix}.{hashlib.sha256(content).hexdigest()[:16]}.{VARIANTS[variant][1]}"
            for variant, content in made.items()
        }
        await self._insist(self._queue.announce, self._job, list(names.values()))
        for variant, content in made.items():
            await self._store(names[variant], content)
        return names, video.warnings

    async def _store(self, name: str, content: bytes) -> None:
        """Write a result, however long it takes: the video is made, and the next job's would have no place either."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.to_thread(self._storage.write, name, content)
            except StorageError as error:
                log_event(log, "not stored yet", logging.WARNING, job=self._job.id, reason=str(error))
                await self._pause(2 * pause_s)  # so that none is claimed in between
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _note(self, span: Span) -> None:
        self._tracker.note(span)
        meters = self._tools.meters
        if span.kind == "fetch":
            meters.handoff_s.labels(span.stage).observe(span.seconds)
        elif span.kind == "compile":
            meters.compile_s.labels(span.pool, span.stage).observe(span.seconds)
        elif span.kind == "compute":
            meters.chip_s.labels(span.stage).inc(span.seconds * self._chips.get(span.stage, 1))
            if span.step is not None:
                meters.step_s.labels(span.stage).observe(span.seconds)

    async def _send_heartbeats(self, making: asyncio.Task[Any]) -> None:
        """Renew the lease and report progress; stop the work when there is reason to."""
        while True:
            try:
                self._job.progress = self._tracker.progress()
                stop_code = await asyncio.to_thread(self._queue.heartbeat, self._job)
            except LeaseLost:
                self._lost = True
                making.cancel()
                return
            except StoreUnavailable as error:
                log_event(log, "no heartbeat", logging.WARNING, job=self._job.id, reason=str(error))
            except Exception:  # the lease runs out if it goes on, and is renewed if it doesn't
                log.exception("no heartbeat", extra={"fields": {"job": self._job.id}})
            else:
                if stop_code is not None and self._stopped is None:
                    self._stopped = stop_code
                    making.cancel()
            await asyncio.sleep(_HEARTBEAT_S)

    async def _end(self, making: asyncio.Task[tuple[dict[str, str], tuple[str, ...]]]) -> None:
        job: Job | None
        try:
            if self._lost:
                raise LeaseLost("seen by a heartbeat")
            if self._stopped is not None:
                job = await self._insist(self._queue.fail, self._job, self._stopped, "")
            elif making.cancelled():
                job = await self._fail(asyncio.CancelledError("the engine cancelled it, and nobody else did"))
            elif (error := making.exception()) is not None:
                job = await self._fail(error)
            else:
                results, warnings = making.result()
                job = await self._insist(self._queue.complete, self._job, results, warnings)
        except LeaseLost:
            log_event(log, "lost", logging.WARNING, job=self._job.id, worker=self._job.worker)
            return
        if job is not None:
            await self._ended(job)

    async def _fail(self, error: BaseException) -> Job | None:
        """End the job if it is to blame, else give it back; return it when it has ended."""
        if isinstance(error, LeaseLost):
            raise error
        code, message = _blame(error)
        if code is None:
            await self._pause(_PAUSE_S)
            if self._job.attempts < _ATTEMPTS:
                log_event(log, "released", logging.WARNING, job=self._job.id, reason=message)
                await self._insist(self._queue.release, self._job)
                return None
            code, message = LOST, f"given up after {self._job.attempts} attempts; the last: {message}"
        if code == INTERNAL_ERROR:
            log.error("job failed", exc_info=error, extra={"fields": {"job": self._job.id}})
            message = "the pipeline failed; its log says why"
        return await self._insist(self._queue.fail, self._job, code, message)

    async def _ended(self, job: Job) -> None:
        """Let go of what an ended job is resumed from, and count it."""
        await self._tools.engine.forget(job.id)
        seconds = time.monotonic() - self._start
        meters = self._tools.meters
        meters.jobs.labels(job.status).inc()
        if job.status == "completed":
            self._tracker.completed(seconds)
            meters.job_s.observe(seconds)
            for stage, used in self._tracker.stage_seconds.items():
                meters.stage_s.labels(stage).observe(used)
        else:
            meters.failures.labels(job.error_code or "").inc()
        if self._tools.traces is not None:
            self._tools.traces.export(job, self._tracker.times, self._start_s, time.time())
        spent = {stage: round(used_s, 3) for stage, used_s in job.stage_seconds.items()}
        log_event(log, job.status, job=job.id, code=job.error_code, seconds=round(seconds, 2), stages=spent)

    async def _insist(self, change: Callable[..., T], *args: Any) -> T:
        """Change the database, when need be once it is back, or try to read from storage; raises `LeaseLost`."""
        attempt, uncertain = 0, False
        while True:
            try:
                return await asyncio.to_thread(change, *args)
            except LeaseLost:
                if uncertain and (job := await asyncio.to_thread(self._tools.store.get, self._job.id)).ended:
                    return job  # type: ignore[return-value] # by the change whose answer was lost
                raise
            except (StoreUnavailable, StorageError) as error:
                uncertain |= isinstance(error, CommitUncertain)
                attempt += 1
                if isinstance(error, StorageError) and attempt == _READS:
                    raise
                log_event(log, "tried again", logging.WARNING, job=self._job.id, reason=str(error))
                await asyncio.sleep(min(10.0, 0.25 * 2 ** min(attempt, 6)))


def _request(job: Job, storage: Storage, catalogue: Catalogue) -> GenerationRequest:
    """Return what the pipeline takes, from what was accepted; raises `PipelineError` for what a later version did."""
    fields = {name: value for name, value in job.request.items() if name not in BESIDE}
    if unknown := fields.keys() - FIELDS:
        raise PipelineError(f"a later version has accepted it, with {', '.join(unknown)}; one of its workers makes it")
    fields["loras"] = catalogue.loras(fields.get("loras", ()))
    for field, name in (("image", job.input_image), ("last_image", job.input_last_image)):
        fields[field] = None if name is None else Image.open(io.BytesIO(storage.read(name))).convert("RGB")
    return GenerationRequest(**fields)


def _blame(error: BaseException) -> tuple[str | None, str]:
    """Return the code of a failure that is the job's own, None when the pipeline failed; and the reason."""
    match error:
        case RequestFailed(code="invalid" | "unhealthy"):
            return error.code, str(error)
        case RequestFailed(code="lost") | asyncio.CancelledError():
            return None, str(error)
        case RequestFailed():
            return INTERNAL_ERROR, str(error)
        case BrokenVideo():
            return BROKEN_VIDEO, str(error)
        case InputGone():
            return INPUT_LOST, str(error)
        case InvalidRequest():
            return INVALID, str(error)
        case WanTpuError():  # of what the job shares with others: the pipeline, storage, a hub
            return None, str(error)
    if type(error).__module__.split(".")[0] == "ray":  # the pipeline's way to its slices is gone, not the job's fault
        return None, f"{type(error).__name__}: {error}"
    return INTERNAL_ERROR, f"{type(error).__name__}: {error}"
