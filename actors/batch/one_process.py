"""The one-process pipeline as a batch's engine: the same models, no cluster, one request at a time."""

import asyncio
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from actors.engine import Fragment, GeneratedVideo, OnEvent, OnFragment, OnPreview
from actors.observe.span import Span, Start
from actors.pipeline_spec import Chips
from wan_tpu.media.mp4 import Mp4
from wan_tpu.pipeline import Pipeline
from wan_tpu.plan import DECODER, ENCODER, RequestPlan
from wan_tpu.stage_machine import Decode, DecodeSound, EncodeImage, EncodeText, Finish, Step

log = logging.getLogger(__name__)


class OneProcessEngine:
    """Makes videos with a loaded `Pipeline`, one after another in a thread of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self.model = pipeline, pipeline.runtime.model.spec
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        platform = pipeline.runtime.mesh.devices.flat[0].platform
        self._chips: Chips = "emulated" if platform == "cpu" else "real"

    async def generate(
        self,
        plan: RequestPlan,
        *,
        id: str,
        on_event: OnEvent,
        priority: int = 0,
        on_fragment: OnFragment | None = None,
        on_preview: OnPreview | None = None,
    ) -> GeneratedVideo:
        """Make one video. Requests run in the order in which they come, whatever their priority.

        When this is cancelled, the work stops after the current step, before this returns. It raises what
        `Pipeline.generate` raises.

        Args:
            plan: A request, planned by `model`.
            id: The request's id.
            on_event: Called from the engine's thread with a `Span` after each piece of work.
            priority: Ignored.
            on_fragment: Called from a thread with each fragment while the video is decoded.
            on_preview: Ignored. Batches show no previews.
        """
        span = functools.partial(Span, slice="this process", request=id, chips=self._chips)
        run = _Run(self._pipeline, id, span, on_event, on_fragment)
        work = self._thread.submit(run.make, plan)
        result = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            run.stop.set()
            if not work.cancel():  # It has begun, and ends at its next check.
                await asyncio.wait([result])
                result.exception()  # Retrieve it, or asyncio logs that nobody did.
            raise

    async def forget(self, id: str) -> None:
        """Do nothing, since this engine keeps no state of a request."""

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class _Stopped(Exception):
    """The request was cancelled."""


@dataclasses.dataclass(frozen=True)
class _Moment:
    """A moment, with the seconds that the pipeline has spent reading weights and compiling until then."""

    start: Start
    load_s: float
    compile_s: float


@dataclasses.dataclass
class _Run:
    """One request on its way through the stages.

    Attributes:
        span: Makes a `Span` of the request.
        stop: Set when the request is cancelled.
        since: When the last span ended.
    """

    pipeline: Pipeline
    id: str
    span: Callable[..., Span]
    on_event: OnEvent
    on_fragment: OnFragment | None = None
    fragments_sent: int = 0
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    since: _Moment = dataclasses.field(default_factory=lambda: _Moment(Start(), 0.0, 0.0))

    def make(self, plan: RequestPlan) -> GeneratedVideo:
        """Run all stages and return the video."""
        pipe, warnings = self.pipeline, list[str]()
        self._check()
        pipe.check_components()
        run = pipe.run(pipe.fetch_adapters(plan), warn=warnings.append)
        self.since = self._read_clocks()
        for _ in run.work(EncodeText, EncodeImage):
            self._check()
        self._tell(ENCODER)
        for operation, _ in run.work(Step, Finish):
            if isinstance(operation, Step):
                self._tell(operation.stage, operation.index + 1)
                self._check()
        on_fragment = None if self.on_fragment is None else self._send_fragment
        with Mp4(plan.request.fps, on_fragment, hidden_frames=plan.request.hidden_frames) as mp4:
            for operation, result in run.work(DecodeSound, Decode):
                self._check()
                if isinstance(operation, DecodeSound):
                    mp4.set_audio(*result)
                else:
                    mp4.add(np.asarray(result[1]))
            mp4.finish()
        if mp4.failure is not None:
            raise mp4.failure
        self._tell(DECODER)
        return GeneratedVideo(mp4.content, tuple(warnings), mp4.last_frame)

    def _send_fragment(self, content: bytes) -> None:
        """Pass a fragment on; errors of the caller's function don't stop the request."""
        assert self.on_fragment is not None
        index, self.fragments_sent = self.fragments_sent, self.fragments_sent + 1
        try:
            self.on_fragment(Fragment(0, index, content))
        except Exception:
            log.exception("%s: the reader of the video's fragments has failed", self.id)

    def _check(self) -> None:
        if self.stop.is_set():
            raise _Stopped(self.id)

    def _tell(self, stage: str, step: int | None = None) -> None:
        """Report the work since the last span. Reading weights and compiling are placed first, which is nearly true."""
        before, self.since = self.since, self._read_clocks()
        load_s, compile_s = self.since.load_s - before.load_s, self.since.compile_s - before.compile_s
        seconds = {
            "load": load_s,
            "compile": compile_s,
            "compute": self.since.start.monotonic_s - before.start.monotonic_s - load_s - compile_s,
        }
        start_s = before.start.wall_s
        for kind, taken_s in seconds.items():
            if taken_s > 0:
                done = step if kind == "compute" else None
                self.on_event(self.span(stage=stage, kind=kind, start_s=start_s, seconds=taken_s, step=done))
                start_s += taken_s

    def _read_clocks(self) -> _Moment:
        runtime = self.pipeline.runtime
        return _Moment(Start(), sum(runtime.load_s.values()), runtime.compile_s)
