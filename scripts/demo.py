#!/usr/bin/env python3
"""Run three requests through four slices of an emulated cluster, and draw which slice computed what when.

The model is small and has random weights; all else is the program that runs the published one on TPUs.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from actors import batch
from actors.board import Board, Seen
from actors.commands.drive import ended_as_by_ctrl_c, looking
from actors.errors import PipelineStartFailed
from actors.live import Live
from actors.manifest import read_manifest
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
from wan_tpu.request import GenerationRequest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "demo"
LAYOUT = "emulated-demo"
HEIGHT, WIDTH, FRAMES, STEPS = 160, 240, 13, 16
PROMPTS = {
    "cat-1": "A cat looks into the camera, its whiskers moving.",
    "cat-2": "A cat looks into the camera, its whiskers moving.",
    "cat-3": "A cat turns its head to the left, soft afternoon light on its fur.",
}
EXPERT = {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 512, "num_layers": 4, "text_dim": 64}
MAKE_CHECKPOINT = f"""
import pathlib, sys, transformers
from wan_tpu.tiny import make_checkpoint
transformers.logging.disable_progress_bar()
make_checkpoint(pathlib.Path(sys.argv[1]), "wan2.2-i2v-a14b", transformer={EXPERT})
"""


def main() -> int:
    """Make checkpoint, cluster, pipeline and videos; end it all; return the exit code."""
    start = time.monotonic()
    layout = Layout.load(LAYOUT, STAGES)
    hosts = sum(made.spec.hosts for made in layout.emulated_slices())
    print(f"Three requests through {len(layout.pools)} slices of {hosts} hosts, emulated: CPU devices stand for chips.")
    print("The checkpoint is small and has random weights: the program is the real one, the videos will be noise.\n")
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
    manifest = _write_manifest()
    live.tell("starts the cluster: a Ray node for each host")
    checkpoint = FOLDER / "checkpoint"
    command = [sys.executable, "-c", MAKE_CHECKPOINT, str(checkpoint)]
    making = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        with EmulatedCluster.start(layout.emulated_slices(), folder=folder / "cluster") as cluster:
            connect(cluster.address)
            live.line("the cluster is up")
            live.tell("makes the checkpoint")
            complaint = making.communicate()[1]
            if making.returncode:
                raise PipelineStartFailed(f"no checkpoint: {complaint.strip()}")
            settings = PipelineSettings(
                checkpoint=str(checkpoint),
                snapshots=str(folder / "snapshots"),
                dtype="float32",
                warm_up=(GenerationRequest(prompt="", height=HEIGHT, width=WIDTH, frames=FRAMES),),
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
    finally:
        making.kill()
        making.wait()


def _make(manifest: Path, pipeline: Pipeline, live: Live) -> tuple[batch.BatchReport, list[Span]]:
    spans: list[Span] = []
    live.look = looking(pipeline.settings.name)
    output = open_storage(FOLDER)
    work = batch.run_batch(
        read_manifest(manifest),
        output,
        pipeline,
        batch.BatchSettings(in_flight=len(PROMPTS)),
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


def _write_manifest() -> Path:
    """Write the requests, and remove what the demo before has made of them."""
    FOLDER.mkdir(exist_ok=True)
    settings = {"height": HEIGHT, "width": WIDTH, "frames": FRAMES, "steps": STEPS, "fps": 8, "shift": 5}
    settings |= {"guidance_scale": 3.5, "negative_prompt": "static, overexposed, blurred details"}
    lines = []
    for seed, (id_, prompt) in enumerate(PROMPTS.items()):
        for name in (f"{id_}.mp4", f"{id_}.json"):
            (FOLDER / name).unlink(missing_ok=True)
        request = {"id": id_, "prompt": prompt, "image": "../examples/cat.png", "seed": seed}
        lines.append(json.dumps(request | settings))
    manifest = FOLDER / "requests.jsonl"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


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
    print(f"  {', '.join(f'{id_}.mp4' for id_ in PROMPTS)}  the videos, each with its record")
    print("  timeline.png                     which slice computed what when")
    print("  timeline.trace.json              the same, for https://ui.perfetto.dev")


if __name__ == "__main__":
    sys.exit(main())
