#!/usr/bin/env python3
"""Measure the pipeline on an emulated cluster of this machine.

    python scripts/bench_pipeline.py                 orchestration alone: hosts wait for planned durations (simulated)
    python scripts/bench_pipeline.py --four_steps    the same with videos of four unguided steps
    python scripts/bench_pipeline.py --real          the small model, computed (emulated)
    python scripts/bench_pipeline.py --soak 1000     many small requests: does memory grow?

The first compares the layout with the same chips as whole-pipeline replicas. Durations are divided by --speed, but the
cost of the orchestration isn't: it is measured in real seconds, and also stated for speed 1.
"""

import argparse
import asyncio
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from simulation import measure, soak
from simulation.memory import draw as draw_memory
from simulation.memory import growth, store_mib
from simulation.simulated import MODEL, SIMULATED_HOST, Planned, simulated_video

from actors.observe.status_actor import StatusActor
from actors.observe.timeline import NOTES
from actors.observe.timeline_picture import draw
from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy, shut_down
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.connect import connect, leave
from cluster.emulation.cluster import EmulatedCluster, Settings, list_emulated_slices
from cluster.layout import Layout, Mesh, Pool, Replicas
from wan_tpu import GenerationRequest
from wan_tpu.families import open_spec
from wan_tpu.families.wan.sampling import SIGMAS

# A step without guidance on v6e-8, encoder and decoder on v6e-4: docs/few-steps.md.
FOUR_STEPS = Planned(text_s=0.01, image_s=0.54, step_s=1.393, decode_s=0.68)
IMAGE = Path(__file__).parent.parent / "examples" / "cat.png"


def main() -> None:
    """Run one of the three measurements and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", help="file or shipped name (a14b-balanced-v6e; with --real emulated-demo)")
    parser.add_argument("--speed", type=float, default=10, help="planned durations are divided by it")
    parser.add_argument("--requests", type=int, help="how many (48; with --real 8)")
    parser.add_argument("--in_flight", type=int, default=16)
    parser.add_argument("--four_steps", action="store_true", help="videos of 7 s (layout a14b-four-steps-v6e)")
    parser.add_argument("--real", action="store_true", help="the small model instead of waiting")
    parser.add_argument("--only", choices=["pools", "whole"], help="one of the two layouts that are compared")
    parser.add_argument("--soak", type=int, metavar="N", help="so many small requests; is memory left behind?")
    parser.add_argument("--picture", type=Path, help="PNG of the timeline, or of the memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (run_soak if args.soak else real if args.real else run_simulated)(args, Path(folder))


def run_simulated(args: argparse.Namespace, folder: Path) -> None:
    """Measure a layout, and the same chips as whole-pipeline replicas, with hosts that only wait."""
    planned = dataclasses.replace(FOUR_STEPS if args.four_steps else Planned(), speed=args.speed)
    plan = planned.save(folder / "plan.json")
    usual = "a14b-four-steps-v6e" if args.four_steps else "a14b-balanced-v6e"
    layout = emulate(Layout.load(args.layout or usual))
    settings = PipelineSettings(
        str(plan),
        str(folder / "snapshots"),
        chips="simulated",
        host_class=SIMULATED_HOST,
        snapshot_every=max(1, round(5 * args.speed)),  # as often in real time as at speed 1
    )
    count = args.requests or 48
    # The settings of the preset lightning, whose adapters a simulated host can't read.
    four_steps = {"sigmas": SIGMAS, "switch_step": 2, "solver": "euler", "guidance_scale": 1.0}
    sampling: dict[str, Any] = four_steps if args.four_steps else {}
    requests = {
        f"r{i}": GenerationRequest(prompt=f"prompt {i}", image=IMAGE, height=720, width=1280, seed=i, **sampling)
        for i in range(count)
    }
    sample_request = MODEL.plan(requests["r0"], image=True).request
    planned_s = {stage: planned.seconds(stage, sample_request) for stage in MODEL.stages}
    workload = f"Wan 2.2 A14B, 1280x720, 81 frames, {sample_request.steps} steps on v6e-8"
    print(f"{NOTES['simulated']}: {workload}, divided by {args.speed:g}")
    print(f"{count} requests, {args.in_flight} in flight; load of this machine before: {os.getloadavg()[0]:.1f}")
    rates: dict[str, float] = {}
    with cluster(layout, folder):
        for name, variant in {"pools": layout, "whole": unite_pools(layout)}.items():
            if args.only not in (None, name):
                continue
            load, videos = run(PipelineSpec(variant, settings, MODEL, lasting=True), requests, args.in_flight)
            for key, request in requests.items():
                assert videos[key].endswith(simulated_video(request)), f"{key} has another's video"
            rates[name] = report(name, variant, load, planned_s, args.speed)
            if args.picture and name == (args.only or "pools"):
                args.picture.write_bytes(draw(load.spans, f"Simulated: {variant.source}, {count} requests"))
    if len(rates) == 2:
        other, best = sorted(rates, key=lambda name: rates[name])
        print(f"\n{best} wins by {rates[best] / rates[other] - 1:.1%} a chip (simulated)")


def run(
    spec: PipelineSpec, requests: dict[str, GenerationRequest], in_flight: int
) -> tuple[measure.Load, dict[str, bytes]]:
    """Start the pools, make all videos, stop the pools."""
    deploy(spec)
    store_mibs: list[float] = []

    async def all_of_them() -> tuple[measure.Load, dict[str, bytes]]:
        look = asyncio.create_task(looking())
        try:
            return await measure.run(PipelineDriver(spec), requests, in_flight)
        finally:
            look.cancel()

    async def looking() -> None:
        while True:
            await asyncio.sleep(0.5)
            store_mibs.append(await asyncio.to_thread(store_mib))

    try:
        results = asyncio.run(all_of_them())
        handoffs(spec.settings.name)
        print(f"  object stores held {statistics.mean(store_mibs):.0f} MiB in the mean, {max(store_mibs):.0f} at most")
        return results
    finally:
        shut_down(spec.settings.name)
        deadline = time.monotonic() + 60
        while ray.available_resources().get("TPU", 0) < ray.cluster_resources()["TPU"]:
            assert time.monotonic() < deadline, "slices were not given back"
            time.sleep(0.2)


def report(name: str, layout: Layout, load: measure.Load, planned_s: dict[str, float] | None, speed: float) -> float:
    """Print the figures of a run; return the videos an hour that a chip would make at speed 1."""
    pools = measure.pool_figures(layout, load, planned_s)
    slowest = max(pools, key=lambda pool: pool.bound_s)
    start, end = load.full
    slices = ", ".join(f"{pool.name} {pool.replicas.minimum} x {pool.slice}" for pool in layout.pools)
    print(f"\n{name}: {slices}")
    print(f"  full for {end - start:.1f} s; {measure.videos_per_hour(load) / speed:.1f} videos an hour at speed 1")
    print(
        f"  {'pool':<8}{'s a video':>10}{'bound s':>9}{'busy':>7}{'share':>7}{'step s':>8}{'gap ms':>8}{'next ms':>9}"
    )
    for pool in pools:
        between = measure.between_requests(load, pool.name)
        wait = f"{1000 * statistics.median(between):10.1f}" if between else ""
        print(
            f"  {pool.name:<8}{pool.video_s:10.2f}{pool.bound_s:10.3f}{pool.busy:10.1%}{pool.share:10.1%}"
            f"{pool.step_s:10.3f}{1000 * pool.gap_s:10.1f}{wait}"
        )
    lost = slowest.video_s * (1 / slowest.share - 1)
    at_one = slowest.video_s * speed / (slowest.video_s * speed + lost)
    print(f"  {slowest.name} is the slowest: {slowest.share:.1%} of its bound here, {lost:.3f} s lost a video;")
    print(f"  the same loss at speed 1 would be {at_one:.2%} of the bound")
    rate = 3600 / (slowest.bound_s * speed) * at_one
    chips = sum(pool.slice.chips * pool.replicas.minimum for pool in layout.pools)
    print(f"  {rate:.1f} videos an hour at speed 1 on {chips} chips, {rate / chips:.3f} a chip")
    return rate / chips


def handoffs(pipeline: str) -> None:
    """Print what the hand-offs to each stage took, from object store to devices."""
    status = StatusActor.find(pipeline)
    assert status is not None
    for stage, seen in status.read().handoffs.items():
        seconds = sorted(took for took, _ in seen)
        print(
            f"  hand-off to {stage}: {statistics.mean(nbytes for _, nbytes in seen) / 1e6:.1f} MB, median "
            f"{1000 * statistics.median(seconds):.1f} ms, best {1000 * seconds[0]:.1f}, worst {1000 * seconds[-1]:.1f}"
        )


def emulate(layout: Layout) -> Layout:
    """Return a layout with its hosts as processes of this machine, one CPU device each."""
    pools = tuple(dataclasses.replace(pool, mesh=Mesh()) for pool in layout.pools)
    return dataclasses.replace(layout, pools=pools, devices_per_host=1)


def unite_pools(layout: Layout) -> Layout:
    """Return the expert slices of a layout as replicas of the whole pipeline.

    The encoder's and decoder's own slices are too small for that, and are left out.
    """
    experts = [pool for pool in layout.pools if any(stage.startswith("denoise") for stage in pool.stages)]
    count = sum(pool.replicas.minimum for pool in experts)
    return dataclasses.replace(
        layout,
        pools=(Pool("whole", MODEL.stages, experts[0].slice, Replicas(count, count)),),
        source="whole pipelines",
    )


@contextmanager
def cluster(layout: Layout, folder: Path) -> Iterator[Path]:
    """Run an emulated cluster for a layout and join it; yield its temporary folder."""
    with EmulatedCluster.start(list_emulated_slices(layout), Settings(host_store_mib=512), folder=folder) as running:
        connect(running.address)
        try:
            yield running.temp
        finally:
            leave()


def real(args: argparse.Namespace, folder: Path) -> None:
    """Measure the small model, computed on CPU devices."""
    from wan_tpu.tiny import make_checkpoint

    layout = Layout.load(args.layout or "emulated-demo")
    checkpoint = make_checkpoint(folder / "model", "wan2.2-i2v-a14b")
    small = GenerationRequest(image=IMAGE, height=64, width=64, frames=9, steps=6)
    settings = PipelineSettings(
        str(checkpoint),
        str(folder / "snapshots"),
        dtype="float32",
        warm_up=(small,),
    )
    spec = PipelineSpec(layout, settings, open_spec(checkpoint), lasting=True)
    count, in_flight = args.requests or 12, min(args.in_flight, 4)
    requests = {f"r{i}": dataclasses.replace(small, prompt=f"{i}", seed=i) for i in range(count)}
    print(f"{NOTES['emulated']}; slices share {os.cpu_count()} cores")
    print(f"{count} requests, {in_flight} in flight; load of this machine before: {os.getloadavg()[0]:.1f}")
    with cluster(layout, folder):
        load, videos = run(spec, requests, in_flight)
    assert all(video[4:8] == b"ftyp" for video in videos.values())
    report("pools", layout, load, None, 1)
    if args.picture:
        args.picture.write_bytes(draw(load.spans, f"Emulated: {layout.source}, {count} requests"))


def run_soak(args: argparse.Namespace, folder: Path) -> None:
    """Make many small simulated videos and print what memory was left behind."""
    spec = soak.soak_spec(folder)
    print(f"{NOTES['simulated']}; {args.soak} requests, 16 in flight")
    start = time.monotonic()
    with cluster(soak.LAYOUT, folder) as temp:
        deploy(spec)
        samples = asyncio.run(
            soak.soak(spec, args.soak, temp=temp, image=IMAGE, tell=lambda sample: print(sample, flush=True))
        )
        shut_down(spec.settings.name)
    warm = args.soak // 4
    roles = samples[-1].private_mib | {"object store": samples[-1].store_mib}
    print(
        f"{time.monotonic() - start:.0f} s; MiB at the end, and what the second half of the samples, the first {warm}"
    )
    print("requests left out, has more than the first (medians):")
    for role, grown in growth(samples, warm).items():
        print(f"  {role:<18}{roles[role]:8.1f}{grown:+8.2f}")
    if args.picture:
        args.picture.write_bytes(draw_memory(samples, f"Simulated: {args.soak} small requests, memory between rounds"))


if __name__ == "__main__":
    main()
