"""A model with one expert on two pools, the encoder's and its own: the video of one process.

Of the models with one expert this has the most beside it: three encoders. LTX-2 on pools: test_sound_on_pools.py;
CogVideoX, in a service: tests/actors/test_other_families.py; two experts: tests/actors/on_slices.
"""

import asyncio
import dataclasses

import pytest

from actors.pipeline.driver import PipelineDriver
from tests.actors.on_slices.running import in_one_process
from tests.conftest import PHOTO
from tests.waiting import SECONDS
from wan_tpu import GenerationRequest

POOLS = """
  encoder-decoder: {stages: [encoder, decoder], slice: v6e-1}
  experts: {stages: [denoise], slice: v6e-1}
"""
KIND = "hunyuanvideo1.5-480p-i2v"
REQUEST = GenerationRequest(prompt='A cat holds "hello"', image=PHOTO, height=64, width=64, frames=9, steps=6)
CROPPED = "image is 451x300 but the video is 64x64; it is cropped to the video's aspect ratio"

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def spec(deployed, checkpoint):
    """A pipeline that runs."""
    with deployed(checkpoint(KIND), POOLS, name=KIND) as spec:
        yield spec


def run(spec, *requests):
    """Generate them at once; return the videos and what was told of each."""
    spans = [[] for _ in requests]

    async def all_of_them():
        driver = PipelineDriver(spec)
        making = [
            driver.generate(spec.model.plan(request), id=f"request{i}", on_event=spans[i].append)
            for i, request in enumerate(requests)
        ]
        try:
            return await asyncio.wait_for(asyncio.gather(*making), SECONDS)
        finally:
            driver.close()

    return asyncio.run(all_of_them()), spans


def test_the_video_is_that_of_one_process(spec, tmp_path):
    expected = in_one_process(spec.settings.checkpoint, REQUEST, 1, tmp_path)
    [video], [spans] = run(spec, REQUEST)
    assert video.mp4 == expected()["mp4_alone"].tobytes()
    assert video.warnings == (CROPPED,)
    assert [span.step for span in spans if span.step] == [1, 2, 3, 4, 5, 6]
    assert {span.stage for span in spans if span.step} == {"denoise"}


def test_a_video_says_when_its_prompt_was_cut(spec):
    request = dataclasses.replace(REQUEST, steps=2)
    [long, short], _ = run(spec, dataclasses.replace(request, prompt="a cat " * 600), request)
    assert short.warnings == (CROPPED,)
    [cropped, cut] = long.warnings
    assert cropped == CROPPED
    assert "the model reads" in cut


def test_a_request_is_told_that_it_waited_for_the_compiler(spec):
    request = dataclasses.replace(REQUEST, width=96, steps=2)  # a size that nobody has asked for yet
    _, [first] = run(spec, request)
    _, [again] = run(spec, request)
    compiled = [span for span in first if span.kind == "compile"]
    assert ("encoder-decoder", "decoder") in {(span.pool, span.stage) for span in compiled}
    assert {span.pool for span in compiled} == {"encoder-decoder", "experts"}
    assert all(0 < span.seconds < SECONDS for span in compiled)
    assert not [span for span in again if span.kind == "compile"]
