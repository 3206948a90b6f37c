"""The `wan-tpu` command: `generate` makes a video, `stage1` to `stage3` do the same with files between them."""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from wan_tpu.data import Conditioning, DenoiseState, to_uint8
from wan_tpu.errors import WanTpuError
from wan_tpu.pipeline import Pipeline, load_pipeline
from wan_tpu.progress import Console
from wan_tpu.record import Profiler, Recorder
from wan_tpu.request import NAMED_SIZES, SOLVERS, GenerationRequest, ResolvedRequest, parse_size
from wan_tpu.stages import StepEvent, guided
from wan_tpu.video import ContactSheet, VideoWriter, check_ffmpeg, check_output


def main(argv: Sequence[str] | None = None) -> int:
    """Run `wan-tpu COMMAND ...`; return the exit code."""
    from wan_tpu import staged  # it uses this module's arguments

    commands = {
        "generate": (generate, "make one video from a prompt and, for image-to-video models, an image"),
        "stage1": (staged.encode, "only the encoder: request -> embeddings"),
        "stage2": (staged.denoise, "only the experts: embeddings -> latents"),
        "stage3": (staged.decode, "only the decoder: latents -> video"),
    }
    parser = argparse.ArgumentParser(prog="wan-tpu", description="Video generation on TPUs (CPU and CUDA work too).")
    listed = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, about) in commands.items():
        listed.add_parser(name, help=about, add_help=False)
    argv = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(argv[:1]).command
    return run(commands[command][0], argv[1:])


def run(command: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> int:
    """Run one command; turn what it raises into one line on stderr and an exit code (2 for bad input)."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        command(sys.argv[1:] if argv is None else argv)
    except WanTpuError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: nothing half-written was left behind", file=sys.stderr)
        return 130
    return 0


def generate(argv: Sequence[str]) -> None:
    """`wan-tpu generate`: the whole job in one process."""
    parser = argparse.ArgumentParser(prog="wan-tpu generate", description=generate.__doc__)
    add_model_arguments(parser)
    add_request_arguments(parser)
    add_profile_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("video.mp4"), help="the mp4; default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="write over existing outputs")
    args = parser.parse_args(argv)

    request = request_from(args)
    outputs = check_outputs(args.output, overwrite=args.overwrite)
    pipe = pipeline_from(args)
    request = pipe.resolve(request)
    recorder = Recorder(pipe.runtime)
    with recorder.stage("encoder") as record:
        conditioning = pipe.encode(request)
    record.flops = _encoder_flops(pipe, request)
    state = denoise_recorded(pipe, recorder, request, conditioning, pipe.initial_state(request), _profiler(args))
    decode_to_files(pipe, recorder, request, state.latents, outputs, overwrite=args.overwrite)
    recorder.save(outputs[2], request)
    report(outputs, recorder)


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
        branches = 2 if expert.guidance > 1 else 1
        record.flops = (end - start) * pipe.runtime.model.step_flops(state.latents.shape, branches)
    return state


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
    sheet = ContactSheet(request.frames)
    with recorder.stage("decoder") as record:
        with VideoWriter(outputs[0], fps=request.fps, overwrite=overwrite) as writer:
            for pixels in pipe.decode(latents):
                frames = to_uint8(pixels)
                writer.write(frames)
                sheet.add(frames)
        sheet.save(outputs[1], overwrite=overwrite)
    record.flops = pipe.runtime.model.vae_decode_flops(latents.shape)


def _encoder_flops(pipe: Pipeline, request: ResolvedRequest) -> int:
    model = pipe.runtime.model
    flops = model.text_flops(2 if guided(model, request) else 1)
    return flops + (model.vae_encode_flops(request) if request.image is not None else 0)


# ---- arguments, shared with the stage commands


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, where and how."""
    group = parser.add_argument_group("model and devices")
    group.add_argument(
        "--model_id", required=True, help="diffusers directory, or hub id (Wan-AI/Wan2.2-I2V-A14B-Diffusers)"
    )
    add_device_arguments(group)


def add_device_arguments(group: argparse._ActionsContainer) -> None:
    """Where and how; the mesh takes all devices unless told."""
    group.add_argument("--dtype", choices=("bfloat16", "float32"), help="of weights and activations; default bfloat16")
    for axis, what in (("dp", "guidance branches"), ("sp", "tokens"), ("tp", "heads and weights")):
        group.add_argument(f"--{axis}", type=int, help=f"devices along the mesh axis of {what}")


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """What to make."""
    group = parser.add_argument_group("request (open settings are the model's published ones)")
    group.add_argument("--prompt", default="")
    group.add_argument("--negative_prompt")
    group.add_argument("--image", help="first frame, for image-to-video models")
    group.add_argument("--size", help=f"HEIGHT*WIDTH in pixels, multiples of 16; usual: {' '.join(NAMED_SIZES)}")
    group.add_argument("--frames", type=int, help="4n + 1")
    group.add_argument("--fps", type=float)
    group.add_argument(
        "--shift", type=float, help="timestep shift; default the checkpoint's (usual: 5 at 720p, 3 at 480p)"
    )
    group.add_argument("--solver", choices=SOLVERS, default="unipc")
    add_sampling_arguments(group)


def add_sampling_arguments(group: argparse._ActionsContainer) -> None:
    """What the experts can be told anew."""
    group.add_argument("--num_steps", type=int)
    group.add_argument("--guidance_scale", type=float, help="of the high-noise (or only) expert; 1 turns it off")
    group.add_argument("--guidance_scale_2", type=float, help="of the low-noise expert; default --guidance_scale")
    group.add_argument("--seed", type=int)


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Profiling of a few warm denoise steps."""
    parser.add_argument("--profile", action="store_true", help="trace a few warm denoise steps with jax.profiler")
    parser.add_argument("--profile_output_path", type=Path, default=Path("profile"), help="default %(default)s")


def request_from(args: argparse.Namespace) -> GenerationRequest:
    """Build the request from parsed arguments."""
    height, width = parse_size(args.size) if args.size else (None, None)
    return GenerationRequest(
        prompt=args.prompt,
        negative_prompt=args.negative_prompt,
        image=args.image,
        height=height,
        width=width,
        frames=args.frames,
        fps=args.fps,
        steps=args.num_steps,
        guidance_scale=args.guidance_scale,
        guidance_scale_2=args.guidance_scale_2,
        shift=args.shift,
        seed=0 if args.seed is None else args.seed,
        solver=args.solver,
    )


def pipeline_from(args: argparse.Namespace, model_id: str | None = None, dtype: str | None = None) -> Pipeline:
    """Load the pipeline from parsed arguments: one request, so weights are freed after their stage."""
    return load_pipeline(
        model_id or args.model_id,
        dtype=args.dtype or dtype or "bfloat16",
        mesh=(args.dp, args.sp, args.tp),
        keep_weights=False,
        progress=Console(),
    )


def check_outputs(video: Path, *, overwrite: bool) -> tuple[Path, Path, Path]:
    """Return the paths of mp4, contact sheet and record; raises `OutputError` when one can't be written."""
    check_ffmpeg()
    if video.suffix.lower() != ".mp4":
        video = video.with_name(video.name + ".mp4")
    paths = (video, video.with_suffix(".png"), video.with_suffix(".json"))
    for path in paths:
        check_output(path, overwrite=overwrite)
    return paths


def _profiler(args: argparse.Namespace) -> Profiler | None:
    return Profiler(args.profile_output_path) if args.profile else None


def report(outputs: Iterable[Path], recorder: Recorder) -> None:
    """Print where the results are and what each stage took."""
    print(recorder.table())
    for name, path in zip(("video", "contact sheet", "record"), outputs, strict=False):
        print(f"{name + ':':<15}{path}")
