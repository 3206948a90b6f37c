"""Arguments that several commands share, and the objects that they describe.

JAX and torch take seconds to import. Commands do that after reading their arguments, so that `--help` answers at once.
"""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan_tpu.commands.importing import heavy_imports
from wan_tpu.commands.parser import OptionGroup, Parser, add_mesh, add_model, add_precision, add_switches
from wan_tpu.errors import InvalidInput, OutputError
from wan_tpu.families import FAMILIES, open_spec
from wan_tpu.fields import describe, type_of
from wan_tpu.lengths import count_frames
from wan_tpu.media.video import check_ffmpeg, check_folder, check_output
from wan_tpu.progress import CompileNotice, Console
from wan_tpu.request import FIELDS, NAMED_SIZES, GenerationRequest, parse_size
from wan_tpu.requested_adapter import FORM
from wan_tpu.switches import set_switches

if TYPE_CHECKING:
    from wan_tpu.commands.record import Profiler
    from wan_tpu.pipeline import Pipeline

# Fields of a request that `wan-tpu stage2` may change: only the experts depend on them.
SAMPLING = ("steps", "guidance_scale", "guidance_scale_2", "loras", "cache", "sigmas", "switch_step", "seed")
NO_PROMPT = '--prompt is missing; say what the video shows, or --prompt "" for nothing in particular'
_READ_AS: dict[Any, dict[str, Any]] = {
    int: {"type": int},
    float: {"type": float},
    bool: {"action": argparse.BooleanOptionalAction},
    list[float]: {"type": float, "nargs": "+"},
}
# Fields whose command-line option has a different name or form.
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "height": (
        "--size",
        {
            "help": "WIDTHxHEIGHT in pixels, multiples of 16; default the image's shape, else the model's size; usual: "
            + " ".join(NAMED_SIZES)
        },
    ),
    "references": (
        "--reference",
        {
            "dest": "references",
            "action": "append",
            "metavar": "KIND:PATH",
            "help": "an image, a video or a sound (image, video or audio for KIND) that the prompt is about, for "
            "models that take references; may be repeated, and the order counts: Picture 1, Picture 2, Video 1; "
            "continued, the last one: a video of the same size that the new one goes on from, with motion and sound; "
            "soundtrack: a sound that becomes the video's, which follows it; some models take --image beside it",
        },
    ),
    "loras": (
        "--lora",
        {
            "dest": "loras",
            "action": "append",
            "metavar": FORM,
            "help": "adapter of the experts: a file or a folder, here or in gs://, or OWNER/NAME[/FILE] of the hub; "
            "may be repeated",
        },
    ),
}


def add_model_arguments(parser: Parser) -> None:
    """Add the options that say which model to run, where and how."""
    group = parser.add_group("model and devices")
    examples = ", ".join(family.example for family in FAMILIES.values())
    text = f"a name that wan-tpu models lists, a hub id ({examples}), or a diffusers directory, here or in a bucket"
    add_model(group, required=True, help=text)
    add_device_arguments(group)


def add_device_arguments(group: OptionGroup) -> None:
    """Add the options that say where and how to run a model; by default the mesh takes all devices."""
    add_precision(group, default=None)
    group.add_argument(
        "--executables",
        help="folder of compiled programs, here or in gs://, from scripts/precompile.py: only one that you trust",
    )
    add_mesh(group)
    add_switches(group)


def add_request_arguments(parser: Parser) -> None:
    """Add an option for each field of a request."""
    group = parser.add_group("request (settings that you omit are the model's published ones)")
    for name in FIELDS:
        if name not in SAMPLING:
            _add_field(group, name)
        if name == "frames":
            text = "length in seconds, in place of --frames: the nearest that the model makes"
            group.add_argument("--seconds", help=text)
    add_sampling_arguments(group)


def add_sampling_arguments(group: OptionGroup) -> None:
    """Add an option for each field that `SAMPLING` lists."""
    for name in SAMPLING:
        _add_field(group, name)


def _add_field(group: OptionGroup, name: str) -> None:
    """Add the option of a request's field; height and width have one together."""
    if name in _OPTIONS:
        option, settings = _OPTIONS[name]
        group.add_argument(option, **settings)
    elif name != "width":
        field = FIELDS[name]
        text = re.sub("`(\\w+)`", _spell, describe(field)).removesuffix(".").replace("%", "%%")
        default = "" if field.default in (None, "") else f"; default {field.default}"
        settings = {"help": text[0].lower() + text[1:] + default} | _READ_AS.get(type_of(field), {})
        group.add_argument(f"--{name}", **settings)


def _spell(quoted: re.Match[str]) -> str:
    """Return a quoted name as the option of that field, or as it is if it names something else."""
    name = quoted[1]
    if name not in FIELDS:
        return name
    return _OPTIONS[name][0] if name in _OPTIONS else f"--{name}"


def add_overwrite(parser: Parser) -> None:
    """Add --overwrite."""
    parser.add_argument("--overwrite", action="store_true", help="write over existing outputs; else they are an error")


def add_profile_arguments(parser: Parser) -> None:
    """Add the options that profile a few warm denoising steps."""
    parser.add_argument("--profile", action="store_true", help="trace a few warm denoise steps with jax.profiler")
    parser.add_argument(
        "--profile_output_path", type=Path, default=Path("profile"), help="folder of the trace; default %(default)s"
    )


def request_from(args: argparse.Namespace, prompt: str | None = None) -> GenerationRequest:
    """Return the request that parsed arguments describe, or one with another prompt.

    Raises:
        InvalidInput: There is no prompt, or another value that no model takes.
    """
    prompt = args.prompt if prompt is None else prompt
    if prompt is None:
        raise InvalidInput(NO_PROMPT)
    fields = {name: value for name, value in vars(args).items() if name in FIELDS and value is not None}
    height, width = (None, None) if args.size is None else parse_size(args.size)
    if args.seconds is not None:
        if args.frames is not None:
            raise InvalidInput("--seconds and --frames both give the length; omit one of them")
        spec = open_spec(args.model_id)
        fields["frames"] = count_frames(args.seconds, args.fps or spec.defaults.fps, spec)
    return GenerationRequest(height=height, width=width, **fields | {"prompt": prompt})


def pipeline_from(
    args: argparse.Namespace, model_id: str | None = None, dtype: str | None = None, *, keep_weights: bool = False
) -> "Pipeline":
    """Open the pipeline that parsed arguments describe.

    Args:
        args: The parsed arguments.
        model_id: The model, unless the arguments name one.
        dtype: The precision, unless the arguments name one.
        keep_weights: Keep each stage's weights for the next request; else they are freed after it.
    """
    set_switches(args.kernels, args.collectives)
    with heavy_imports():
        from wan_tpu.pipeline import load_pipeline

        pipeline = load_pipeline(
            args.model_id or model_id or "",
            dtype=args.dtype or dtype or "bfloat16",
            mesh=(args.dp, args.sp, args.tp),
            keep_weights=keep_weights,
            executables=args.executables,
            progress=Console(),
            preview_decoder=getattr(args, "preview_decoder", None),  # `generate` alone of these.
        )
    pipeline.runtime.on_compile = CompileNotice()
    return pipeline


def check_outputs(video: Path, *, overwrite: bool, inputs: Sequence[str | Path | None]) -> tuple[Path, Path, Path]:
    """Return the paths of mp4, contact sheet and record; raises `OutputError` for a place that isn't usable."""
    check_ffmpeg()
    # Unlike is_dir(), isdir() is false for a name that is too long.
    if not video.name or os.path.isdir(video):
        raise OutputError(f"{str(video)!r} is a folder; give the path of an mp4 in it")
    if not video.suffix:
        video = video.with_suffix(".mp4")
    if video.suffix.lower() != ".mp4":
        raise OutputError(f"{str(video)!r} isn't the name of an mp4, and only those are written; give {video.stem}.mp4")
    paths = (video, video.with_suffix(".sheet.png"), video.with_suffix(".json"))
    for path in paths:
        check_output(path, overwrite=overwrite, inputs=inputs)
    return paths


def profiler_from(args: argparse.Namespace) -> "Profiler | None":
    """Return the profiler that the arguments ask for, or None."""
    if not args.profile:
        return None
    check_folder(args.profile_output_path, "--profile_output_path")
    from wan_tpu.commands.record import Profiler

    return Profiler(args.profile_output_path)
