"""The one-process pipeline as the engine of a batch: the same models, no cluster, one request at a time."""

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from actors.engine import GeneratedVideo, OnEvent
from actors.observe.span import Span
from actors.pipeline_spec import Chips
from wan_tpu.media.mp4 import Mp4
from wan_tpu.pipeline import Pipeline
from wan_tpu.spec import DECODER, ENCODER, RequestPlan
from wan_tpu.stages import StepEvent


class OneProcessEngine:
    """Makes videos with a loaded `Pipeline`, one after another in a thread of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self.model = pipeline, pipeline.runtime.model.spec
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        platform = pipeline.runtime.mesh.devices.flat[0].platform
        self._chips: Chips = "emulated" if platform == "cpu" else "real"

    async def generate(self, plan: RequestPlan, *, id: str, on_event: OnEvent, priority: int = 0) -> GeneratedVideo:
        """Make one video; requests are taken in the order in which they come, whatever their priority.

        plan      by `model`, of a request
        on_event  called from the engine's thread with a `Span` after each piece of work

        When it is cancelled, the work stops after the current step, before this returns. Raises as
        `Pipeline.generate` does.
        """
        span = functools.partial(Span, slice="this process", request=id, chips=self._chips)
        run = _Run(self._pipeline, id, span, on_event)
        work = self._thread.submit(run.make, plan)
        ended = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            run.stop.set()
            if not work.cancel():  # it has begun, and ends at its next check
                await asyncio.wait([ended])
                ended.exception()  # looked at, or asyncio complains that nobody did
            raise

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class _Stopped(Exception):
    """The request was cancelled."""


@dataclasses.dataclass
class _Run:
    """One request on its way through the stages.

    span   makes a `Span` of it
    stop   set when it is cancelled
    since  (time.time(), seconds of reading weights, seconds of compiling) when the last span ended
    """

    pipeline: Pipeline
    id: str
    span: Callable[..., Span]
    on_event: OnEvent
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    since: tuple[float, float, float] = (0, 0, 0)

    def make(self, plan: RequestPlan) -> GeneratedVideo:
        """Run all stages, and return the video."""
        pipe, request, warnings = self.pipeline, plan.request, list[str]()
        self._check()
        pipe.check_components()
        self.since = self._now()
        conditioning = pipe.encode(request, warnings.append)
        state = pipe.initial_state(request, conditioning=conditioning)
        self._tell(ENCODER)
        for expert in plan.experts:
            on_step = functools.partial(self._tell_step, expert.stage)
            state = pipe.denoise(request, conditioning, state, stop=expert.stop, on_step=on_step)
        with Mp4(request.fps) as made:
            for planes in pipe.decode_planes(state.latents):
                self._check()
                made.add(planes)
            made.finish()
        if made.failure is not None:
            raise made.failure
        self._tell(DECODER)
        return GeneratedVideo(made.content, tuple(warnings))

    def _check(self) -> None:
        if self.stop.is_set():
            raise _Stopped(self.id)

    def _tell_step(self, stage: str, event: StepEvent) -> None:
        self._tell(stage, event.step)
        self._check()

    def _tell(self, stage: str, step: int | None = None) -> None:
        """Tell what was done since the last span: weights read and programs compiled first, as they nearly are."""
        (start_s, load_s, compile_s), self.since = self.since, self._now()
        loaded_s = start_s + self.since[1] - load_s
        compiled_s = loaded_s + self.since[2] - compile_s
        if loaded_s > start_s:
            self.on_event(self.span(stage=stage, what="load", start_s=start_s, end_s=loaded_s))
        if compiled_s > loaded_s:
            self.on_event(self.span(stage=stage, what="compile", start_s=loaded_s, end_s=compiled_s))
        if self.since[0] > compiled_s:
            self.on_event(self.span(stage=stage, what="compute", start_s=compiled_s, end_s=self.since[0], step=step))

    def _now(self) -> tuple[float, float, float]:
        runtime = self.pipeline.runtime
        return time.time(), sum(runtime.load_s.values()), runtime.compile_s
