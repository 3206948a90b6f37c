"""`wan-tpu generate`: a whole video in one process."""

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wan_tpu.commands import arguments
from wan_tpu.commands.importing import heavy_imports
from wan_tpu.commands.parser import Parser
from wan_tpu.commands.previewing import add_preview_arguments, read_options
from wan_tpu.commands.session import run_session
from wan_tpu.errors import InvalidInput, InvalidRequest, OutputError, WanTpuError
from wan_tpu.families import open_spec
from wan_tpu.lengths import describe_length
from wan_tpu.media.joining import join_videos, prepare_source, read_clip
from wan_tpu.media.reading import open_video, read_frame
from wan_tpu.media.shown import Fit
from wan_tpu.media.temporary import open_folder
from wan_tpu.media.video import check_output
from wan_tpu.progress import say
from wan_tpu.reference import CONTINUED, open_reference, parse_references
from wan_tpu.switches import set_switches

_EXAMPLES = """
wan-tpu generate --model MODEL --prompt "a cat" -o cat.mp4    # wan-tpu models lists their names
wan-tpu generate --model MODEL --image cat.png --prompt "it looks up" --preset PRESET
wan-tpu generate --model MODEL --prompt "rain on a roof" --size 1280x704 --seconds 5
wan-tpu generate --model MODEL    # asks for one prompt after another
"""

if TYPE_CHECKING:
    from wan_tpu.plan import RequestPlan
    from wan_tpu.request import GenerationRequest
    from wan_tpu.spec import ModelSpec


def generate(argv: Sequence[str]) -> None:
    """Make one video. Without --prompt, ask for one prompt after another, with weights and programs kept in memory."""
    parser = Parser(prog="wan-tpu generate", description=generate.__doc__, examples=_EXAMPLES)
    arguments.add_model_arguments(parser)
    arguments.add_request_arguments(parser)
    arguments.add_profile_arguments(parser)
    add_preview_arguments(parser)
    parser.add_argument(
        "--extend",
        type=Path,
        metavar="VIDEO",
        help="a video to continue, by a model that takes images or videos: the mp4 shows it, then what comes next",
    )
    parser.add_argument("--output", "-o", type=Path, default=Path("video.mp4"), help="the mp4; default %(default)s")
    arguments.add_overwrite(parser)
    args = parser.parse_args(argv)

    if args.prompt is None:
        run_session(args)
        return
    size = None if args.extend is None else _read_size(args)
    request = arguments.request_from(args)
    inputs = (args.image, args.last_image, args.video, args.extend, args.model_id)
    outputs = arguments.check_outputs(args.output, overwrite=args.overwrite, inputs=inputs)
    part = outputs[0] if size is None else outputs[0].with_suffix(".new.mp4")
    check_output(part, overwrite=args.overwrite, inputs=inputs)
    previews = read_options(args)
    previews.check(part, overwrite=args.overwrite)
    profiler = arguments.profiler_from(args)
    set_switches(args.kernels, args.collectives)
    spec = open_spec(args.model_id)
    with contextlib.ExitStack() as opened:
        source = None
        if size is None:  # Planned before JAX and PyTorch are imported, which takes seconds.
            plan = spec.plan(request)
            plan.check_prompt()
        else:
            folder = opened.enter_context(open_folder(outputs[0].absolute().parent))
            plan, source = plan_extension(spec, request, args.extend, size, folder)

        say(f"opening {args.model_id}")
        with heavy_imports():
            from wan_tpu.commands.recorded import Recorder, make_recorded, report

        pipe = arguments.pipeline_from(args)
        pipe.check_components(*pipe.runtime.model.spec.list_components(plan.request))
        recorder = Recorder(pipe.runtime, plan)
        fit = [] if size is None else spec.describe_fit(plan.request, "the video to extend", size)
        for warning in [*fit, *describe_length(args.seconds, plan.request, spec)]:
            recorder.warn(warning)
        made = make_recorded(
            pipe,
            plan,
            recorder,
            (part, *outputs[1:]),
            profiler=profiler,
            previews=previews,
            overwrite=args.overwrite,
            extended=args.extend if plan.request.video is not None else None,
        )
        if source is not None:
            try:
                join_videos([source, part], outputs[0])
            except WanTpuError as error:
                recorder.save(outputs[2], made)
                raise OutputError(f"{error}; the new part is in {part}") from error
            part.unlink()
            if made.video is not None:
                made = dataclasses.replace(made, video=args.extend)
        report(outputs, recorder, made)


def _read_size(args: argparse.Namespace) -> tuple[int, int]:
    """Return the (height, width) of the video to extend; raises `InvalidInput` if arguments name another beginning."""
    for name in ("image", "video"):
        if getattr(args, name) is not None:
            raise InvalidInput(f"--extend begins with the last frame of {args.extend}; leave --{name} out")
    with open_video(args.extend) as shown:
        return shown.height, shown.width


def plan_extension(
    spec: "ModelSpec", request: "GenerationRequest", video: Path, size: tuple[int, int], folder: Path
) -> "tuple[RequestPlan, Path]":
    """Plan the clip that continues a video, by default at the video's size.

    Models that take motion into account continue after its last frames. For other models, and for a video that is too
    short, the clip starts with the video's last frame, which isn't written a second time.

    Args:
        spec: The model.
        request: The request, without a beginning.
        video: The video.
        size: Its (height, width).
        folder: A folder for temporary files, which are used until the clip has been joined with the video.

    Returns:
        The plan, and the video to join with the clip.
    """
    spec.check_extension()
    if request.height is None and request.width is None:
        height, width = spec.size_to_extend(size)
        request = dataclasses.replace(request, height=height, width=width)
    alone = dataclasses.replace(request, references=None, reference_size=None) if spec.overlap else request
    resolved = spec.plan(alone, image=True, picture=size).request
    source = prepare_source(video, folder, Fit(resolved.height, resolved.width, spec.shape_slack), resolved.fps)
    frames = read_clip(source).frames
    if spec.continues_video and frames >= spec.frame_offset:
        return spec.plan(dataclasses.replace(request, video=source)), source
    if spec.overlap is not None and frames >= spec.overlap.frames:
        references = [*(parse_references(request.references or ()) or ()), open_reference(CONTINUED, source)]
        try:
            plan = spec.plan(dataclasses.replace(request, references=references))
        except InvalidRequest as error:
            if error.field not in ("preset", "fps", "frames"):  # What can't go on so begins with the last frame.
                raise
        else:
            origin = frames - spec.overlap.frames
            return plan.with_request(dataclasses.replace(plan.request, origin=origin)), source
    frame = read_frame(source, frames - 1)
    frame.info["source"] = f"the last frame of {video}"
    plan = spec.plan(dataclasses.replace(request, image=frame))
    spec.check_extension(plan.request)
    return plan.with_request(dataclasses.replace(plan.request, hidden_frames=1)), source
