"""A video that is denoised chunk after chunk, whose sizes are those of two pools: as in one process."""

import numpy as np
import pytest

from actors.slices.payloads import pack, unpack
from actors.slices.prepared import OutOfOrder
from actors.slices.stage_host import StageHost
from tests.wan_tpu import chunked_toy
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.data import DenoiseState
from wan_tpu.families import FAMILIES
from wan_tpu.media import fragments
from wan_tpu.media.mp4 import Mp4
from wan_tpu.plan import PromptText
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
    results = list(pipe.make_executor(plan).work())
    states = [result.state for operation, result in results if isinstance(operation, Step)]
    planes = [np.asarray(result[1]) for operation, result in results if isinstance(operation, Decode)]

    pools = [("encoder", "rough"), ("fine", "decoder")]
    hosts = [StageHost(str(folder), stages, (1, 1, 1), "float32") for stages in pools]
    for host in hosts:
        host.warm_up(REQUEST)
    text, state, step = hosts[0].encode_text(PromptText(REQUEST.prompt)).payload, None, 0
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
        stored = unpack(state)
        if step < plan.steps:
            assert np.array_equal(stored.latents, states[step - 1].latents)
            assert len(stored.chunks) == expert.chunk
    assert np.array_equal(stored.latents, np.concatenate([states[stop - 1].latents for stop in (4, 8, 12)], axis=2))
    assert not stored.chunks and not stored.history
    hosts[1].prepare_decode("a", plan.request, state)
    video = unpack(hosts[1].decode("a").payload)
    with Mp4(plan.request.fps) as expected:
        for frames in planes:
            expected.add(frames)
        expected.finish()
    assert video.mp4.tobytes() == expected.content
    assert [host.list_keys() for host in hosts] == [[], []]


def test_chunks_are_decoded_one_by_one_as_all_of_them_are_together(folder, monkeypatch):
    monkeypatch.setattr(fragments, "FRAGMENT_FRAMES", 4)
    host = StageHost(str(folder), ("encoder", "rough", "fine", "decoder"), (1, 1, 1), "float32")
    plan = load_pipeline(folder, dtype="float32", mesh=(1, 1, 1)).plan(REQUEST)
    text = host.encode_text(PromptText(REQUEST.prompt)).payload
    host.prepare_denoise("a", plan, text)
    chunks = []
    for expert in plan.experts:
        host.begin("a")
        for _ in range(expert.start, expert.stop):
            _, done = host.step("a")
        chunk = expert.chunk
        if done in plan.chunk_stops:
            copied = host.copy_chunk("a", chunk)
            assert copied.value == done
            # The next chunk is denoised while this one is decoded, and one that is denoised can be copied again.
            host.prepare_decode("video", plan.request, copied.payload, True, chunk)
            decoded = host.decode("video")
            assert (decoded.payload is None) == (done < plan.steps)
            chunks.append(unpack(copied.payload).latents)
            assert np.array_equal(unpack(host.copy_chunk("a", 0).payload).latents, chunks[0])
            if done < plan.steps:
                with pytest.raises(OutOfOrder, match=r"chunk 2\b.*\b12\b"):
                    host.copy_chunk("a", 2)
    streamed = take_all(host, "video")
    host.prepare_decode("whole", plan.request, host.collect("a").payload, True)
    whole = host.decode("whole")
    assert unpack(decoded.payload).mp4.tobytes() == unpack(whole.payload).mp4.tobytes()
    assert len(streamed) > 1
    assert streamed == take_all(host, "whole")
    assert host.list_keys() == []


def test_video_that_is_dropped_between_two_chunks_leaves_nothing(folder):
    host = StageHost(str(folder), ("decoder",), (1, 1, 1), "float32")
    plan = host._spec.plan(REQUEST)
    latents = np.random.default_rng(0).normal(size=host._spec.latent_shape(plan.request)).astype(np.float32)
    first, second = (pack(DenoiseState(latents, step=stop)) for stop in plan.chunk_stops[:2])
    with pytest.raises(OutOfOrder, match=r"\b8\b"):
        host.prepare_decode("a", plan.request, second, True, 0)
    host.prepare_decode("a", plan.request, first, True, 0)
    host.decode("a")
    assert host.list_keys() == ["a"]
    host.prepare_decode("a", plan.request, first, True, 0)
    with pytest.raises(OutOfOrder, match=r"\b1\b.* chunk 0\b"):
        host.decode("a")
    host.drop("a")
    assert host.list_keys() == []
    host.prepare_decode("a", plan.request, first, False, 0)
    host.decode("a")
    host.drop("a")
    assert host.list_keys() == []


def take_all(host, key):
    """Return all fragments of a video."""
    fragments, may_follow = [], True
    while may_follow:
        some, may_follow = host.take_fragments(key)
        fragments += some
    return fragments
