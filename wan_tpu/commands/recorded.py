"""What `generate` and the stage commands do with a model: each stage is timed in the record of the video."""

import functools
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from wan_tpu.commands.record import Profiler, Recorder
from wan_tpu.data import Conditioning, DenoiseState, to_uint8
from wan_tpu.media.video import ContactSheet, VideoWriter
from wan_tpu.pipeline import Pipeline
from wan_tpu.request import ResolvedRequest
from wan_tpu.spec import Expert
from wan_tpu.stages import StepEvent


def encode_recorded(pipe: Pipeline, recorder: Recorder, request: ResolvedRequest) -> Conditioning:
    """Run the encoder as a stage of the record."""
    with recorder.stage("encoder") as record:
        conditioning = pipe.encode(request, recorder.warn)
    model = pipe.runtime.model
    record.count = lambda: model.flops.encoder(request, prompts=2 if model.spec.guided(request) else 1)
    return conditioning


def denoise_recorded(
    pipe: Pipeline,
    recorder: Recorder,
    request: ResolvedRequest,
    conditioning: Conditioning,
    state: DenoiseState,
    profiler: Profiler | None,
    *,
    stop: int | None = None,
) -> DenoiseState:
    """Run the experts up to step `stop`, each as a stage of its own in the record; return the state reached."""

    def on_step(event: StepEvent) -> None:
        recorder.step(event)
        if profiler is not None:
            profiler.after_step(event)

    for expert in pipe.experts(request):
        start, end = state.step, expert.stop if stop is None else min(stop, expert.stop)
        if start >= end:
            continue
        with recorder.stage(expert.stage) as record:
            try:
                state = pipe.denoise(request, conditioning, state, stop=end, on_step=on_step)
            finally:
                if profiler is not None:
                    profiler.stop()
        record.count = functools.partial(_step_flops, pipe, request, expert, end - start)
    return state


def _step_flops(pipe: Pipeline, request: ResolvedRequest, expert: Expert, steps: int) -> int:
    model = pipe.runtime.model
    return steps * model.flops.step(model.spec.latent_shape(request), branches=2 if expert.guided else 1)


def decode_to_files(
    pipe: Pipeline,
    recorder: Recorder,
    request: ResolvedRequest,
    latents: np.ndarray,
    outputs: tuple[Path, Path, Path],
    *,
    overwrite: bool,
) -> None:
    """Decode latents into the mp4 and the contact sheet as the frames come."""
    sheet = ContactSheet(request.frames, request.fps)
    with recorder.stage("decoder") as record:
        with VideoWriter(outputs[0], fps=request.fps, overwrite=overwrite) as writer:
            decoded = time.perf_counter()
            for pixels in pipe.decode(latents):
                decoded = time.perf_counter()
                frames = to_uint8(pixels)
                writer.write(frames)
                sheet.add(frames)
        sheet.save(outputs[1], overwrite=overwrite)
        record.host_s += time.perf_counter() - decoded  # since the last frames
    record.count = lambda: pipe.runtime.model.flops.decoder(latents.shape)


def report(outputs: Iterable[Path], recorder: Recorder) -> None:
    """Print where the results are and what each stage took."""
    print(recorder.table())
    for name, path in zip(("video", "contact sheet", "record"), outputs, strict=False):
        print(f"{name + ':':<15}{path}")
