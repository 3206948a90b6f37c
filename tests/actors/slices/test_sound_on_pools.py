"""LTX-2 on three pools: its text encoder has one of its own. With sound, in two stages."""

import asyncio

import pytest

from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy, shut_down
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.connect import connect, leave
from cluster.layout import Layout
from tests.actors.on_slices.running import in_one_process
from tests.waiting import SECONDS
from wan_tpu import GenerationRequest
from wan_tpu.families import open_spec

LAYOUT = """
emulate: {devices_per_host: 1}
pools:
  text: {stages: [encoder], slice: v6e-1}
  transformer: {stages: [denoise, refine], slice: v6e-1}
  decoder: {stages: [decoder], slice: v6e-1}
"""
KIND = "ltx-2.3-distilled"
REQUEST = GenerationRequest(prompt="A cat purrs", height=64, width=64, frames=9)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def spec(three_slices, checkpoint, tmp_path_factory):
    """A pipeline that runs."""
    folder = str(checkpoint(KIND))
    snapshots = str(tmp_path_factory.mktemp("snapshots"))
    settings = PipelineSettings(folder, snapshots, dtype="float32", name=KIND, warm_up=(REQUEST,))
    spec = PipelineSpec(Layout.parse(LAYOUT, "the test's layout"), settings, open_spec(folder), lasting=True)
    connect(three_slices.address)
    deploy(spec)
    yield spec
    shut_down(settings.name)
    leave()


def test_video_with_sound_is_that_of_one_process(spec, tmp_path):
    expected = in_one_process(spec.settings.checkpoint, REQUEST, 1, tmp_path)
    spans = []

    async def generate():
        driver = PipelineDriver(spec)
        try:
            plan = spec.model.plan(REQUEST)
            return await asyncio.wait_for(driver.generate(plan, id="request", on_event=spans.append), SECONDS)
        finally:
            driver.close()

    video = asyncio.run(generate())
    assert video.mp4 == expected()["mp4_alone"].tobytes()
    assert [span for span in spans if span.kind == "compile"] == []  # All programs were, before the first request.
    steps = [(span.stage, span.step) for span in spans if span.step]
    assert steps == [*(("denoise", i) for i in range(1, 9)), *(("refine", i) for i in range(9, 12))]
