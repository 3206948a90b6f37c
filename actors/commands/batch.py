"""`wan-tpu batch`: every request of a manifest, one after another in this process."""

import contextlib
from collections.abc import Sequence

from actors.commands.arguments import MAX_IN_FLIGHT, add_batch_arguments, check_range, make_model_absolute
from wan_tpu.commands import arguments
from wan_tpu.commands.importing import heavy_imports
from wan_tpu.commands.parser import Parser
from wan_tpu.commands.previewing import add_decoder_argument


def batch(argv: Sequence[str]) -> None:
    """Make those videos of a manifest that the output doesn't have yet, in this process."""
    parser = Parser(
        prog="wan-tpu batch",
        description=batch.__doc__,
        examples="wan-tpu batch --model MODEL --manifest requests.jsonl --output out",
    )
    arguments.add_model_arguments(parser)
    add_batch_arguments(parser)
    add_decoder_argument(parser)
    args = parser.parse_args(argv)
    check_range(args, "in_flight", 1, MAX_IN_FLIGHT)

    with heavy_imports():
        from actors.batch.manifest import read_manifest
        from actors.batch.one_process import OneProcessEngine
        from actors.batch.run import open_batch, say
        from actors.batch.spans import LatestSpans
        from actors.pipeline_spec import PipelineSettings
        from wan_tpu.adapters.checking import check_visible
        from wan_tpu.media.video import check_ffmpeg
        from wan_tpu.pipeline import load_pipeline
        from wan_tpu.progress import Console
        from wan_tpu.storage.opening import open_storage
        from wan_tpu.switches import set_switches

    check_ffmpeg()
    set_switches(args.kernels, args.collectives)
    precision = args.dtype or PipelineSettings.dtype
    pipe = load_pipeline(
        args.model_id,
        precision,
        (args.dp, args.sp, args.tp),
        executables=args.executables,
        preview_decoder=args.preview_decoder,
    )
    engine = OneProcessEngine(pipe)
    manifest = read_manifest(args.manifest, engine.model, lambda adapter: check_visible(args.model_id, [adapter]))
    output = open_storage(args.output)
    spans = LatestSpans()
    opening = open_batch(
        manifest,
        output,
        in_flight=args.in_flight,
        remake_changed=args.remake_changed,
        previews=args.previews,
        model=make_model_absolute(args.model_id),
        precision=precision,
    )
    with opening as ready_batch:
        with contextlib.closing(engine):
            callbacks = {"on_event": spans.add} if args.timeline else {}
            report = ready_batch.run(engine, progress=Console("request"), **callbacks)
        spans.save(output, say)
    report.check()
    say(report.summarize())
