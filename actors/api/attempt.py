"""One job in a worker's hands: made, told about, and ended exactly once."""

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from PIL import Image

from actors.api.logs import told
from actors.api.metrics import Meters
from actors.api.previews import BrokenVideo, previews
from actors.api.progress import Pace, Tracker
from actors.api.traces import Stages, Traces
from actors.batch import OnEvent
from actors.board import Compiled
from actors.errors import PipelineError, RequestFailed
from actors.jobs.errors import LeaseLost, StoreUnavailable
from actors.jobs.values import Job, Lease
from actors.jobs.work import Orders, WorkQueue
from actors.storage import Storage, StorageError
from actors.timeline import Span
from wan_tpu.errors import InvalidInput
from wan_tpu.request import GenerationRequest

log = logging.getLogger(__name__)

T = TypeVar("T")
_TELL_S = 1.0  # between two heartbeats: how late a person sees a step, and a worker that it is to stop
_PAUSE_S = 5.0  # before the next claim, when the pipeline as a whole can't be used
_WRITES = 6  # attempts to store a result, with growing pauses
_ENDINGS = {"video": "mp4", "thumbnail": "webp", "spritesheet": "jpg"}


async def _ready() -> None:
    """Find nothing wrong."""


class Engine(Protocol):
    """Makes videos: `actors.api.engine.LastingPipeline`."""

    async def generate(self, request: GenerationRequest, *, id: str, on_event: OnEvent, priority: int) -> bytes:  # noqa: A002
        """Return the mp4 of a request, as `Pipeline.generate` does."""

    async def compiled(self) -> Sequence[Compiled]:
        """Return what was compiled since this was last asked, for whichever request or for none."""


class MakePreviews(Protocol):
    """Makes pictures of a video: variant -> file."""

    def __call__(self, mp4: bytes, *, height: int, width: int, frames: int) -> Mapping[str, bytes]:
        """Return them; raises `BrokenVideo`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker works.

    concurrency  jobs that it has in the pipeline at a time
    urgent       jobs besides that it takes when they are more urgent than one that it has
    attempts     how often a job is tried while it is the pipeline that fails, not the job
    chips        stage -> chips of the slice that runs it
    """

    concurrency: int = 4
    urgent: int = 2
    attempts: int = 20
    chips: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What a worker works with.

    pace           what sizes take, as far as it is known
    make_previews  decodes what was made
    traces         told of every job that ends, if there are any
    ready          raises when the engine can't be used now; asked after it has failed
    forget         removes what the engine keeps of a job that isn't to be made any more: its snapshots
    """

    queue: WorkQueue
    storage: Storage
    engine: Engine
    settings: WorkerSettings = dataclasses.field(default_factory=lambda: WorkerSettings())
    pace: Pace = dataclasses.field(default_factory=Pace)
    meters: Meters = dataclasses.field(default_factory=Meters)
    make_previews: MakePreviews = previews
    traces: Traces | None = None
    ready: Callable[[], Awaitable[None]] = _ready
    forget: Callable[[str], object] = lambda job: None


class Attempt:
    """One job, from its claim until this worker is rid of it."""

    def __init__(self, tools: Tools, lease: Lease, pause: Callable[[float], Awaitable[None]]) -> None:
        """pause: told for how many seconds nothing should be claimed; returns when nothing is."""
        self._tools, self._lease, self._job, self._pause = tools, lease, lease.job, pause
        self._queue, self._storage = tools.queue, tools.storage
        self._tracker = Tracker(self._job, tools.pace.of(self._job.request), tools.settings.chips)
        self._stages, self._start_s = Stages(), time.time()
        self._start = time.monotonic()
        self._stopped: str | None = None  # why the job is to stop
        self._lost = False

    async def run(self) -> None:
        """Make the video and end the job; when cancelled, give it back."""
        told(log, "begun", job=self._job.id, attempt=self._job.attempts, worker=self._lease.worker)
        making = asyncio.create_task(self._make())
        telling = asyncio.create_task(self._tell(making))
        try:
            await asyncio.wait([making])
            telling.cancel()
            await asyncio.wait([telling])
            await self._end(making)
        except asyncio.CancelledError:  # the worker leaves
            making.cancel()
            await asyncio.wait([making])
            telling.cancel()
            with contextlib.suppress(LeaseLost, StoreUnavailable):
                await asyncio.to_thread(self._queue.release, self._lease, self._tracker.cost)
            told(log, "given back", job=self._job.id, worker=self._lease.worker)
            raise

    async def _make(self) -> dict[str, str]:
        """Return the results' names in storage, once they are there."""
        request = await asyncio.to_thread(_request, self._job, self._storage)
        mp4 = await self._tools.engine.generate(
            request, id=self._job.id, on_event=self._note, priority=self._job.priority
        )
        asked = self._job.request
        size = {name: int(asked[name]) for name in ("height", "width", "frames")}
        made = {"video": mp4, **await asyncio.to_thread(self._tools.make_previews, mp4, **size)}
        names = {variant: self._name(variant, content) for variant, content in made.items()}
        await self._insist(self._queue.announce, self._lease, list(names.values()))
        for variant, content in made.items():
            await self._store(names[variant], content)
        return names

    def _note(self, span: Span) -> None:
        self._tracker.note(span)
        self._stages.note(span)
        meters = self._tools.meters
        if span.what == "fetch":
            meters.handoff_s.labels(span.stage).observe(span.seconds)
        elif span.what == "compute":
            meters.chip_s.labels(span.stage).inc(span.seconds * self._tools.settings.chips.get(span.stage, 1))
            if span.step is not None:
                meters.step_s.labels(span.stage).observe(span.seconds)

    async def _tell(self, making: asyncio.Task[Any]) -> None:
        """Keep the lease and tell progress; stop the work when there is reason to."""
        while True:
            try:
                orders: Orders = await asyncio.to_thread(
                    self._queue.heartbeat, self._lease, self._tracker.progress(), self._tracker.cost
                )
            except LeaseLost:
                self._lost = True
                making.cancel()
                return
            except StoreUnavailable as error:
                told(log, "no heartbeat", logging.WARNING, job=self._job.id, reason=str(error))
            else:
                if orders.stop_code is not None and self._stopped is None:
                    self._stopped = orders.stop_code
                    making.cancel()
            await asyncio.sleep(_TELL_S)

    async def _end(self, making: asyncio.Task[dict[str, str]]) -> None:
        cost = self._tracker.cost
        job: Job | None
        try:
            if self._lost:
                raise LeaseLost("seen by a heartbeat")
            if self._stopped is not None:
                job = await self._insist(self._queue.fail, self._lease, self._stopped, "", cost)
            elif making.cancelled():
                job = await self._fail(asyncio.CancelledError("the engine cancelled it, and nobody else did"))
            elif (error := making.exception()) is not None:
                job = await self._fail(error)
            else:
                job = await self._insist(self._queue.complete, self._lease, making.result(), cost)
        except LeaseLost:
            told(log, "lost", logging.WARNING, job=self._job.id, worker=self._lease.worker)
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
            if self._job.attempts < self._tools.settings.attempts:
                told(log, "given back", logging.WARNING, job=self._job.id, reason=message)
                await self._insist(self._queue.release, self._lease, self._tracker.cost)
                return None
            code, message = "lost", f"given up after {self._job.attempts} attempts; the last: {message}"
        if code == "internal_error":
            log.error("job failed", exc_info=error, extra={"fields": {"job": self._job.id}})
            message = "the pipeline failed; its log says why"
        return await self._insist(self._queue.fail, self._lease, code, message, self._tracker.cost)

    async def _ended(self, job: Job) -> None:
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
            try:
                await asyncio.to_thread(self._tools.forget, job.id)
            except StorageError as error:
                told(log, "snapshots stay", logging.WARNING, job=job.id, reason=str(error))
        if self._tools.traces is not None:
            self._tools.traces.tell(job, self._stages, self._start_s, time.time())
        spent = {stage: round(used_s, 3) for stage, used_s in job.stage_seconds.items()}
        told(log, job.status, job=job.id, code=job.error_code, seconds=round(seconds, 2), stages=spent)

    def _name(self, variant: str, content: bytes) -> str:
        """Return a name of this attempt and this content alone, with which it can be told from any other."""
        digest = hashlib.sha256(content).hexdigest()[:16]
        return f"{self._job.id}.{self._job.attempts}.{digest}.{_ENDINGS[variant]}"

    async def _store(self, name: str, content: bytes) -> None:
        for attempt in range(_WRITES):
            try:
                await asyncio.to_thread(self._storage.write, name, content)
                return
            except StorageError as error:
                if attempt + 1 == _WRITES:
                    raise
                told(log, "not stored", logging.WARNING, job=self._job.id, reason=str(error))
                await asyncio.sleep(min(30.0, 2.0**attempt))

    async def _insist(self, change: Callable[..., T], *args: Any) -> T:
        """Change the database, if need be when it is back; raises `LeaseLost`."""
        pause = 0.5
        while True:
            try:
                return await asyncio.to_thread(change, *args)
            except StoreUnavailable as error:
                told(log, "database", logging.WARNING, job=self._job.id, reason=str(error))
                await asyncio.sleep(pause)
                pause = min(10.0, 2 * pause)


def _request(job: Job, storage: Storage) -> GenerationRequest:
    """Return what the pipeline takes, from what was accepted."""
    fields = {name: value for name, value in job.request.items() if name != "model"}
    fields["image"] = None
    if job.input_image is not None:
        fields["image"] = Image.open(io.BytesIO(storage.read(job.input_image))).convert("RGB")
    return GenerationRequest(**fields)


def _blame(error: BaseException) -> tuple[str | None, str]:
    """Return the code of a failure that is the job's own, None when the pipeline failed; and the reason."""
    match error:
        case RequestFailed(code="invalid" | "unhealthy"):
            return error.code, str(error)
        case RequestFailed(code="lost") | asyncio.CancelledError():
            return None, str(error)
        case RequestFailed():
            return "internal_error", str(error)
        case BrokenVideo():
            return "broken_video", str(error)
        case StorageError():
            return "storage", "the result can't be stored; the service's log says why"
        case PipelineError():
            return None, str(error)
        case InvalidInput():
            return "invalid", str(error)
    if type(error).__module__.split(".")[0] == "ray":  # the pipeline's way to its slices is gone, not the job's fault
        return None, f"{type(error).__name__}: {error}"
    return "internal_error", f"{type(error).__name__}: {error}"
