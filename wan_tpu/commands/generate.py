"""`wan-tpu generate`: a whole video in one process."""

from collections.abc import Sequence
from pathlib import Path

from wan_tpu.commands import arguments
from wan_tpu.commands.parser import Parser


def generate(argv: Sequence[str]) -> None:
    """Make one video: encoder, experts, decoder."""
    parser = Parser(prog="wan-tpu generate", description=generate.__doc__)
    arguments.add_model_arguments(parser)
    arguments.add_request_arguments(parser)
    arguments.add_profile_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("video.mp4"), help="the mp4; default %(default)s")
    arguments.add_overwrite(parser)
    args = parser.parse_args(argv)

    request = arguments.request_from(args)
    outputs = arguments.check_outputs(
        args.output, overwrite=args.overwrite, inputs=(args.image, args.last_image, args.video, args.model_id)
    )
    profiler = arguments.profiler_from(args)

    from wan_tpu.commands.recorded import Recorder, decode_to_files, denoise_recorded, encode_recorded, report

    pipe = arguments.pipeline_from(args)
    plan = pipe.plan(request)
    pipe.check_components()
    recorder = Recorder(pipe.runtime, plan)
    run = pipe.run(pipe.fetch_adapters(plan), warn=recorder.warn, around=recorder.operation)
    encode_recorded(run)
    denoise_recorded(run, recorder, profiler)
    decode_to_files(run, recorder, plan.request, outputs, overwrite=args.overwrite)
    recorder.save(outputs[2], plan.request)
    report(outputs, recorder)
