"""The one-process pipeline as a batch's engine: the same models, no cluster, one request at a time."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from actors.engine import Fragment, GeneratedVideo, OnEvent, OnFragment, OnPreview, PreviewPicture, call_back
from actors.observe.span import Span, Start
from actors.pipeline_spec import Chips
from wan_tpu.pipeline import Pipeline
from wan_tpu.plan import DECODER, ENCODER, RequestPlan
from wan_tpu.previews.painter import encode_jpeg
from wan_tpu.previews.watching import Preview, work_with_previews
from wan_tpu.stage_machine import Decode, DecodeSound, EncodeImage, EncodeText, Finish, Step
from wan_tpu.stages.written import Ending, cut_tail, open_mp4


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
            on_event: Called from the engine's thread with a `Span` after each piece of work.
            priority: Ignored.
            on_fragment: Called from a thread with each fragment while the video is decoded.
            on_preview: Called from another thread with pictures of the unfinished video.
        """
        span = functools.partial(Span, slice="this process", request=id, chips=self._chips)
        run = _OneRequest(self._pipeline, id, span, on_event, on_fragment, on_preview)
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
class _OneRequest:
    """One request on its way through the stages."""

    pipeline: Pipeline
    id: str
    span: Callable[..., Span]  # Makes a `Span` of the request.
    on_event: OnEvent
    on_fragment: OnFragment | None = None
    on_preview: OnPreview | None = None
    fragments_sent: int = 0
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)  # Set when the request is cancelled.
    since: _Moment = dataclasses.field(default_factory=lambda: _Moment(Start(), 0.0, 0.0))  # When the last span ended.

    def make(self, plan: RequestPlan) -> GeneratedVideo:
        pipe, warnings = self.pipeline, list[str]()
        self._check()
        pipe.check_components(*pipe.runtime.model.spec.list_components(plan.request))
        run = pipe.make_executor(pipe.fetch_adapters(plan), warn=warnings.append)
        self.since = self._read_clocks()
        for _ in run.work(EncodeText, EncodeImage):
            self._check()
        self._tell(ENCODER)
        kinds = Step, Finish
        with contextlib.closing(
            run.work(*kinds)
            if self.on_preview is None
            else work_with_previews(run, pipe.painter, self._send_preview, *kinds)
        ) as denoising:
            for operation, result in denoising:
                if isinstance(operation, Step):
                    self._tell(operation.stage, operation.index + 1)
                    self._check()
                else:
                    finished = result
        on_fragment = None if self.on_fragment is None else self._send_fragment
        request, sound = run.plan.request, ()
        with open_mp4(request, on_fragment) as mp4:
            for operation, result in run.work(DecodeSound, Decode):
                self._check()
                if isinstance(operation, DecodeSound):
                    sound = result
                    mp4.set_audio(*sound)
                else:
                    mp4.add(np.asarray(result[1]))
            mp4.finish()
        if mp4.failure is not None:
            raise mp4.failure
        self._tell(DECODER)
        overlap, tail = pipe.runtime.model.spec.overlap, None
        if request.keeps_tail and overlap is not None:
            tail = cut_tail(pipe.runtime.model.spec, request, Ending.of_state(overlap, finished), *sound)
        end = None if tail is None else tail.dump()
        return GeneratedVideo(mp4.content, tuple(warnings), mp4.last_frame, request.frames, end)

    def _send_fragment(self, content: bytes) -> None:
        index, self.fragments_sent = self.fragments_sent, self.fragments_sent + 1
        call_back(self.on_fragment, Fragment(0, index, content), self.id)

    def _send_preview(self, preview: Preview) -> None:
        assert self.on_preview is not None
        self.on_preview(PreviewPicture(preview.step, encode_jpeg(preview.picture)))

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
