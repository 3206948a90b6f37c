#!/usr/bin/env python3
"""Run three requests through four slices of an emulated cluster, and draw which slice computed what when.

The model is small, trained on coloured things that move; all else is the program that runs the published one on TPUs.
"""

import sys
import tempfile
import time
from pathlib import Path

from actors import batch
from actors.board import Board, Seen
from actors.commands.drive import ended_as_by_ctrl_c, looking
from actors.live import Live
from actors.manifest import Manifest, read_manifest
from actors.pipeline import Pipeline
from actors.pools import deploy
from actors.settings import PipelineSettings
from actors.storage import open_storage
from actors.timeline import Span, summarise
from actors.timeline_picture import save
from cluster.connect import connect, leave
from cluster.emulated import EmulatedCluster
from cluster.errors import ClusterError
from cluster.layout import Layout
from wan_tpu.errors import WanTpuError
from wan_tpu.expert import STAGES

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "demo"
LAYOUT = "emulated-demo"
CHECKPOINT = ROOT / "examples" / "small-wan2.2-i2v"
MANIFEST = ROOT / "examples" / "scenes.jsonl"


def main() -> int:
    """Make cluster, pipeline and videos; end it all; return the exit code."""
    start = time.monotonic()
    layout = Layout.load(LAYOUT, STAGES)
    hosts = sum(made.spec.hosts for made in layout.emulated_slices())
    print(f"Three requests through {len(layout.pools)} slices of {hosts} hosts, emulated: CPU devices stand for chips.")
    print("The model is small and knows coloured things that move; the program is the one that runs Wan 2.2 on TPUs.\n")
    try:
        with ended_as_by_ctrl_c(), tempfile.TemporaryDirectory(prefix="wan-demo-") as folder, Live() as live:
            report, spans, seen = _run(layout, Path(folder), live)
    except KeyboardInterrupt:
        print("interrupted: everything is stopped", file=sys.stderr)
        return 130
    except (WanTpuError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if report.exit_code == 0:
        _say(spans, seen, time.monotonic() - start)
    return report.exit_code


def _run(layout: Layout, folder: Path, live: Live) -> tuple[batch.BatchReport, list[Span], Seen]:
    manifest = read_manifest(MANIFEST)
    for entry in manifest.entries:  # what the demo before has made
        for name in (entry.output, f"{entry.id}.json"):
            (FOLDER / name).unlink(missing_ok=True)
    live.tell("starts the cluster: a Ray node for each host")
    with EmulatedCluster.start(layout.emulated_slices(), folder=folder / "cluster") as cluster:
        connect(cluster.address)
        live.line("the cluster is up")
        sizes = {(each.height, each.width): each for each in (entry.request() for entry in manifest.entries)}
        settings = PipelineSettings(
            checkpoint=str(CHECKPOINT),
            snapshots=str(folder / "snapshots"),
            dtype="float32",
            warm_up=tuple(sizes.values()),
        )
        deploy(layout, settings, tell=live.tell)
        live.line("the pipeline is up: weights are read, programs compiled")
        pipeline = Pipeline(layout, settings)
        report, spans = _make(manifest, pipeline, live)
        pipeline.close()
        seen = Board.connect(settings.name).seen()
        live.tell("stops everything")
        leave()
        return report, spans, seen


def _make(manifest: Manifest, pipeline: Pipeline, live: Live) -> tuple[batch.BatchReport, list[Span]]:
    spans: list[Span] = []
    live.look = looking(pipeline.settings.name)
    output = open_storage(FOLDER)
    work = batch.run_batch(
        manifest,
        output,
        pipeline,
        batch.BatchSettings(in_flight=len(manifest.entries)),
        progress=live,
        on_event=spans.append,
        tell=live.line,
    )
    report = batch.drive(work)
    live.tell("draws the timeline")
    live.look = None
    live.line(report.text())
    if spans:
        save(output, spans, "Three requests, four slices")
    return report, spans


def _say(spans: list[Span], seen: Seen, seconds: float) -> None:
    figures = summarise(spans)
    alone = sum(span.seconds for span in spans if span.what == "compute")
    print(f"\nThe requests took {figures.text()}")
    print(f"All that was computed adds up to {alone:.1f} s; four slices share this machine's cores.")
    handed = [seconds for handoff in seen.handoffs.values() for seconds in handoff.seconds]
    if handed:
        print(f"Inputs went from the object store to the devices {len(handed)} times, on average in "
              f"{1000 * sum(handed) / len(handed):.0f} ms.")  # fmt: skip
    print(f"{seconds:.0f} s in all. In {FOLDER.relative_to(ROOT)}/:")
    print(f"  {', '.join(entry.output for entry in read_manifest(MANIFEST).entries)}  the videos, each with its record")
    print("  timeline.png                     which slice computed what when")
    print("  timeline.trace.json              the same, for https://ui.perfetto.dev")


if __name__ == "__main__":
    sys.exit(main())
