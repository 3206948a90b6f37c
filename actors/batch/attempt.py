"""Make, publish and record one request of a batch. A failure becomes its result and doesn't affect other requests."""

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable

from actors.batch.lines import preview_name, record_name, shorten
from actors.batch.manifest import Entry
from actors.batch.previews import LinePreviews
from actors.batch.results import Provenance, Result, publish
from actors.batch.segments import make_line
from actors.engine import Engine, GeneratedVideo, OnEvent, call_back
from actors.errors import PipelineError, RequestFailed
from actors.observe.span import Span
from wan_tpu.errors import Unavailable, WanTpuError
from wan_tpu.storage.base import Storage, StorageError


class Output:
    """The output of a batch: videos, records. After a failed write, nothing is computed until writing works again."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._failed = False

    async def check(self) -> None:
        """Raise `StorageError` if the last write failed and writing still doesn't work."""
        if self._failed:
            await asyncio.to_thread(self.storage.probe)
            self._failed = False

    async def write(self, function: Callable[..., None], *args: object) -> None:
        """Run a function that writes in a thread, to its end even if this is cancelled; raises `StorageError`."""
        try:
            await run_to_end(function, *args)
        except StorageError:
            self._failed = True
            raise


class LineAttempt:
    """One attempt at a line."""

    def __init__(self, entry: Entry, output: Output, provenance: Provenance, *, previews: bool = False) -> None:
        self.result: Result | None = None  # How the attempt ended; None while it hasn't.
        # Whether the request will never be resumed: its video is durable, or a failure that another attempt wouldn't
        # change.
        self.is_over = False
        self._entry, self._output = entry, output
        self._previews = LinePreviews(output.storage, preview_name(entry.output)) if previews else None
        self._start_s = time.monotonic()
        self._base_result = Result(
            line=entry.line,
            id=entry.id,
            status="done",
            output=output.storage.location(entry.output),
            request=entry.digest,
            model=provenance.model,
            precision=provenance.precision,
            sources={source.location: source.version for source in entry.settings.sources},
        )

    async def run(self, engine: Engine, on_event: OnEvent) -> None:
        """Make and publish the video, or record why there is none. It raises only when this task is cancelled."""
        failed_for_good = False
        try:
            await self._output.check()  # Spend no chip-hours on a video that can't be stored.
            stage_s: dict[str, float] = defaultdict(float)

            def forward(span: Span) -> None:
                if span.kind == "compute":
                    stage_s[span.stage] += span.seconds
                call_back(on_event, span, self._entry.id)

            on_preview = None if self._previews is None else self._previews.add
            try:
                video = await make_line(self._entry, engine, forward, on_preview)
                _check_video(video)
            except BaseException as error:
                failed_for_good = _is_final(error)
                raise
            await self._publish(video, {stage: round(seconds, 4) for stage, seconds in stage_s.items()})
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # An engine may raise anything.
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # Whatever the engine raised in response to that.
                raise asyncio.CancelledError from error
            if isinstance(error, asyncio.CancelledError):
                error = RuntimeError("the engine cancelled it, and nobody else did")
            await self._fail(error, final=failed_for_good)
        finally:
            if self._previews is not None:  # Now that the video is there.
                await run_to_end(self._previews.close)

    async def _publish(self, video: GeneratedVideo, stage_s: dict[str, float]) -> None:
        result = dataclasses.replace(
            self._base_result,
            size_bytes=len(video.mp4),
            seconds=self._measure_seconds(),
            stage_s=stage_s,
            warnings=list(video.warnings),
        )

        def publish_video() -> None:
            publish(self._output.storage, self._entry.output, video.mp4, result)
            self.result, self.is_over = result, True

        await self._output.write(publish_video)

    async def _fail(self, error: BaseException, *, final: bool) -> None:
        """Record why there is no video; `final` says that another attempt would fail as well."""
        self.result = dataclasses.replace(
            self._base_result, status="failed", error=_describe_error(error), seconds=self._measure_seconds()
        )
        try:
            await self._output.write(self._output.storage.write, record_name(self._entry.output), self.result.to_line())
        except StorageError:  # The result is still printed and part of the report.
            return
        self.is_over = final

    def _measure_seconds(self) -> float:
        return round(time.monotonic() - self._start_s, 4)


async def run_to_end(function: Callable[..., None], *args: object) -> None:
    """Run a function in a thread. When this is cancelled, it still waits for the function to end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        work.exception()  # Retrieve it, or asyncio logs that nobody did.
        raise


def _check_video(video: GeneratedVideo) -> None:
    if video.mp4[4:8] != b"ftyp":
        raise ValueError(f"the engine returned {len(video.mp4)} bytes that aren't an mp4")


def _is_final(error: BaseException) -> bool:
    """Return whether the same request would fail again, judging by the error's type."""
    if isinstance(error, RequestFailed):
        return error.code != "lost"
    return not isinstance(error, PipelineError | Unavailable | asyncio.CancelledError)


def _describe_error(error: BaseException) -> str:
    """Return an error as one line, with its type unless it is one of ours. Long ones lose their middle."""
    text = " ... ".join(dict.fromkeys(line.strip() for line in (str(error).splitlines() or [""]) if line.strip()))
    if not isinstance(error, WanTpuError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return shorten(text, 1000)
