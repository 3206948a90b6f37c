"""Send many small requests through the real pools, with simulated hosts, to see whether anything grows."""

import asyncio
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

from actors.pipeline.driver import PipelineDriver
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.layout import Layout
from wan_tpu.request import GenerationRequest

from . import measure
from .memory import Sample, sample, store_mib
from .simulated import MODEL, SIMULATED_HOST, Planned, simulated_video

IN_FLIGHT = 16  # Requests at a time.
SETTLE_S = 20.0  # until what is freed is seen as free: Ray tells it late on a busy machine

# The experts apart, so that a state goes from slice to slice.
LAYOUT = Layout.parse(
    """
emulate: {devices_per_host: 1}
pools:
  encoder-decoder: {stages: [encoder, decoder], slice: v6e-1}
  high: {stages: [denoise_high], slice: v6e-1}
  low: {stages: [denoise_low], slice: v6e-1}
""",
    "the soak's layout",
)


def soak_spec(folder: Path, step_s: float = 0.0, layout: Layout = LAYOUT) -> PipelineSpec:
    """Return the pipeline of a soak, whose hosts hardly wait: payloads are small, but too large for Ray to inline."""
    plan = Planned(0.0, 0.0, step_s, 0.0, text=(1, 512, 256), mp4_bytes=200_000).save(folder / "plan.json")
    settings = PipelineSettings(
        str(plan), str(folder / "snapshots"), chips="simulated", host_class=SIMULATED_HOST, snapshot_every=3
    )
    return PipelineSpec(layout, settings, MODEL, lasting=True)


def request(i: int, image: Path | None) -> GenerationRequest:
    """Return the i-th request of a soak: 4 steps, latents of 0.3 MB."""
    return GenerationRequest(prompt=f"{i}", image=image, height=256, width=256, frames=17, steps=4, seed=i, shift=5.0)


async def soak(
    spec: PipelineSpec,
    requests: int,
    *,
    temp: Path,
    image: Path | None,
    a_round: int = 50,
    tell: Callable[[Sample], None] = lambda sample: None,
) -> list[Sample]:
    """Make simulated videos, check each, and sample the memory after every round, when nothing is under way.

    Args:
        spec: The pipeline.
        requests: How many videos to make.
        temp: The temporary folder of the emulated cluster, by which its processes are found.
        image: The image of every request, or None.
        a_round: Videos in a round.
        tell: Called with each sample.

    Returns:
        The sample after each round.
    """
    pipeline, samples = PipelineDriver(spec), []
    for first in range(0, requests, a_round):
        batch = {f"s{i}": request(i, image) for i in range(first, min(first + a_round, requests))}
        _, videos = await measure.run(pipeline, batch, IN_FLIGHT)
        for key, sent in batch.items():
            if not videos[key].endswith(simulated_video(sent)):
                raise AssertionError(f"{key} has another request's video")
        left = await _wait_until_settled()
        samples.append(dataclasses.replace(sample(temp, first + len(batch)), store_mib=left))
        tell(samples[-1])
    return samples


async def _wait_until_settled() -> float:
    """Return what the object stores hold, once it doesn't get less, MiB."""
    seen: list[float] = []
    for _ in range(int(SETTLE_S / 0.25)):
        await asyncio.sleep(0.25)
        seen.append(await asyncio.to_thread(store_mib))
        if seen[-1] < 0.1 or (len(seen) > 20 and seen[-1] >= statistics.median(seen[-20:])):
            break
    return max(0.0, seen[-1])
