"""`wan-tpu drive`: every request of a manifest, through the pipeline of a cluster. What `wan-tpu submit` runs there."""

import argparse
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.commands.arguments import add_cluster_arguments, add_drive_arguments, join, pipeline_spec, settings_from
from actors.interrupts import ended_as_by_ctrl_c
from actors.observe.console import LiveConsole
from actors.storage.opening import open_storage
from wan_tpu.commands.parser import Parser

if TYPE_CHECKING:
    from actors.batch.run import BatchReport

SNAPSHOTS = ".snapshots"  # in the output, of a pipeline that isn't told another place


def drive(argv: Sequence[str]) -> None:
    """Make every video of a manifest that isn't in the output yet, with the pipeline of a cluster."""
    parser = Parser(prog="wan-tpu drive", description=drive.__doc__)
    add_cluster_arguments(parser)
    add_drive_arguments(parser)
    args = parser.parse_args(argv)

    from actors.batch.run import say

    with ended_as_by_ctrl_c(), LiveConsole() as live:
        report = _drive(args, live)
    report.check()
    say(report.text())


def _drive(args: argparse.Namespace, live: LiveConsole) -> "BatchReport":
    from actors.batch.manifest import read_manifest
    from actors.batch.run import open_batch
    from actors.errors import PipelineNotFound
    from actors.observe.meters import BatchMeters
    from actors.observe.span import Span
    from actors.observe.status_actor import StatusActor
    from actors.observe.timeline_picture import save
    from actors.pipeline.acquire import acquire_pipeline, reusable
    from actors.pipeline.driver import PipelineDriver
    from actors.pipeline.status import under_way
    from cluster.costs.prices import Prices

    output = open_storage(args.output)
    live.tell("joining the cluster")
    address = join(args)
    told = args.layout is not None or args.layout_text is not None or args.model_id is not None
    snapshots = f"{args.output.rstrip('/')}/{SNAPSHOTS}"
    wanted = pipeline_spec(*settings_from(args, address, snapshots), lasting=args.keep) if told else None
    spec = reusable(args.name, wanted) or wanted
    assert spec is not None  # else `reusable` raises
    spans: list[Span] = []
    chips = {stage: pool.slice.chips for pool in spec.layout.pools for stage in pool.stages}
    meters = BatchMeters(chips, Prices.load().of_stages(spec.layout))

    def note(span: Span) -> None:
        spans.append(span)
        if span.what == "compute":
            meters.spent(span.stage, span.seconds)
            if span.step is None:  # as often as videos begin and end
                meters.lines([result.status for result in list(opened.results.values())], total)

    manifest = read_manifest(args.manifest, spec.model.plan)
    opening = open_batch(
        manifest,
        output,
        in_flight=args.in_flight,
        remake_changed=args.remake_changed,
        model=spec.settings.checkpoint,
        tell=live.line,
    )
    total = len(manifest.entries) + len(manifest.bad)
    with opening as opened, contextlib.ExitStack() as stack:
        engine = None
        if opened.todo:  # bringing a pipeline up takes minutes
            up = stack.enter_context(acquire_pipeline(args.name, wanted, live.tell))
            if up.settings.checkpoint != spec.settings.checkpoint:  # another was brought up since it was planned
                raise PipelineNotFound(f"pipeline {args.name!r} has changed meanwhile; run this again")
            engine = stack.enter_context(contextlib.closing(PipelineDriver(up)))
            status = StatusActor.connect(args.name)
            live.look = lambda: under_way(status.seen())
        report = opened.run(engine, progress=live, on_event=note)
        meters.lines((result.status for result in report.results), total)
        live.tell("")
        live.look = None
        if args.timeline and spans:
            save(output, spans)
    return report
