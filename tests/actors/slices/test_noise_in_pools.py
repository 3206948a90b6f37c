"""LTX-2.5 with the diffusion decoder on two pools: its noise is drawn while the video is denoised; same videos."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import torch

from actors.pipeline.driver import PipelineDriver
from actors.slices.payloads import pack
from actors.slices.prepared import MAX_NOISES, Decoding
from actors.slices.stage_host import StageHost
from tests.actors.on_slices.running import in_one_process
from tests.waiting import SECONDS
from wan_tpu import DenoiseState, GenerationRequest
from wan_tpu.families.ltx2 import model
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.plan import DECODER

POOLS = """
  decoder: {stages: [encoder, decoder], slice: v6e-1}
  denoise: {stages: [denoise, refine], slice: v6e-1}
"""
# So many steps that the decoder's slice is met before the last one.
SIGMAS = tuple(np.linspace(1, 0.02, 300).round(4).tolist())
REQUEST = GenerationRequest(
    prompt="A cat purrs", height=96, width=160, frames=9, seed=3, sigmas=SIGMAS, generate_audio=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("ltx2") / "checkpoint", "ltx-2.5-distilled")
    (folder / "wan_tpu.json").write_text(json.dumps({"decoder": "diffusion"}))
    return folder


@pytest.fixture(scope="module")
def spec(deployed, folder):
    """A pipeline that runs."""
    with deployed(folder, POOLS, name="decoder-noise", warm_up=(REQUEST,)) as spec:
        yield spec


async def wait_for_keys(driver, is_right):
    """Wait until the decoder's hosts hold the right requests."""
    async with asyncio.timeout(SECONDS):
        while not is_right(await driver._connection._handles["decoder"].list_host_keys.remote()):
            await asyncio.sleep(0.02)


@pytest.mark.thorough
def test_noise_is_held_before_the_latents_are_there_and_videos_are_those_of_one_process(spec, folder, tmp_path):
    requests = [dataclasses.replace(REQUEST, seed=seed) for seed in range(3)]
    expected = in_one_process(folder, requests[0], 1, tmp_path, *requests[1:])
    steps = []

    async def make():
        driver = PipelineDriver(spec)
        try:
            first = asyncio.create_task(
                driver.generate(
                    spec.model.plan(requests[0]),
                    id="0",
                    on_event=lambda span: steps.append(span.step) if span.step else None,
                )
            )
            await wait_for_keys(driver, lambda keys: any(key.startswith("0 ") for key in keys))
            assert max(steps) < len(SIGMAS)
            others = [driver.generate(spec.model.plan(request), id=str(i)) for i, request in enumerate(requests[1:], 1)]
            videos = await asyncio.wait_for(asyncio.gather(first, *others), SECONDS)
            await wait_for_keys(driver, lambda keys: not keys)
            return videos
        finally:
            driver.close()

    videos = asyncio.run(make())
    alone = expected()
    names = ("mp4_alone", "mp4_alone_1", "mp4_alone_2")
    assert [video.mp4 for video in videos] == [alone[name].tobytes() for name in names]
    assert len({video.mp4 for video in videos}) == 3


def test_noise_of_so_many_requests_is_held_and_others_is_drawn_with_the_latents(folder, monkeypatch):
    """Without weights: inputs need none."""
    host = StageHost(str(folder), (DECODER,), (1, 1, 1), "float32")
    drawn, draw = [], model.draw_normal

    def note(shape, generator, dtype):
        drawn.append(generator.initial_seed())
        return draw(shape, generator, dtype)

    monkeypatch.setattr(model, "draw_normal", note)
    requests = [host._spec.plan(dataclasses.replace(REQUEST, seed=seed)).request for seed in range(MAX_NOISES + 1)]
    for request in requests:
        host.draw_ahead(f"video {request.seed}", request)
    held = [f"video {seed}" for seed in range(MAX_NOISES)]
    assert host.list_keys() == held
    host.drop(held[0])
    assert host.list_keys() == held[1:]
    shape = host._spec.latent_shape(requests[0])
    latents = pack(DenoiseState(np.zeros(shape, np.float32), step=len(SIGMAS)))
    noises = []
    for request in requests:
        host.prepare_decode(f"video {request.seed}", request, latents)
        [(_, noise)] = host._prepared.take(f"video {request.seed}", Decoding).frames
        noises.append(np.asarray(noise))
    # The first was dropped, and the last had no room.
    assert sorted(drawn) == sorted([*range(MAX_NOISES), 0, MAX_NOISES])
    for request, noise in zip(requests, noises, strict=True):
        expected = host._runtime.model.draw_decoder_noise(request, torch.float32)
        assert np.array_equal(noise, expected.numpy())
    assert host.list_keys() == []
