#!/usr/bin/env python3
"""Run five requests through four slices of an emulated cluster, and draw which slice computed what when.

The model is small, trained on coloured things that move; everything else is the program that runs published models on
TPUs.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from wan_tpu.cli import QUIET, run

os.environ.update(QUIET)  # Read by what is imported next.

import imageio.v3 as iio
from demo_model.score import save_rows

from actors.batch.manifest import Manifest, read_manifest
from actors.batch.run import BatchReport, open_batch
from actors.interrupts import end_on_sigterm
from actors.observe.console import LiveConsole
from actors.observe.span import Span
from actors.observe.status_actor import ReportedStatus, StatusActor
from actors.observe.timeline import compute_figures
from actors.observe.timeline_picture import save
from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy
from actors.pipeline.status import describe_requests
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.connect import connect, leave
from cluster.emulation.cluster import EmulatedCluster, list_emulated_slices
from cluster.errors import ClusterError
from cluster.layout import Layout
from wan_tpu.commands.parser import Parser
from wan_tpu.families import open_spec
from wan_tpu.storage.opening import open_storage

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "demo"
LAYOUT = "emulated-demo"
CHECKPOINT = ROOT / "examples" / "small-wan2.2-i2v"
MANIFEST = ROOT / "examples" / "scenes.jsonl"
# Environment variables of the hosts. Compiling is a third of the CPU time: programs for one video needn't be optimised
# (20 s become 10 s; the steps take 1.6 s more), and the next run reuses them.
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "demo-programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def demo(argv: Sequence[str]) -> int:
    """Start a cluster and a pipeline, make the videos, shut everything down, and return the exit code."""
    Parser(prog="demo.py", description=__doc__).parse_args(argv)
    start = time.monotonic()
    os.environ.update(ENVIRONMENT)
    layout = Layout.load(LAYOUT)
    hosts = sum(slice_.spec.hosts for slice_ in list_emulated_slices(layout))
    print(f"Five requests through {len(layout.pools)} slices of {hosts} hosts, emulated: CPU devices stand for chips.")
    print("The model is small and knows coloured things that move; the program is the one that runs Wan 2.2 on TPUs.\n")
    with end_on_sigterm(), tempfile.TemporaryDirectory(prefix="wan-demo-") as folder, LiveConsole() as live:
        report, spans, seen = _run(layout, Path(folder), live)
    if report.exit_code == 0:
        _say(report, spans, seen, time.monotonic() - start)
    return report.exit_code


def _run(layout: Layout, folder: Path, live: LiveConsole) -> tuple[BatchReport, list[Span], ReportedStatus]:
    model = open_spec(CHECKPOINT)
    manifest = read_manifest(MANIFEST, model)
    for entry in manifest.entries:  # what the demo before has made
        for name in (entry.output, f"{entry.id}.json"):
            (FOLDER / name).unlink(missing_ok=True)
    live.tell("starts the cluster: a Ray node for each host")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            EmulatedCluster.start(list_emulated_slices(layout), folder=folder / "cluster", imports="actors.imported")
        )
        connect(cluster.address)
        stack.callback(leave)
        live.print_line("the cluster is up")
        settings = PipelineSettings(
            checkpoint=str(CHECKPOINT),
            snapshots=str(folder / "snapshots"),
            dtype="float32",
            warm_up=(manifest.entries[0].plan.request,),  # all have one size
        )
        spec = PipelineSpec(layout, settings, model=model, lasting=False)
        deploy(spec, on_status=live.tell)
        live.print_line("the pipeline is up: weights are read, programs compiled")
        with contextlib.closing(PipelineDriver(spec)) as pipeline:
            report, spans = _make(manifest, pipeline, live)
        seen = StatusActor.connect(settings.name).read()
        live.tell("stops everything")
        return report, spans, seen


def _make(manifest: Manifest, pipeline: PipelineDriver, live: LiveConsole) -> tuple[BatchReport, list[Span]]:
    spans: list[Span] = []
    status = StatusActor.connect(pipeline.spec.settings.name)
    live.look = lambda: describe_requests(status.read_or_none(1.0) or ReportedStatus())
    output = open_storage(FOLDER)
    with open_batch(manifest, output, in_flight=len(manifest.entries), tell=live.print_line) as batch:
        report = batch.run(pipeline, progress=live, on_event=spans.append)
    live.tell("draws the timeline")
    live.look = None
    live.print_line(report.summarize())
    if spans:
        save(output, spans, "Five requests, four slices")
    return report, spans


def _say(report: BatchReport, spans: list[Span], seen: ReportedStatus, seconds: float) -> None:
    figures = compute_figures(spans)
    alone = sum(span.seconds for span in spans if span.kind == "compute")
    print(f"\nThe requests took {figures.summarize()}")
    print(f"All that was computed adds up to {alone:.1f} s; four slices share this machine's cores.")
    handoff_s = [took for handoffs in seen.handoffs.values() for took, _ in handoffs]
    if handoff_s:
        print(f"Inputs went from the object store to the devices {len(handoff_s)} times, on average in "
              f"{1000 * sum(handoff_s) / len(handoff_s):.0f} ms.")  # fmt: skip
    print(f"{seconds:.0f} s in all. In {FOLDER.relative_to(ROOT)}/:")
    videos = [Path(str(result.output)).name for result in report.results]
    print(f"  {', '.join(videos)}: the videos, each with its record")
    names = [f"zigzag{ending}.mp4" for ending in ("", "-without-adapter")]
    clips = [iio.imread(FOLDER / name, plugin="FFMPEG") for name in names]
    save_rows(FOLDER / "zigzag.compared.png", clips, ["with the adapter", "without"])
    print("  zigzag.compared.png              a sentence that the model learned from an adapter: with it, and without")
    print("  timeline.png                     which slice computed what when")
    print("  timeline.trace.json              the same, for https://ui.perfetto.dev")


if __name__ == "__main__":
    sys.exit(run(demo, expected=(ClusterError,)))
