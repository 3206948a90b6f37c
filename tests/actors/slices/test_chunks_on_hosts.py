"""A video that is denoised chunk after chunk, whose sizes are those of two pools: as in one process."""

import numpy as np
import pytest

from actors.slices.payloads import unpack
from actors.slices.stage_host import StageHost
from tests.wan_tpu import chunked_toy
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.families import FAMILIES
from wan_tpu.media.mp4 import Mp4
from wan_tpu.stage_machine import Decode, Step
from wan_tpu.tiny import make_checkpoint

REQUEST = GenerationRequest(prompt="A red ball rolls.", seed=3)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setitem(FAMILIES, chunked_toy.FAMILY.transformer, chunked_toy.FAMILY)
    return make_checkpoint(tmp_path / "toy", "toy-in-chunks")


def test_pools_hand_chunks_to_each_other_and_resume_them_bit_for_bit(folder):
    pipe = load_pipeline(folder, dtype="float32", mesh=(1, 1, 1))
    plan = pipe.plan(REQUEST)
    results = list(pipe.run(plan).work())
    states = [result.state for operation, result in results if isinstance(operation, Step)]
    planes = [np.asarray(result[1]) for operation, result in results if isinstance(operation, Decode)]

    pools = [("encoder", "rough"), ("fine", "decoder")]
    hosts = [StageHost(str(folder), stages, (1, 1, 1), "float32") for stages in pools]
    for host in hosts:
        host.warm_up(REQUEST)
    text, state, step = hosts[0].encode_text(REQUEST.prompt).payload, None, 0
    while step < plan.steps:
        expert = plan.expert_at(step)
        host = next(host for host, stages in zip(hosts, pools, strict=True) if expert.stage in stages)
        host.prepare_denoise("a", plan, text, None, None, state)
        host.begin("a")
        host.step("a")
        # Another slice goes on from a snapshot within each expert's steps.
        snapshot = host.snapshot("a")
        host.drop("a")
        host.prepare_denoise("b", plan, text, None, None, snapshot.payload)
        host.begin("b")
        host.step("b")
        step, state = (output := host.collect("b")).value, output.payload
        assert step == expert.stop
        kept = unpack(state)
        if step < plan.steps:
            assert np.array_equal(kept.latents, states[step - 1].latents)
            assert len(kept.chunks) == expert.chunk
    assert np.array_equal(kept.latents, np.concatenate([states[stop - 1].latents for stop in (4, 8, 12)], axis=2))
    assert not kept.chunks and not kept.history
    hosts[1].prepare_decode("a", plan.request, state)
    video = unpack(hosts[1].decode("a").payload)
    with Mp4(plan.request.fps) as expected:
        for frames in planes:
            expected.add(frames)
        expected.finish()
    assert video.mp4.tobytes() == expected.content
    assert [host.list_keys() for host in hosts] == [[], []]
