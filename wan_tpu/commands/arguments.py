"""Arguments that several commands share, and what is made from them.

JAX and torch take seconds to import: commands do that once their arguments are read, so that `--help` is there at once.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wan_tpu.commands.parser import add_mesh, add_model, add_precision, add_switches
from wan_tpu.commands.sizes import read_size
from wan_tpu.errors import InvalidInput, OutputError
from wan_tpu.families import FAMILIES
from wan_tpu.media.video import check_ffmpeg, check_folder, check_output
from wan_tpu.progress import Console
from wan_tpu.request import NAMED_SIZES, GenerationRequest
from wan_tpu.schedules import magcache

if TYPE_CHECKING:
    from wan_tpu.commands.record import Profiler
    from wan_tpu.pipeline import Pipeline


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, where and how."""
    group = parser.add_argument_group("model and devices")
    examples = ", ".join(family.example for family in FAMILIES.values())
    add_model(group, required=True, help=f"diffusers directory, here or in gs://, or hub id ({examples})")
    add_device_arguments(group)


def add_device_arguments(group: argparse._ActionsContainer) -> None:
    """Where and how; the mesh takes all devices unless told."""
    add_precision(group, default=None)
    group.add_argument(
        "--executables", help="folder, or gs://, of compiled programs, from scripts/precompile.py: one that you trust"
    )
    add_mesh(group)
    add_switches(group)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """What to make."""
    group = parser.add_argument_group("request (open settings are the model's published ones)")
    group.add_argument("--prompt", help='what the video shows; "" for nothing in particular')
    group.add_argument("--negative_prompt", help="what it is to be kept from showing; default none")
    group.add_argument("--image", help="first frame, for image-to-video models")
    group.add_argument("--last_image", help="last frame, for models that lead from one to another")
    group.add_argument("--video", help="a file to begin with, for text-to-video models of Wan: it is restyled")
    group.add_argument("--strength", type=float, help="of its change, 0 to 1: the part of the steps; default 0.8")
    group.add_argument(
        "--size",
        help=f"WIDTHxHEIGHT in pixels, multiples of 16; default the image's shape, else the model's size; usual: "
        f"{' '.join(NAMED_SIZES)}",
    )
    group.add_argument("--frames", type=int, help="how many: 4n + 1, or what else the model takes; default the model's")
    group.add_argument("--fps", type=float, help="frames a second of the written video; default the model's")
    group.add_argument(
        "--shift", type=float, help="timestep shift; default the checkpoint's (Wan's own program: --preset original)"
    )
    group.add_argument("--solver", help="default the model's own; others are named where one is unknown")
    group.add_argument(
        "--preset", help="a named way to sample, such as lightning: fills what is left open, adapters too"
    )
    add_sampling_arguments(group)


def add_sampling_arguments(group: argparse._ActionsContainer) -> None:
    """What the experts can be told anew."""
    group.add_argument("--steps", type=int, help="denoising steps, of all experts together; default the model's")
    group.add_argument("--guidance_scale", type=float, help="of the high-noise (or only) expert; 1 turns it off")
    group.add_argument("--guidance_scale_2", type=float, help="of the low-noise expert; default --guidance_scale")
    group.add_argument(
        "--lora",
        action="append",
        metavar="PATH[:SCALE][@high|low|both]",
        help="adapter of the experts: a file, a folder, in gs:// or OWNER/NAME[/FILE] of the hub; several times",
    )
    group.add_argument("--cache", help=f"skip steps that would change little, which is lossy: {magcache.FORM}")
    group.add_argument("--sigmas", type=float, nargs="+", help="noise level of each step, in place of steps and shift")
    group.add_argument("--switch_step", type=int, help="the low-noise expert's first step, from 0")
    group.add_argument("--seed", type=int, help="of the initial noise: the same seed gives the same video; default 0")


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add --overwrite."""
    parser.add_argument("--overwrite", action="store_true", help="write over existing outputs; else they are an error")


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Profiling of a few warm denoise steps."""
    parser.add_argument("--profile", action="store_true", help="trace a few warm denoise steps with jax.profiler")
    parser.add_argument(
        "--profile_output_path", type=Path, default=Path("profile"), help="folder of the trace; default %(default)s"
    )


def request_from(args: argparse.Namespace) -> GenerationRequest:
    """Build the request from parsed arguments; raises `InvalidInput` where the prompt was left out."""
    if args.prompt is None:
        raise InvalidInput('--prompt is missing; say what the video shows, or --prompt "" for nothing in particular')
    height, width = (None, None) if args.size is None else read_size("--size", args.size)
    return GenerationRequest(
        prompt=args.prompt,
        negative_prompt=args.negative_prompt,
        image=args.image,
        last_image=args.last_image,
        video=args.video,
        strength=args.strength,
        height=height,
        width=width,
        frames=args.frames,
        fps=args.fps,
        steps=args.steps,
        guidance_scale=args.guidance_scale,
        guidance_scale_2=args.guidance_scale_2,
        shift=args.shift,
        seed=0 if args.seed is None else args.seed,
        solver=args.solver,
        loras=args.lora,
        sigmas=args.sigmas,
        switch_step=args.switch_step,
        cache=args.cache,
        preset=args.preset,
    )


def pipeline_from(args: argparse.Namespace, model_id: str | None = None, dtype: str | None = None) -> "Pipeline":
    """Load the pipeline from parsed arguments, for one request: weights are freed after their stage.

    model_id, dtype  used where the arguments leave them open
    """
    from wan_tpu.pipeline import load_pipeline
    from wan_tpu.switches import set_switches

    set_switches(args.kernels, args.collectives)
    return load_pipeline(
        args.model_id or model_id or "",
        dtype=args.dtype or dtype or "bfloat16",
        mesh=(args.dp, args.sp, args.tp),
        keep_weights=False,
        executables=args.executables,
        progress=Console(),
    )


def check_outputs(video: Path, *, overwrite: bool, inputs: Sequence[str | Path | None]) -> tuple[Path, Path, Path]:
    """Return the paths of mp4, contact sheet and record; raises `OutputError` when one can't be, or is an input."""
    check_ffmpeg()
    if not video.name or os.path.isdir(video):  # unlike is_dir(), false for a name that is too long
        raise OutputError(f"{str(video)!r} is a folder; give the path of an mp4 in it")
    if video.suffix.lower() != ".mp4":
        video = video.with_name(video.name + ".mp4")
    paths = (video, video.with_suffix(".sheet.png"), video.with_suffix(".json"))
    for path in paths:
        check_output(path, overwrite=overwrite, inputs=inputs)
    return paths


def profiler_from(args: argparse.Namespace) -> "Profiler | None":
    """Return the profiler that was asked for."""
    if not args.profile:
        return None
    check_folder(args.profile_output_path, "--profile_output_path")
    from wan_tpu.commands.record import Profiler

    return Profiler(args.profile_output_path)
