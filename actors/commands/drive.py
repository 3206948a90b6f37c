"""`wan-tpu drive`: every request of a manifest, through a cluster's pipeline; `wan-tpu submit` runs it there."""

import argparse
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from actors.commands.arguments import (
    PER_SLICE,
    add_cluster_arguments,
    add_drive_arguments,
    build_spec,
    join_cluster,
    read_settings,
)
from actors.observe.console import LiveConsole
from actors.pipeline_spec import PipelineSpec
from wan_tpu.commands.parser import Parser
from wan_tpu.storage.opening import open_storage

if TYPE_CHECKING:
    from actors.batch.manifest import Manifest
    from actors.batch.run import Batch, BatchReport
    from actors.batch.spans import LatestSpans
    from actors.observe.span import Span
    from wan_tpu.plan import RequestPlan

SNAPSHOTS = ".snapshots"  # The folder of snapshots in the output, unless --snapshots names another.
# Options that only matter when a pipeline is brought up; a running pipeline is used whatever its own values are.
_NEW_PIPELINE_OPTIONS = (
    "executables",
    "kernels",
    "collectives",
    "snapshots",
    "snapshot_every",
    "attempts",
    "warm_up",
    "timeout",
    "keep",
)


def drive(argv: Sequence[str]) -> None:
    """Make every video of a manifest that isn't in the output yet, with the pipeline of a cluster."""
    parser = Parser(prog="wan-tpu drive", description=drive.__doc__)
    add_cluster_arguments(parser)
    add_drive_arguments(parser)
    args = parser.parse_args(argv)

    from actors.batch.run import say

    with LiveConsole() as live:
        report = _drive(args, parser.non_defaults(args), live)
    report.check()
    say(report.summarize())


def _drive(args: argparse.Namespace, explicit: Collection[str], live: LiveConsole) -> "BatchReport":
    from actors.batch.checking import CheckingPlanner
    from actors.batch.manifest import read_manifest
    from actors.batch.run import open_batch
    from actors.batch.spans import LatestSpans
    from actors.pipeline.acquire import find_reusable
    from actors.pipeline.leftovers import delete_leftovers

    output = open_storage(args.output)
    live.tell("joining the cluster")
    requested_spec = _build_wanted(args, join_cluster(args))
    running = find_reusable(args.name, requested_spec, args.dtype)
    spec = running or requested_spec
    assert spec is not None  # Else `find_reusable` raises.
    if running is not None and running.lasting:
        for text in explain_ineffective(args, explicit, running):
            live.print_line(text)
    live.tell("reading the manifest")
    manifest = read_manifest(args.manifest, CheckingPlanner(spec.model, spec.settings.checkpoint))
    opening = open_batch(
        manifest,
        output,
        in_flight=choose_in_flight(args.in_flight, spec),
        remake_changed=args.remake_changed,
        model=spec.settings.checkpoint,
        precision=spec.settings.dtype,
        tell=live.print_line,
    )
    spans = LatestSpans()
    with opening as batch:
        delete_leftovers(spec.settings, lambda: _list_settled(manifest, batch))
        report = _make(args, spec, requested_spec, batch, live, spans)
        live.tell("drawing the timeline" if len(spans) else "")
        spans.save(output, live.print_line)  # Last, when no slice waits for it.
    return report


def _make(
    args: argparse.Namespace,
    spec: PipelineSpec,
    requested_spec: PipelineSpec | None,
    batch: "Batch",
    live: LiveConsole,
    spans: "LatestSpans",
) -> "BatchReport":
    """Make the videos that are missing, with the running pipeline or one of the batch's own, and release it."""
    from actors.errors import PipelineNotFound
    from actors.observe.status_actor import ReportedStatus, StatusActor
    from actors.pipeline.acquire import acquire_pipeline
    from actors.pipeline.driver import PipelineDriver
    from actors.pipeline.status import describe_requests

    figures = _Figures(spec, batch)
    with contextlib.ExitStack() as stack:
        engine = None
        if batch.todo:  # Bringing a pipeline up takes minutes.
            up = stack.enter_context(acquire_pipeline(args.name, requested_spec, live.tell, precision=args.dtype))
            # Another pipeline may have been brought up since the requests were planned.
            if (up.settings.checkpoint, up.settings.dtype) != (spec.settings.checkpoint, spec.settings.dtype):
                raise PipelineNotFound(f"pipeline {args.name!r} has changed meanwhile; run this again")
            engine = stack.enter_context(contextlib.closing(PipelineDriver(up)))
            status = StatusActor.connect(args.name)
            live.look = lambda: describe_requests(status.read_or_none(1.0) or ReportedStatus())

        def note(span: "Span") -> None:
            figures.note(span)
            if args.timeline:
                spans.add(span)

        report = batch.run(engine, progress=live, on_event=note)
        figures.show()
        live.tell("")
        live.look = None
    return report


class _Figures:
    """The metrics of a batch."""

    def __init__(self, spec: PipelineSpec, batch: "Batch") -> None:
        from actors.observe.meters import BatchMeters
        from cluster.costs.prices import Prices

        chips = {stage: pool.slice.chips for pool in spec.layout.pools for stage in pool.stages}
        self._meters = BatchMeters(chips, Prices.load().of_stages(spec.layout))
        self._results = batch.results
        self._total = len(batch.results) + len(batch.todo)

    def note(self, span: "Span") -> None:
        """Count the time that a slice has computed."""
        if span.kind == "compute":
            self._meters.count_compute(span.stage, span.seconds)
            if span.step is None:  # As often as videos begin and end.
                self.show()

    def show(self) -> None:
        """Show how many lines have ended, by status."""
        self._meters.show_lines(self._results.counts, self._total)


def choose_in_flight(in_flight: int | None, spec: PipelineSpec) -> int:
    """Return how many requests a pipeline gets at a time: as many as asked for, or as keep its slices busy."""
    return in_flight if in_flight is not None else PER_SLICE * spec.layout.slices


def explain_ineffective(args: argparse.Namespace, explicit: Collection[str], running: PipelineSpec) -> list[str]:
    """Return a line for each argument that changes nothing, because a running pipeline is used.

    Args:
        args: All arguments.
        explicit: The names of those that aren't their defaults.
        running: The pipeline.
    """
    return [
        f"--{option} has no effect: pipeline {running.settings.name} was brought up without this command"
        for option in _NEW_PIPELINE_OPTIONS
        if option in explicit and getattr(args, option) != getattr(running.settings, option, None)
    ]


def _build_wanted(args: argparse.Namespace, address: str) -> PipelineSpec | None:
    """Return the pipeline that the arguments describe, or None if they leave it to the one that runs."""
    if args.layout is None and args.layout_text is None and args.model_id is None:
        return None
    snapshots = f"{args.output.rstrip('/')}/{SNAPSHOTS}"
    return build_spec(*read_settings(args, address, snapshots), lasting=args.keep)


def _list_settled(manifest: "Manifest", batch: "Batch") -> Mapping[str, Callable[[], "RequestPlan"]]:
    """Return, by id, functions that plan the requests which this run doesn't make."""
    waiting = {entry.id for entry in batch.todo}
    return {entry.id: entry.load for entry in manifest.entries if entry.id not in waiting}
