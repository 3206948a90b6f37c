"""The one-process pipeline as the engine of a batch: the same models, no cluster, one request at a time."""

import asyncio
import dataclasses
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from actors.timeline import Chips, Span, What
from wan_tpu.data import to_uint8
from wan_tpu.pipeline import Pipeline
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu.stages import StepEvent
from wan_tpu.video import VideoWriter

OnEvent = Callable[[Span], object]


class OneProcessEngine:
    """Makes videos with a loaded `Pipeline`, in a thread of its own; the next request waits for its turn."""

    def __init__(self, pipeline: Pipeline, *, slice_name: str = "this process") -> None:
        self._pipeline = pipeline
        self._slice = slice_name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        platform = pipeline.runtime.mesh.devices.flat[0].platform
        self._chips: Chips = "emulated" if platform == "cpu" else "real"

    async def generate(self, request: GenerationRequest, *, id: str, on_event: OnEvent) -> bytes:  # noqa: A002
        """Make one video and return its mp4.

        on_event  called from the engine's thread with a `Span` after each piece of work

        When it is cancelled, the work stops after the current step, before this returns. Raises as
        `Pipeline.generate` does.
        """
        run = _Run(self._pipeline, id, self._slice, self._chips, on_event)
        work = self._thread.submit(run.make, request)
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
    """One request on its way through the stages."""

    pipeline: Pipeline
    id: str
    slice: str
    chips: Chips
    on_event: OnEvent
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)

    def make(self, request: GenerationRequest) -> bytes:
        """Run all stages, and return the mp4."""
        pipe = self.pipeline
        self.check()
        resolved = pipe.resolve(request)
        pipe.check_components()
        state = pipe.initial_state(resolved)
        clock = _StageClock(self, "encoder")
        conditioning = pipe.encode(resolved, lambda text: warnings.warn(f"{self.id}: {text}", stacklevel=2))
        clock.tell()
        for expert in pipe.experts(resolved):
            clock = _StageClock(self, expert.stage)
            state = pipe.denoise(resolved, conditioning, state, stop=expert.stop, on_step=clock.tell_step)
        clock = _StageClock(self, "decoder")
        video = self._decode(resolved, state.latents)
        clock.tell()
        return video

    def _decode(self, request: ResolvedRequest, latents: np.ndarray) -> bytes:
        with tempfile.TemporaryDirectory(prefix="wan-tpu-") as folder:
            path = Path(folder) / "video.mp4"
            with VideoWriter(path, fps=request.fps) as writer:
                for pixels in self.pipeline.decode(latents):
                    self.check()
                    writer.write(to_uint8(pixels))
            return path.read_bytes()

    def check(self) -> None:
        """Raise when the request was cancelled."""
        if self.stop.is_set():
            raise _Stopped(self.id)


class _StageClock:
    """Tells a stage's spans as they end."""

    def __init__(self, run: _Run, stage: str) -> None:
        run.check()
        self._run, self._stage = run, stage
        self._last = self._now()

    def tell(self, step: int | None = None) -> None:
        """Tell what was done since the last call: weights read and programs compiled first, as they nearly are."""
        before, now = self._last, self._now()
        self._last = now
        load_s, compile_s = now[1] - before[1], now[2] - before[2]
        loaded = before[0] + load_s
        self._span("load", before[0], loaded, None)
        self._span("compile", loaded, loaded + compile_s, None)
        self._span("compute", loaded + compile_s, now[0], step)

    def tell_step(self, event: StepEvent) -> None:
        """Tell a denoising step; raises when the request was cancelled."""
        self.tell(event.step)
        self._run.check()

    def _span(self, what: What, start_s: float, end_s: float, step: int | None) -> None:
        if end_s > start_s:
            run = self._run
            run.on_event(
                Span(
                    slice=run.slice,
                    request=run.id,
                    stage=self._stage,
                    what=what,
                    start_s=start_s,
                    end_s=end_s,
                    step=step,
                    chips=run.chips,
                )
            )

    def _now(self) -> tuple[float, float, float]:
        runtime = self._run.pipeline.runtime
        return time.time(), sum(runtime.load_s.values()), runtime.compile_s
