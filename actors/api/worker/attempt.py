"""One attempt at a job: make its video, renew its lease, and end it exactly once."""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from actors.api.variants import VARIANTS
from actors.api.worker.context import WorkerContext
from actors.api.worker.continued import ContinuedFragments, continue_fragments
from actors.api.worker.failures import InputGone, blame
from actors.api.worker.fragments import MAX_HELD_BYTES, Fragments
from actors.api.worker.previews import make_last_frame, make_previews
from actors.api.worker.progress import Tracker
from actors.api.worker.segments import (
    hides_first_frame,
    is_last,
    join_parts,
    measure_parts,
    read_parts,
    rebuild_request,
)
from actors.engine import GeneratedVideo
from actors.errors import PipelineError
from actors.jobs.errors import CommitUncertain, LeaseLost, StoreUnavailable
from actors.jobs.stored_request import count_frames, count_segments
from actors.jobs.tables import Job
from actors.jobs.values import INTERNAL_ERROR, LOST
from actors.observe.logs import log_event
from actors.observe.span import Span
from wan_tpu.media.video_content import VideoContent
from wan_tpu.storage.base import Missing, StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0  # Pauses between attempts to store a result grow from first to longest.


@dataclasses.dataclass(frozen=True)
class JobResults:
    """The stored results of a job.

    Attributes:
        names: The names of the results in storage, by variant.
        warnings: What the job's owner should know about the video.
        watchable: Whether all fragments of the video are stored as well.
    """

    names: dict[str, str]
    warnings: tuple[str, ...]
    watchable: bool


class Attempt:
    """One job, from its claim until this worker has ended it or given it back."""

    def __init__(self, context: WorkerContext, job: Job, pause: Callable[[float], Awaitable[None]]) -> None:
        """Set up the attempt.

        Args:
            context: What the worker's process shares.
            job: The claimed job.
            pause: Stops new claims for a number of seconds, and returns when no claim is under way.
        """
        self._context, self._job, self._pause = context, job, pause
        self._queue, self._storage, self._limits = context.queue, context.storage, context.settings.reliability
        self._chips = context.settings.chips
        self._tracker = Tracker(self._job, context.pace.get(self._job.request), self._chips, context.settings.dollars)
        self._fragments = Fragments(self._queue, self._storage, self._job)
        self._start_s, self._start = time.time(), time.monotonic()
        self._stop_code: str | None = None  # Why the job must stop, or None while it may go on.
        self._lease_lost = False

    async def run(self) -> None:
        """Make the video and end the job. When cancelled, give the job back."""
        log_event(log, "begun", job=self._job.id, attempt=self._job.attempts, worker=self._job.worker)
        making = asyncio.create_task(self._make())
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

    async def _make(self) -> JobResults:
        """Make and store the results."""
        async with self._fragments.storing() as fragments:
            stream = await self._open_stream(fragments)
            while not is_last(self._job):
                segment = await self._make_segment(stream)
                await self._keep(segment)
                if isinstance(stream, ContinuedFragments):
                    await stream.end_segment(segment.mp4)
            video = await self._make_segment(stream)
            if parts := await self._read_parts():
                video = dataclasses.replace(video, mp4=await join_parts([*parts, video.mp4]))
            names = await self._store_results(video)
            warnings = tuple(dict.fromkeys([*self._job.warnings, *video.warnings]))
            return JobResults(names, warnings, watchable=await fragments.finish())

    async def _open_stream(self, fragments: Fragments) -> Fragments | ContinuedFragments | None:
        """Return what takes the fragments that the engine passes on; None if the video can't be streamed."""
        request, model = self._job.request, self._context.engine.model
        if "source_frames" not in request and count_segments(request) == 1:
            return fragments
        if await self._read(measure_parts, self._job, self._storage) > MAX_HELD_BYTES:
            return None  # Its parts would be held in memory several times, though few videos have a viewer.
        rate = model.audio_rate if request.get("generate_audio") else None
        return await continue_fragments(await self._read_parts(), request["fps"], rate, fragments)

    async def _make_segment(self, stream: Fragments | ContinuedFragments | None) -> GeneratedVideo:
        """Make the job's next segment; most jobs have one."""
        engine, catalogue = self._context.engine, self._context.settings.catalogue
        request = await self._read(rebuild_request, self._job, self._storage, catalogue, engine.model)
        if self._job.segments and engine.model.continues_video:  # It sees all that came before.
            request = dataclasses.replace(request, video=VideoContent(await join_parts(await self._read_parts())))
        plan = engine.model.plan(request)  # Jobs outlive upgrades, and adapters may have moved, so no plan is stored.
        self._tracker.begin_segment(engine.model, plan)
        if hides_first_frame(self._job, engine.model):
            plan = plan.with_request(dataclasses.replace(plan.request, hidden_frames=1))
        return await engine.generate(
            plan,
            id=self._job.id,
            on_event=self._note,
            priority=self._job.priority,
            on_fragment=None if stream is None else stream.add,
        )

    async def _keep(self, video: GeneratedVideo) -> None:
        """Store a segment, and go on to the next one."""
        index, request = len(self._job.segments), self._job.request
        results = {"mp4": video.mp4}
        if not self._context.engine.model.continues_video:
            frames = request["frames"] if index == 0 and "source_frames" not in request else request["added_frames"]
            results["png"] = await asyncio.to_thread(make_last_frame, video, frames)
        names = {ending: self._name(f"segment-{index + 1}", content, ending) for ending, content in results.items()}
        await self._write(names, results)
        self._tracker.end_segment()
        self._job.progress = self._tracker.estimate()
        keep = self._queue.keep_segment
        await self._insist(keep, self._job, index, names["mp4"], names.get("png"), video.warnings)
        await self._context.engine.forget(self._job.id)  # Its snapshots are of no more use.

    @property
    def _may_repeat(self) -> bool:
        """Whether another attempt may follow. Each finished segment allows for one more: the job makes headway."""
        return self._job.attempts < self._limits.job_attempts + len(self._job.segments)

    async def _read_parts(self) -> list[bytes]:
        """Return the mp4 files that the job's next segment continues."""
        return await self._read(read_parts, self._job, self._storage)

    async def _read(self, read: Callable[..., T], *args: Any) -> T:
        """Call a function that reads the job's files."""
        try:
            return await self._insist(read, *args)
        except Missing:
            raise InputGone from None
        except StorageError as error:  # Not the job's fault: as a job's own error it would fail every waiting job.
            raise PipelineError("the job's inputs can't be read now") from error

    async def _store_results(self, video: GeneratedVideo) -> dict[str, str]:
        """Store a video and its previews; return their names in storage."""
        results = {"video": video.mp4}
        if self._context.previews:
            request = self._job.request
            size = {"height": int(request["height"]), "width": int(request["width"]), "frames": count_frames(request)}
            results |= await asyncio.to_thread(make_previews, video.mp4, **size)
            if "i2v" in self._context.engine.model.tasks:  # Other models can't continue a video from its last frame.
                last_frame = await asyncio.to_thread(make_last_frame, video, size["frames"])
                results["final_frame"] = last_frame
        names = {variant: self._name(None, content, VARIANTS[variant][1]) for variant, content in results.items()}
        await self._write(names, results)
        return names

    def _name(self, part: str | None, content: bytes, ending: str) -> str:
        """Return a name in storage that is unique to this attempt and the content."""
        digest = hashlib.sha256(content).hexdigest()[:16]
        return ".".join([self._job.id, str(self._job.attempts), *([part] if part else []), digest, ending])

    async def _write(self, names: Mapping[str, str], contents: Mapping[str, bytes]) -> None:
        await self._insist(self._queue.announce, self._job, list(names.values()))
        for key, content in contents.items():
            await self._store(names[key], content)

    async def _store(self, name: str, content: bytes) -> None:
        """Write a result, retrying without limit, since the next job couldn't store its video either."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.to_thread(self._storage.write, name, content)
            except StorageError as error:
                log_event(log, "not stored yet", logging.WARNING, job=self._job.id, reason=str(error))
                await self._pause(2 * pause_s)  # So that no job is claimed in between.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _note(self, span: Span) -> None:
        self._tracker.note(span)
        meters = self._context.meters
        if span.kind == "fetch":
            meters.handoff_s.labels(span.stage).observe(span.seconds)
        elif span.kind == "compile":
            meters.compile_s.labels(span.pool, span.stage).observe(span.seconds)
        elif span.kind == "compute":
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

    async def _record_end(self, making: asyncio.Task[JobResults]) -> None:
        job: Job | None
        try:
            if self._lease_lost:
                raise LeaseLost("seen when it was to be renewed")
            if self._stop_code is not None:
                job = await self._insist(self._queue.fail, self._job, self._stop_code, "")
            elif making.cancelled():
                job = await self._fail(asyncio.CancelledError("the engine cancelled it, and nobody else did"))
            elif (error := making.exception()) is not None:
                job = await self._fail(error)
            else:
                job = await self._insist(self._complete, making.result())
        except LeaseLost:
            log_event(log, "lost", logging.WARNING, job=self._job.id, worker=self._job.worker)
            return
        if job is not None:
            await self._clean_up(job)

    def _complete(self, results: JobResults) -> Job:
        return self._queue.complete(self._job, results.names, results.warnings, watchable=results.watchable)

    async def _fail(self, error: BaseException) -> Job | None:
        """Fail the job if it is to blame for the error, otherwise give it back. Return the job if it has ended."""
        if isinstance(error, LeaseLost):
            raise error
        code, message = blame(error)
        if code is None:
            await self._pause(self._limits.pipeline_pause_s)
            if self._may_repeat:
                log_event(log, "released", logging.WARNING, job=self._job.id, reason=message)
                await self._insist(self._queue.release, self._job)
                return None
            code, message = LOST, f"given up after {self._job.attempts} attempts; the last: {message}"
        if code == INTERNAL_ERROR:
            log.error("job failed", exc_info=error, extra={"fields": {"job": self._job.id}})
            message = "the pipeline failed; its log says why"
        return await self._insist(self._queue.fail, self._job, code, message)

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

    async def _insist(self, change: Callable[..., T], *args: Any) -> T:
        """Call a function that uses the database or storage, and retry while they are unavailable.

        Raises:
            LeaseLost: The job isn't this worker's any more.
            StorageError: Storage was unavailable `input_attempts` times.
        """
        attempt, uncertain = 0, False
        while True:
            try:
                return await asyncio.to_thread(change, *args)
            except LeaseLost:
                if uncertain and (job := await asyncio.to_thread(self._context.store.get, self._job.id)).has_ended:
                    return job  # type: ignore[return-value] # An earlier try ended it, but its answer was lost.
                raise
            except (StoreUnavailable, StorageError) as error:
                uncertain |= isinstance(error, CommitUncertain)
                attempt += 1
                if isinstance(error, StorageError) and attempt == self._limits.input_attempts:
                    raise
                log_event(log, "tried again", logging.WARNING, job=self._job.id, reason=str(error))
                await asyncio.sleep(min(10.0, 0.25 * 2 ** min(attempt, 6)))
