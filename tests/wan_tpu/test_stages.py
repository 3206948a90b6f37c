"""A stage in pieces gives what it gives in one."""

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.conftest import PHOTO
from wan_tpu import GenerationRequest, load_pipeline, stages
from wan_tpu.aot.programs import AbstractRuntime
from wan_tpu.data import Conditioning, DenoiseState
from wan_tpu.families import list_published
from wan_tpu.families.model import published_model
from wan_tpu.families.shared.normal import draw_normal
from wan_tpu.families.wan.published import TEXT_TOKENS
from wan_tpu.media.image import to_uint8
from wan_tpu.progress import Silent
from wan_tpu.runtime.mesh import make_mesh

KIND = "wan2.2-i2v-a14b"


def denoise_inputs(pipe, solver):
    """A request of two experts and some conditioning, without an encoder."""
    request = GenerationRequest(
        prompt="a cat",
        image=PHOTO,
        height=32,
        width=48,
        frames=5,
        steps=5,
        shift=5.0,
        guidance_scale=3.0,
        guidance_scale_2=2.0,
        solver=solver,
    )
    plan, rng = pipe.plan(request), np.random.default_rng(0)
    text = rng.standard_normal((2, 1, TEXT_TOKENS, 32)).astype(np.float32)
    image = rng.standard_normal((1, 20, 2, 4, 6)).astype(np.float32)
    return plan.without_image(), Conditioning({"text": text[0]}, {"text": text[1]}, None, image)


@pytest.mark.parametrize("solver", ["unipc", pytest.param("euler", marks=pytest.mark.thorough)])
def test_a_run_resumes_bit_for_bit_from_a_snapshot_on_another_runtime(solver, pipeline, checkpoint):
    pipe = pipeline(KIND)
    plan, conditioning = denoise_inputs(pipe, solver)
    snapshots = {}
    high, low = plan.experts
    state = stages.device_state(pipe.runtime, plan, pipe.initial_state(plan))
    for expert in (high, low):
        inputs = stages.expert_inputs(pipe.runtime, plan.request, expert, conditioning)
        run = stages.ExpertRun(pipe.runtime, plan, expert, inputs, state)
        while run.state.step < expert.stop:
            event = run.step()
            snapshots[event.step] = stages.to_host(run.state)
        state = run.state
    whole = pipe.denoise(plan, conditioning, pipe.initial_state(plan))
    assert np.array_equal(snapshots[5].latents, whole.latents)
    assert whole.latents.std() > 0.1

    other = load_pipeline(checkpoint(KIND), dtype="float32", mesh=(1, 1, 1))
    for step in (high.stop - 1, high.stop, high.stop + 1):
        resumed = other.denoise(plan, conditioning, snapshots[step])
        for got, expected in zip((resumed.latents, *resumed.history), (whole.latents, *whole.history), strict=True):
            assert np.array_equal(got, expected), step


def test_a_snapshot_stays_as_it_was_while_steps_go_on(pipeline):
    pipe = pipeline(KIND)
    plan, conditioning = denoise_inputs(pipe, "unipc")
    expert = plan.experts[0]
    start = pipe.initial_state(plan)
    start_state = DenoiseState(start.latents.copy(), tuple(term.copy() for term in start.history))
    inputs = stages.expert_inputs(pipe.runtime, plan.request, expert, conditioning)
    run = stages.ExpertRun(pipe.runtime, plan, expert, inputs, stages.device_state(pipe.runtime, plan, start_state))
    start_state.latents[:] = np.nan  # what was put on the devices is a copy
    run.step()
    snapshot = stages.to_host(run.state)
    before = snapshot.latents.copy()
    run.step()
    assert np.isfinite(before).all()
    assert np.array_equal(snapshot.latents, before)
    assert not np.array_equal(stages.to_host(run.state).latents, before)


def test_a_prompt_has_the_same_bits_alone_and_with_others(pipeline):
    pipe = pipeline(KIND)
    both = GenerationRequest(
        prompt="a cat", negative_prompt="ugly", image=PHOTO, height=32, width=48, frames=5, steps=2
    )
    alone = GenerationRequest(prompt="ugly", guidance_scale=1.0, image=PHOTO, height=32, width=48, frames=5, steps=2)
    first, second = (pipe.encode(pipe.plan(request)) for request in (both, alone))
    assert np.array_equal(first.negative["text"], second.prompt["text"])
    assert not np.array_equal(first.prompt["text"], second.prompt["text"])
    assert second.negative is None
    assert pipe.plan(both).prompts == ("a cat", "ugly")


def test_the_image_is_encoded_by_itself(pipeline):
    """Without the text encoder: its weights aren't even read."""
    pipe = pipeline(KIND)
    request = GenerationRequest(prompt="a cat", image=PHOTO, height=32, width=48, frames=5, steps=2)
    plan = pipe.plan(request)
    inputs = stages.image_inputs(pipe.runtime, plan.request)
    got = stages.encode_image(pipe.runtime, plan.request, inputs, Silent().bar("encoder", 1))
    assert np.array_equal(got.image_latents, pipe.encode(plan).image_latents)
    assert got.image is None
    assert stages.image_inputs(pipe.runtime, plan.without_image().request) is None


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_planes_are_the_rounded_pixels(dtype, pipeline):
    """What is encoded as video is what diffusers rounds frames to, bit for bit, its channels apart."""
    pipe = pipeline("wan2.1-t2v-1.3b", dtype)
    latents = 2 * np.random.default_rng(0).standard_normal((1, 16, 2, 4, 6)).astype(np.float32)
    pixels = to_uint8(np.concatenate(list(pipe.decode(latents))))
    frames = stages.decoder_inputs(pipe.runtime, latents)
    chunks = stages.decode_chunks(pipe.runtime, frames, Silent())
    planes = np.concatenate([np.asarray(planes) for _, planes in chunks])
    assert planes.dtype == np.uint8 and pixels.std() > 10
    assert np.array_equal(planes[:, [2, 0, 1]].transpose(0, 2, 3, 1), pixels)


@pytest.mark.parametrize("kind", sorted({family.model: kind for kind, family in list_published().items()}.values()))
def test_latents_are_rounded_to_bfloat16_after_they_are_denormalised(kind):
    runtime = AbstractRuntime(published_model(kind), make_mesh((1, 1, 1), heads=1), "bfloat16")
    vae = runtime.model.config.vae
    latents = np.random.default_rng(0).standard_normal((1, runtime.model.spec.latent_channels, 7, 2, 2), np.float32)
    if vae.get("latents_std") is not None:
        std, mean = (np.array(vae[f"latents_{name}"], np.float32)[:, None, None, None] for name in ("std", "mean"))
        expected = (latents * std + mean).astype(ml_dtypes.bfloat16)
    elif kind.startswith("ltx"):
        expected = latents  # Its decoder has the statistics, and rounds: test_ltx2_vae.py
    else:
        expected = (latents * np.float32(1 / vae["scaling_factor"])).astype(ml_dtypes.bfloat16)
    placed = np.concatenate(list(map(np.asarray, stages.decoder_inputs(runtime, latents))), axis=2)
    assert placed.dtype == expected.dtype
    # Division and multiplication by the inverse are both published; some values lie between two of bfloat16.
    assert np.mean(placed != expected) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part_bits", [10, 16])  # Only the second power is beyond the recurrence's degree.
def test_noise_of_several_threads_is_that_of_one(part_bits, dtype):
    part = 1 << part_bits
    for drawn in (0, 100, 1247):
        for count in (5, part, 2 * part - 1, 3 * part + 7):
            one, several = (torch.Generator("cpu").manual_seed(3) for _ in range(2))
            for generator in (one, several):
                torch.randn(drawn, generator=generator)
            expected = torch.randn((1, count), generator=one, dtype=dtype)
            assert torch.equal(draw_normal((1, count), several, dtype, part_bits), expected), (drawn, count)
