"""`wan-tpu drive`: every request of a manifest, through the pipeline of a cluster. What `wan-tpu submit` runs there."""

import argparse
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from actors.commands.arguments import (
    PER_SLICE,
    add_cluster_arguments,
    add_drive_arguments,
    join,
    pipeline_spec,
    settings_from,
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

SNAPSHOTS = ".snapshots"  # in the output, of a pipeline that isn't told another place
# What a pipeline is brought up with, and that one that runs is used without, whatever its own is.
_OF_A_NEW_PIPELINE = (
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


def _drive(args: argparse.Namespace, given: Collection[str], live: LiveConsole) -> "BatchReport":
    from actors.batch.checking import CheckingPlanner
    from actors.batch.manifest import read_manifest
    from actors.batch.run import open_batch
    from actors.batch.spans import LatestSpans
    from actors.pipeline.acquire import find_reusable
    from actors.pipeline.leftovers import delete_leftovers

    output = open_storage(args.output)
    live.tell("joining the cluster")
    wanted = _wanted(args, join(args))
    runs = find_reusable(args.name, wanted, args.dtype)
    spec = runs or wanted
    assert spec is not None  # else `find_reusable` raises
    if runs is not None and runs.lasting:
        for text in explain_ineffective(args, given, runs):
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
    with opening as opened:
        delete_leftovers(spec.settings, lambda: _settled(manifest, opened))
        report = _make(args, spec, wanted, opened, live, spans)
        live.tell("drawing the timeline" if len(spans) else "")
        spans.save(output, live.print_line)  # once no slice waits for it
    return report


def _make(
    args: argparse.Namespace,
    spec: PipelineSpec,
    wanted: PipelineSpec | None,
    opened: "Batch",
    live: LiveConsole,
    spans: "LatestSpans",
) -> "BatchReport":
    """Make what is to be made, with the pipeline that is there or one of the batch's own; it is let go of then."""
    from actors.errors import PipelineNotFound
    from actors.observe.status_actor import ReportedStatus, StatusActor
    from actors.pipeline.acquire import acquire_pipeline
    from actors.pipeline.driver import PipelineDriver
    from actors.pipeline.status import describe_requests

    figures = _Figures(spec, opened)
    with contextlib.ExitStack() as stack:
        engine = None
        if opened.todo:  # bringing a pipeline up takes minutes
            up = stack.enter_context(acquire_pipeline(args.name, wanted, live.tell, precision=args.dtype))
            made_with = up.settings.checkpoint, up.settings.dtype
            if made_with != (spec.settings.checkpoint, spec.settings.dtype):  # brought up since it was planned
                raise PipelineNotFound(f"pipeline {args.name!r} has changed meanwhile; run this again")
            engine = stack.enter_context(contextlib.closing(PipelineDriver(up)))
            status = StatusActor.connect(args.name)
            live.look = lambda: describe_requests(status.read_or_none(1.0) or ReportedStatus())

        def note(span: "Span") -> None:
            figures.note(span)
            if args.timeline:
                spans.add(span)

        report = opened.run(engine, progress=live, on_event=note)
        figures.show()
        live.tell("")
        live.look = None
    return report


class _Figures:
    """The metrics of a batch."""

    def __init__(self, spec: PipelineSpec, opened: "Batch") -> None:
        from actors.observe.meters import BatchMeters
        from cluster.costs.prices import Prices

        chips = {stage: pool.slice.chips for pool in spec.layout.pools for stage in pool.stages}
        self._meters = BatchMeters(chips, Prices.load().of_stages(spec.layout))
        self._results = opened.results
        self._total = len(opened.results) + len(opened.todo)

    def note(self, span: "Span") -> None:
        """Count what a slice has computed."""
        if span.kind == "compute":
            self._meters.count_compute(span.stage, span.seconds)
            if span.step is None:  # as often as videos begin and end
                self.show()

    def show(self) -> None:
        """Show how many lines have ended, by status."""
        self._meters.show_lines(self._results.counts, self._total)


def choose_in_flight(given: int | None, spec: PipelineSpec) -> int:
    """Return how many requests are handed to a pipeline at a time: what is asked for, or what keeps its slices busy."""
    return given if given is not None else PER_SLICE * spec.layout.slices


def explain_ineffective(args: argparse.Namespace, given: Collection[str], runs: PipelineSpec) -> list[str]:
    """Return a line for each argument that changes nothing, since a pipeline is used that others have brought up.

    Args:
        args: All arguments.
        given: The names of those that aren't their defaults.
        runs: The pipeline.
    """
    return [
        f"--{option} has no effect: pipeline {runs.settings.name} was brought up without this command"
        for option in _OF_A_NEW_PIPELINE
        if option in given and getattr(args, option) != getattr(runs.settings, option, None)
    ]


def _wanted(args: argparse.Namespace, address: str) -> PipelineSpec | None:
    """Return the pipeline that the arguments describe; None where they leave it to what runs."""
    if args.layout is None and args.layout_text is None and args.model_id is None:
        return None
    snapshots = f"{args.output.rstrip('/')}/{SNAPSHOTS}"
    return pipeline_spec(*settings_from(args, address, snapshots), lasting=args.keep)


def _settled(manifest: "Manifest", opened: "Batch") -> Mapping[str, Callable[[], "RequestPlan"]]:
    """Return what plans the requests that this run doesn't make, by their ids."""
    waiting = {entry.id for entry in opened.todo}
    return {entry.id: entry.load for entry in manifest.entries if entry.id not in waiting}
