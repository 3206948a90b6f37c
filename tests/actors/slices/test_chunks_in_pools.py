"""A video of Helios on two pools: chunks are decoded and streamed before the last one is denoised, to the same file."""

import asyncio
import dataclasses
import time

import numpy as np
import pytest

from actors.pipeline.driver import PipelineDriver
from tests.actors.on_slices.running import in_one_process
from tests.waiting import SECONDS
from wan_tpu import GenerationRequest, Video
from wan_tpu.media.fragments import FRAGMENT_FRAMES

POOLS = """
  encoder-decoder: {stages: [encoder, decoder], slice: v6e-1}
  denoise: {stages: [denoise], slice: v6e-1}
"""
KIND = "helios-distilled"
CHUNKS = 5  # The first is decoded while four more are denoised, which leaves a busy machine time for it.
REQUEST = GenerationRequest(prompt="a cat", seed=3, height=64, width=64, frames=33 * CHUNKS, steps=60)

pytestmark = pytest.mark.thorough


@pytest.fixture
def spec(deployed, checkpoint):
    """A pipeline that runs."""
    with deployed(checkpoint(KIND), POOLS, name=KIND, snapshot_every=2) as spec:
        yield spec


def test_chunks_are_streamed_while_others_are_denoised(spec, tmp_path):
    plan = spec.model.plan(REQUEST)
    assert len(plan.chunk_stops) == CHUNKS
    expected = in_one_process(spec.settings.checkpoint, REQUEST, 1, tmp_path)
    runs = []

    async def make_both():
        driver = PipelineDriver(spec)
        try:
            for i in range(2):  # The second one waits for no compiler.
                spans, fragments = [], []
                making = driver.generate(
                    plan,
                    id=f"request{i}",
                    on_event=spans.append,
                    on_fragment=lambda fragment, to=fragments: to.append((time.time(), fragment)),
                )
                runs.append((await asyncio.wait_for(making, SECONDS), spans, fragments))
        finally:
            driver.close()

    asyncio.run(make_both())
    for video, spans, fragments in runs:
        assert video.mp4 == expected()["mp4_alone"].tobytes()
        assert [span.step for span in spans if span.step] == list(range(1, plan.steps + 1))
        assert len([span for span in spans if (span.stage, span.kind) == ("decoder", "compute")]) == CHUNKS
        assert [fragment.index for _, fragment in fragments] == list(range(-(-REQUEST.frames // FRAGMENT_FRAMES)))
    _, spans, fragments = runs[1]
    [denoised_s] = [span.end_s for span in spans if span.step == plan.steps]
    decoded_s = min(span.end_s for span in spans if (span.stage, span.kind) == ("decoder", "compute"))
    assert max(decoded_s, fragments[0][0]) < denoised_s
    streams = [[fragment.content for _, fragment in fragments] for _, _, fragments in runs]
    assert streams[0] == streams[1]


def test_a_video_is_continued_on_pools(spec, tmp_path):
    """The encoder's slice draws from the request's generator before the denoiser's does."""
    pixels = np.random.default_rng(1).random((40, 64, 64, 3), np.float32)
    source = Video(pixels, 24.0).save(tmp_path / "source.mp4")
    request = dataclasses.replace(REQUEST, video=source, steps=6, frames=66)
    expected = in_one_process(spec.settings.checkpoint, request, 1, tmp_path)

    async def make():
        driver = PipelineDriver(spec)
        try:
            making = driver.generate(spec.model.plan(request), id="request", on_event=lambda span: None)
            return await asyncio.wait_for(making, SECONDS)
        finally:
            driver.close()

    assert asyncio.run(make()).mp4 == expected()["mp4_alone"].tobytes()
