"""`wan-tpu batch`: every request of a manifest, one after another in this process."""

from collections.abc import Sequence

from actors.batch import BatchSettings, drive, run_batch, say
from actors.commands.batch_arguments import add_batch_arguments
from actors.manifest import read_manifest
from actors.one_process import OneProcessEngine
from actors.storage import open_storage
from actors.timeline import Span
from actors.timeline_picture import save
from wan_tpu.commands import arguments
from wan_tpu.commands.parser import Parser
from wan_tpu.pipeline import load_pipeline
from wan_tpu.progress import Console
from wan_tpu.video import check_ffmpeg


def batch(argv: Sequence[str]) -> None:
    """Make every video of a manifest that isn't in the output yet."""
    parser = Parser(prog="wan-tpu batch", description=batch.__doc__)
    arguments.add_model_arguments(parser)
    add_batch_arguments(parser)
    args = parser.parse_args(argv)
    check_ffmpeg()
    settings = BatchSettings(in_flight=args.in_flight, remake_changed=args.remake_changed, model=args.model_id)
    output = open_storage(args.output)
    mesh = (args.dp, args.sp, args.tp)
    pipe = load_pipeline(args.model_id, args.dtype or "bfloat16", mesh, executables=args.executables)
    manifest = read_manifest(args.manifest, pipe.resolve)
    engine = OneProcessEngine(pipe)
    spans: list[Span] = []
    on_event = spans.append if args.timeline else None
    try:
        report = drive(run_batch(manifest, output, engine, settings, progress=Console("request"), on_event=on_event))
    finally:
        engine.close()
    if spans:
        save(output, spans)
    report.check()
    say(report.text())
