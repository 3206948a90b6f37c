"""`wan-tpu generate`: a whole video in one process."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wan_tpu.commands import arguments
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput
from wan_tpu.media.joining import join_videos, read_clip, read_last_frame
from wan_tpu.media.reading import count_frames
from wan_tpu.media.temporary import open_folder

if TYPE_CHECKING:
    from PIL import Image

    from wan_tpu.plan import RequestPlan
    from wan_tpu.request import GenerationRequest
    from wan_tpu.spec import ModelSpec


def generate(argv: Sequence[str]) -> None:
    """Make one video: encoder, experts, decoder."""
    parser = Parser(prog="wan-tpu generate", description=generate.__doc__)
    arguments.add_model_arguments(parser)
    arguments.add_request_arguments(parser)
    arguments.add_profile_arguments(parser)
    parser.add_argument(
        "--extend",
        type=Path,
        metavar="VIDEO",
        help="a video to continue, by an I2V checkpoint or Helios: the mp4 shows it, then what follows its last frame",
    )
    parser.add_argument("--output", type=Path, default=Path("video.mp4"), help="the mp4; default %(default)s")
    arguments.add_overwrite(parser)
    args = parser.parse_args(argv)

    last_frame = None if args.extend is None else _read_end(args)
    request = arguments.request_from(args)
    outputs = arguments.check_outputs(
        args.output,
        overwrite=args.overwrite,
        inputs=(args.image, args.last_image, args.video, args.extend, args.model_id),
    )
    profiler = arguments.profiler_from(args)

    from wan_tpu.commands.recorded import Recorder, decode_to_files, denoise_recorded, encode_recorded, report

    pipe = arguments.pipeline_from(args)
    plan = (
        pipe.plan(request)
        if last_frame is None
        else plan_extension(pipe.runtime.model.spec, request, args.extend, last_frame)
    )
    pipe.check_components()
    recorder = Recorder(pipe.runtime, plan)
    run = pipe.run(pipe.fetch_adapters(plan), warn=recorder.warn, around=recorder.operation)
    encode_recorded(run)
    denoise_recorded(run, recorder, profiler)
    if args.extend is None:
        decode_to_files(run, recorder, plan.request, outputs, overwrite=args.overwrite)
    else:
        with open_folder(outputs[0].absolute().parent) as folder:
            segment = folder / "segment.mp4"
            decode_to_files(run, recorder, plan.request, (segment, *outputs[1:]), overwrite=args.overwrite)
            join_videos([args.extend, segment], outputs[0])
    recorder.save(outputs[2], plan.request)
    report(outputs, recorder)


def _read_end(args: argparse.Namespace) -> "Image.Image":
    """Return the last frame of the video to extend; raises `InvalidInput` if arguments name another beginning."""
    for name in ("image", "video"):
        if getattr(args, name) is not None:
            raise InvalidInput(f"--extend begins with the last frame of {args.extend}; leave --{name} out")
    read_clip(args.extend)  # Refuse videos that can't be joined before computing anything.
    frame = read_last_frame(args.extend)
    frame.info["source"] = f"the last frame of {args.extend}"
    return frame


def plan_extension(spec: "ModelSpec", request: "GenerationRequest", video: Path, frame: "Image.Image") -> "RequestPlan":
    """Plan the clip that continues a video, by default at the video's size.

    Models that take motion into account continue after its last frames. For other models, and for a video that is too
    short, the clip starts with the video's last frame, which isn't written a second time.
    """
    spec.check_extension()
    if request.height is None and request.width is None:
        height, width = spec.size_to_extend((frame.height, frame.width))
        request = dataclasses.replace(request, height=height, width=width)
    if spec.continues_video and count_frames(video) >= spec.frame_offset:
        return spec.plan(dataclasses.replace(request, video=video))
    plan = spec.plan(dataclasses.replace(request, image=frame))
    spec.check_extension(plan.request)
    return plan.with_request(dataclasses.replace(plan.request, hidden_frames=1))
