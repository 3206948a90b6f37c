"""The stages as `generate` and the stage commands run them: each is timed in the record of the video."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from wan_tpu.commands.previewing import NO_PREVIEWS, PreviewOptions, showing_previews
from wan_tpu.commands.record import Profiler, Recorder
from wan_tpu.commands.unfinished import keeping_unfinished
from wan_tpu.data import to_uint8
from wan_tpu.errors import OutputError
from wan_tpu.media.mp4 import cut_sound
from wan_tpu.media.video import ContactSheet, VideoWriter
from wan_tpu.pipeline import Pipeline
from wan_tpu.plan import RequestPlan
from wan_tpu.progress import say
from wan_tpu.reference import find_tail
from wan_tpu.request import ResolvedRequest
from wan_tpu.stage_machine import Decode, DecodeSound, EncodeImage, EncodeText, Finish, Step
from wan_tpu.stages import LocalExecutor, StepEvent


def make_recorded(
    pipe: Pipeline,
    plan: RequestPlan,
    recorder: Recorder,
    outputs: tuple[Path, Path, Path],
    *,
    profiler: Profiler | None = None,
    previews: PreviewOptions = NO_PREVIEWS,
    overwrite: bool = False,
    extended: Path | None = None,
) -> ResolvedRequest:
    """Run what an earlier run hasn't done of all stages, and write the mp4 and the contact sheet.

    Args:
        extended: The video that the request continues, if the plan's video is a copy of it.

    Returns:
        The request, with the length that the model has chosen if it was open.
    """
    request = plan.request if extended is None else dataclasses.replace(plan.request, video=extended)
    with keeping_unfinished(pipe, request) as unfinished:
        earlier = unfinished.kept
        if done := earlier.describe(plan.steps):
            say(f"{done}, by an earlier run")
        recorder.resume(0 if earlier.state is None else earlier.state.step, earlier.warnings)
        run = pipe.make_executor(
            pipe.fetch_adapters(plan),
            conditioning=earlier.conditioning,
            state=earlier.state,
            warn=recorder.warn,
            around=recorder.operation,
        )
        encode_recorded(run)
        made = recorder.set_length(run.plan)
        unfinished.offer(run, recorder.warnings)
        with showing_previews(pipe, run, outputs[0], previews) as offer_preview:

            def on_step(event: StepEvent) -> None:
                unfinished.offer(run, recorder.warnings)
                offer_preview(event)

            denoise_recorded(run, recorder, profiler, on_step=on_step)
            unfinished.offer(run, recorder.warnings)
            decode_to_files(run, recorder, made, outputs, overwrite=overwrite)
    return made


def encode_recorded(run: LocalExecutor) -> None:
    """Run the encoder to its end."""
    for _ in run.work(EncodeText, EncodeImage):
        pass


def denoise_recorded(
    run: LocalExecutor,
    recorder: Recorder,
    profiler: Profiler | None,
    *,
    stop: int | None = None,
    on_step: Callable[[StepEvent], object] = lambda event: None,
) -> None:
    """Run the experts up to step `stop`, and note each step."""
    try:
        for operation, result in run.work(Step, Finish, stop=stop):
            if isinstance(operation, Step):
                recorder.note_step(result)
                on_step(result)
                if profiler is not None:
                    profiler.after_step(result, is_last=operation.index + 1 == operation.expert.stop)
    finally:
        if profiler is not None:
            profiler.stop()


def decode_to_files(
    run: LocalExecutor, recorder: Recorder, request: ResolvedRequest, outputs: tuple[Path, Path, Path], overwrite: bool
) -> None:
    """Decode the latents, and write the mp4 and the contact sheet as the frames arrive."""
    sheet, hidden = ContactSheet(request.frames, request.fps), request.hidden_frames
    origin = None if find_tail(request.references) is None else request.origin
    with recorder.stage("decoder") as record:
        with VideoWriter(outputs[0], fps=request.fps, overwrite=overwrite) as writer:
            last_frames = time.perf_counter()
            for operation, result in run.work(DecodeSound, Decode):
                last_frames = time.perf_counter()
                if isinstance(operation, DecodeSound):
                    sound, rate = result
                    writer.set_audio(*cut_sound(sound, rate, request.fps, hidden=hidden, origin=origin))
                    continue
                frames = to_uint8(recorder.runtime.model.pixels(np.asarray(result[0])))
                sheet.add(frames)
                writer.write(frames[hidden:])
                hidden = max(0, hidden - len(frames))
        try:
            sheet.save(outputs[1], overwrite=overwrite)
        except OutputError as error:
            raise OutputError(f"{error}; the video is complete: {outputs[0]}") from None
        record.host_s += time.perf_counter() - last_frames  # The devices have been idle since then.


def report(outputs: tuple[Path, Path, Path], recorder: Recorder, request: ResolvedRequest) -> None:
    """Print where the results are, then write the record and print what each stage took.

    The operations of a large model take seconds to count.
    """
    for name, path in zip(("video", "contact sheet"), outputs, strict=False):
        print(f"{name + ':':<15}{path}", flush=True)
    recorder.save(outputs[2], request)
    print(f"{'record:':<15}{outputs[2]}")
    print(recorder.table())
