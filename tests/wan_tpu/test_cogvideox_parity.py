"""CogVideoX models against diffusers' own pipelines: latents after each step, and pixels."""

import diffusers
import numpy as np
import pytest
import torch

from tests.conftest import PHOTO, record_steps
from wan_tpu.data import DenoiseState, dump_value, parse_value
from wan_tpu.families.cogvideox.published import PUBLISHED
from wan_tpu.media.image import load_image
from wan_tpu.request import GenerationRequest

LATENT_TOLERANCE, PIXEL_TOLERANCE = 1e-4, 2e-3  # relative to the largest; half a level of 8 bits
SIZE = {"height": 64, "width": 96, "frames": 9, "steps": 3}
SCHEDULERS = {"ddim": diffusers.CogVideoXDDIMScheduler, "dpm": diffusers.CogVideoXDPMScheduler}
WITH_IMAGE = ("cogvideox1.5-5b-i2v", "dpm")
OTHERS = [("cogvideox1.5-5b", "ddim"), ("cogvideox-2b", "dpm"), ("cogvideox-5b", "ddim"), ("cogvideox-2b", "ddim")]
OTHERS += [("cogvideox-5b-i2v", "dpm")]  # It has a trained table of positions, too.
assert {kind for kind, _ in [WITH_IMAGE, *OTHERS]} == set(PUBLISHED)


def make_request(kind, solver):
    return GenerationRequest(
        prompt="A cat in the rain", negative_prompt="blurred", seed=5, solver=solver, guidance_scale=6.0,
        image=PHOTO if kind.endswith("i2v") else None, **SIZE,
    )  # fmt: skip


def run_diffusers(folder, request, **more):
    theirs = diffusers.DiffusionPipeline.from_pretrained(folder)
    theirs.scheduler = SCHEDULERS[request.solver].from_config(theirs.scheduler.config)
    image = {} if request.image is None else {"image": load_image(PHOTO)}
    return theirs(
        **image, prompt=request.prompt, negative_prompt=request.negative_prompt, height=64, width=96, num_frames=9,
        num_inference_steps=3, guidance_scale=6.0, use_dynamic_cfg=request.solver == "dpm",
        generator=torch.Generator().manual_seed(5), **more,
    ).frames  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "solver"), [WITH_IMAGE, *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS)]
)
def test_same_latents_and_pixels_as_diffusers(kind, solver, checkpoint, pipeline):
    request, latents = make_request(kind, solver), []
    video = pipeline(kind).generate(request, on_step=lambda event: latents.append(event.latents))

    seen = []

    def look(pipeline, step, timestep, values):
        seen.append(values["latents"].transpose(1, 2).numpy().copy())
        return values

    expected = run_diffusers(checkpoint(kind), request, output_type="np", callback_on_step_end=look)[0]
    assert len(latents) == len(seen) == 3
    for ours, reference in zip(latents, seen, strict=True):
        assert np.abs(ours - reference).max() <= LATENT_TOLERANCE * np.abs(reference).max()
    assert video.pixels.shape == expected.shape and video.pixels.std() > 0.05
    assert np.abs(video.pixels - expected).max() <= PIXEL_TOLERANCE


@pytest.mark.parametrize(
    ("kind", "stop"), [("cogvideox1.5-5b-i2v", 2), pytest.param("cogvideox-5b", None, marks=pytest.mark.thorough)]
)
def test_noise_of_ones_own_leaves_the_generator_s_to_the_steps(kind, stop, checkpoint, pipeline):
    pipe, request = pipeline(kind), make_request(kind, "dpm")
    plan = pipe.plan(request)
    noise = np.random.default_rng(7).standard_normal(pipe.initial_state(plan).latents.shape).astype(np.float32)
    conditioning, state = pipe.encode(plan), pipe.initial_state(plan, noise)
    if stop is not None:
        content = dump_value(pipe.denoise(plan, conditioning, state, stop=stop))
        state, _ = parse_value(DenoiseState, content, "a snapshot")
    ours = pipe.denoise(plan, conditioning, state).latents

    latents = torch.from_numpy(noise).transpose(1, 2)
    expected = run_diffusers(checkpoint(kind), request, output_type="latent", latents=latents).transpose(1, 2).numpy()
    expected = expected[:, :, expected.shape[2] - ours.shape[2] :]  # Ours have no frames that fill the first token.
    assert np.abs(ours - expected).max() <= LATENT_TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize(
    "prompt",
    [pytest.param("", marks=pytest.mark.thorough), "word " * 10_000, "猫が見ている 🐈"],
    ids=["nothing", "very long", "another script"],
)
def test_any_prompt_is_read_as_diffusers_reads_it(prompt, checkpoint, pipeline):
    pipe, warnings = pipeline("cogvideox-2b"), []
    embeddings = pipe.encode(pipe.plan(GenerationRequest(prompt=prompt, **SIZE)), warnings.append).prompt["text"]
    theirs = diffusers.CogVideoXPipeline.from_pretrained(checkpoint("cogvideox-2b"))
    with torch.no_grad():
        expected = theirs._get_t5_prompt_embeds(prompt).numpy()
    assert np.abs(embeddings - expected).max() <= 1e-5 * np.abs(expected).max()
    assert any("the model reads 226" in text for text in warnings) == (len(prompt) > 1000)


@pytest.mark.thorough
def test_bfloat16_stays_within_its_bound(pipeline):
    """The bound of tests/wan_tpu/test_parity.py, of steps that turn latents and v by angles which sum to pi/2."""
    guidance, blocks = 6.0, 2
    bound = (2 * guidance - 1) * np.sqrt(3 * blocks + 6) * 2**-8 * np.pi / 2
    latents = {}
    for dtype in ("float32", "bfloat16"):
        pipe = pipeline("cogvideox1.5-5b-i2v", dtype)
        latents[dtype] = record_steps(pipe, make_request("cogvideox1.5-5b-i2v", "ddim"))[-1].latents
    error = latents["bfloat16"] - latents["float32"]
    assert np.sqrt((error**2).mean()) <= bound * np.sqrt((latents["float32"] ** 2).mean())
