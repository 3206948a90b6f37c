"""Many small requests through the real pools, hosts simulated: does anything grow?"""

import asyncio
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

from actors import measure
from actors.embedding_cache import EmbeddingCache
from actors.memory import MIB, Sample, sample, store_mib
from actors.pipeline import Pipeline
from actors.settings import PipelineSettings
from actors.simulated import SIMULATED_HOST, Planned, simulated_video
from cluster.layout import Layout
from wan_tpu.expert import STAGES
from wan_tpu.request import GenerationRequest

PROMPTS = 20  # different ones: then the cache of embeddings is full early
SETTLE_S = 20.0  # until what is freed is seen as free: Ray tells it late on a busy machine

# The experts apart, so that a state goes from slice to slice.
LAYOUT = Layout.parse(
    """
emulate: {devices_per_host: 1}
pools:
  ends: {stages: [encoder, decoder], slice: v6e-1}
  high: {stages: [denoise_high], slice: v6e-1}
  low: {stages: [denoise_low], slice: v6e-1}
""",
    "the soak's layout",
    STAGES,
)


def settings(folder: Path, step_s: float = 0.0) -> PipelineSettings:
    """Return the settings of a soak, whose hosts hardly wait: payloads are small, but too large for Ray to inline."""
    plan = Planned(0.0, 0.0, step_s, 0.0, text=(1, 512, 256), mp4_bytes=200_000).save(folder / "plan.json")
    return PipelineSettings(
        str(plan), str(folder / "snapshots"), chips="simulated", host=SIMULATED_HOST, snapshot_every=3
    )


def request(i: int, image: Path | None) -> GenerationRequest:
    """Return the i-th request of a soak: 4 steps, latents of 0.3 MB."""
    return GenerationRequest(prompt=f"{i % PROMPTS}", image=image, height=256, width=256, frames=17, steps=4, seed=i)


async def soak(
    layout: Layout,
    given: PipelineSettings,
    requests: int,
    *,
    temp: Path,
    image: Path | None,
    a_round: int = 50,
    told: Callable[[Sample], None] = lambda sample: None,
) -> list[Sample]:
    """Make that many simulated videos, check each, and look at the memory after every round, nothing being under way.

    temp  temporary folder of the emulated cluster, by which its processes are found
    """
    pipeline, samples = Pipeline(layout, given), []
    cache = EmbeddingCache.connect(f"{given.name}-embeddings")
    for first in range(0, requests, a_round):
        wanted = {f"s{i}": request(i, image) for i in range(first, min(first + a_round, requests))}
        _, videos = await measure.run(pipeline, wanted)
        for key, one in wanted.items():
            if not videos[key].startswith(simulated_video(one)):
                raise AssertionError(f"{key} has another request's video")
        kept = (await cache.stats()).used_bytes / MIB
        left = await _settled(kept)
        samples.append(dataclasses.replace(sample(temp, first + len(wanted)), store_mib=left))
        told(samples[-1])
    return samples


async def _settled(kept_mib: float) -> float:
    """Return what the object stores hold beside the embeddings kept on purpose, once it doesn't get less, MiB."""
    seen: list[float] = []
    for _ in range(int(SETTLE_S / 0.25)):
        await asyncio.sleep(0.25)
        seen.append(await asyncio.to_thread(store_mib) - kept_mib)
        if seen[-1] < 0.1 or (len(seen) > 20 and seen[-1] >= statistics.median(seen[-20:])):
            break
    return max(0.0, seen[-1])
