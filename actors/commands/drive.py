"""`wan-tpu drive`: send every request of a manifest to a cluster's pipeline; `wan-tpu submit` runs it as a job."""

import argparse
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from actors.commands.arguments import (
    MAX_IN_FLIGHT,
    REQUESTS_PER_SLICE,
    add_cluster_arguments,
    add_drive_arguments,
    check_range,
)
from actors.commands.connection import join_cluster
from actors.commands.new_pipeline import build_spec, read_settings
from actors.observe.console import LiveConsole
from actors.pipeline_spec import PipelineSpec
from wan_tpu.commands.importing import heavy_imports
from wan_tpu.commands.parser import Parser
from wan_tpu.storage.opening import open_storage

if TYPE_CHECKING:
    from actors.batch.manifest import Manifest
    from actors.batch.run import Batch, BatchReport
    from actors.batch.spans import LatestSpans
    from actors.observe.span import Span
    from wan_tpu.plan import RequestPlan

SNAPSHOTS = ".snapshots"  # The folder for snapshots inside the output, where --snapshots is omitted.
# Options that only take effect when this command brings a pipeline up. A running pipeline keeps its own values.
_NEW_PIPELINE_OPTIONS = (
    "executables",
    "kernels",
    "collectives",
    "preview_decoder",
    "snapshots",
    "snapshot_every",
    "attempts",
    "warm_up",
    "timeout",
    "keep",
)


def drive(argv: Sequence[str]) -> None:
    """Make those videos of a manifest that the output doesn't have yet, with the pipeline of a cluster."""
    parser = Parser(prog="wan-tpu drive", description=drive.__doc__)
    add_cluster_arguments(parser)
    add_drive_arguments(parser)
    args = parser.parse_args(argv)
    check_range(args, "in_flight", 1, MAX_IN_FLIGHT)

    from actors.batch.run import say

    with LiveConsole() as live:
        report = _drive(args, parser.non_defaults(args), live)
    report.check()
    say(report.summarize())


def _drive(args: argparse.Namespace, explicit: Collection[str], live: LiveConsole) -> "BatchReport":
    with heavy_imports():
        from actors.batch.manifest import read_manifest
        from actors.batch.run import open_batch
        from actors.batch.spans import LatestSpans
        from actors.pipeline.acquire import find_reusable
        from actors.pipeline.leftovers import delete_leftovers
        from wan_tpu.adapters.checking import check_visible

    output = open_storage(args.output)
    live.tell("joining the cluster")
    requested_spec = _build_requested_spec(args, join_cluster(args))
    running = find_reusable(args.name, requested_spec, args.dtype)
    spec = running or requested_spec
    assert spec is not None  # Else `find_reusable` raises.
    if running is not None and running.lasting:
        for text in explain_ineffective(args, explicit, running):
            live.print_line(text)
    live.tell("reading the manifest")
    manifest = read_manifest(
        args.manifest, spec.model, lambda adapter: check_visible(spec.settings.checkpoint, [adapter])
    )
    opening = open_batch(
        manifest,
        output,
        in_flight=choose_in_flight(args.in_flight, spec),
        remake_changed=args.remake_changed,
        previews=args.previews,
        model=spec.settings.checkpoint,
        precision=spec.settings.dtype,
        tell=live.print_line,
    )
    spans = LatestSpans()
    with opening as batch:
        delete_leftovers(spec.settings, lambda: _collect_planners(manifest, batch))
        report = _run_batch(args, spec, requested_spec, batch, live, spans)
        live.tell("drawing the timeline" if len(spans) else "")
        spans.save(output, live.print_line)  # Draw it last, when the pipeline has been released.
    return report


def _run_batch(
    args: argparse.Namespace,
    spec: PipelineSpec,
    requested_spec: PipelineSpec | None,
    batch: "Batch",
    live: LiveConsole,
    spans: "LatestSpans",
) -> "BatchReport":
    """Make the missing videos, with the running pipeline or one that this batch brings up, and release the pipeline.

    Args:
        args: The command's arguments.
        spec: The pipeline that the requests were planned for.
        requested_spec: The pipeline that the arguments describe, or None.
        batch: The batch.
        live: Shows what is under way.
        spans: Receives the timeline's spans.

    Raises:
        PipelineNotFound: There is no pipeline to use, or its model or precision has changed since the planning.
    """
    with heavy_imports():
        from actors.errors import PipelineNotFound
        from actors.observe.status_actor import ReportedStatus, StatusActor
        from actors.pipeline.acquire import acquire_pipeline
        from actors.pipeline.driver import PipelineDriver
        from actors.pipeline.status import describe_requests

    metrics = _BatchMetrics(spec, batch)
    with contextlib.ExitStack() as stack:
        engine = None
        if batch.todo:  # Without anything to make, don't bring a pipeline up, which takes minutes.
            acquiring = acquire_pipeline(args.name, requested_spec, live.tell, precision=args.dtype)
            pipeline = stack.enter_context(acquiring)
            # Another pipeline may have been brought up since the requests were planned.
            planned, settings = spec.settings, pipeline.settings
            if (settings.checkpoint, settings.dtype) != (planned.checkpoint, planned.dtype):
                raise PipelineNotFound(
                    f"pipeline {args.name!r} was replaced by one of {settings.checkpoint} in {settings.dtype} since "
                    f"the requests were planned for {planned.checkpoint} in {planned.dtype}; run this command again"
                )
            engine = stack.enter_context(contextlib.closing(PipelineDriver(pipeline)))
            status = StatusActor.connect(args.name)
            live.look = lambda: describe_requests(status.read_or_none(1.0) or ReportedStatus())

        def record(span: "Span") -> None:
            metrics.record(span)
            if args.timeline:
                spans.add(span)

        report = batch.run(engine, progress=live, on_event=record)
        metrics.show()
        live.tell("")
        live.look = None
    return report


class _BatchMetrics:
    """Counts the compute time of a batch, and how many of its lines have ended."""

    def __init__(self, spec: PipelineSpec, batch: "Batch") -> None:
        from actors.observe.meters import BatchMeters
        from cluster.costs.prices import Prices

        chips = {stage: pool.slice.chips for pool in spec.layout.pools for stage in pool.stages}
        self._meters = BatchMeters(chips, Prices.load().of_stages(spec.layout))
        self._results = batch.results
        self._total = len(batch.results) + len(batch.todo)

    def record(self, span: "Span") -> None:
        """Count the time that a slice has computed."""
        if span.kind == "compute":
            self._meters.count_compute(span.stage, span.seconds)
            if span.step is None:  # Encoding or decoding, at the start and the end of each video.
                self.show()

    def show(self) -> None:
        """Publish how many lines have ended, by status."""
        self._meters.show_lines(self._results.counts, self._total)


def choose_in_flight(in_flight: int | None, spec: PipelineSpec) -> int:
    """Return how many requests to keep in the pipeline at a time: `in_flight`, or enough to keep all slices busy."""
    return in_flight if in_flight is not None else REQUESTS_PER_SLICE * spec.layout.slices


def explain_ineffective(args: argparse.Namespace, explicit: Collection[str], running: PipelineSpec) -> list[str]:
    """Return a line for each option that has no effect, because the batch uses a running pipeline.

    Args:
        args: The command's arguments.
        explicit: The names of those that differ from their defaults.
        running: The running pipeline.
    """
    return [
        f"--{option} has no effect: pipeline {running.settings.name} is already running"
        for option in _NEW_PIPELINE_OPTIONS
        if option in explicit and getattr(args, option) != getattr(running.settings, option, None)
    ]


def _build_requested_spec(args: argparse.Namespace, address: str) -> PipelineSpec | None:
    """Return the pipeline that the arguments describe, or None if they describe none, and the running one is used."""
    if args.layout is None and args.layout_text is None and args.model_id is None:
        return None
    snapshots = f"{args.output.rstrip('/')}/{SNAPSHOTS}"
    return build_spec(*read_settings(args, address, snapshots), lasting=args.keep)


def _collect_planners(manifest: "Manifest", batch: "Batch") -> Mapping[str, Callable[[], "RequestPlan"] | None]:
    """Return what `delete_leftovers` asks for, of each request that this run won't make."""
    from actors.batch.segments import name_segment

    remaining = {entry.id for entry in batch.todo}
    done = [entry for entry in manifest.entries if entry.id not in remaining]
    segments = {name_segment(entry, index + 1): None for entry in done for index in range(len(entry.next_prompts))}
    return {entry.id: entry.load for entry in done} | segments
