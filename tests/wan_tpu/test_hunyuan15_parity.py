"""Whole runs of HunyuanVideo-1.5 against diffusers' own pipelines."""

import diffusers
import numpy as np
import pytest
import torch

from tests.conftest import PHOTO, record_steps
from wan_tpu.media.image import load_image
from wan_tpu.request import GenerationRequest

LATENT_TOLERANCE, PIXEL_TOLERANCE = 1e-4, 2e-3  # relative to the largest; half a level of 8 bits
KINDS = ["hunyuanvideo1.5-720p-t2v", "hunyuanvideo1.5-480p-i2v", "hunyuanvideo1.5-480p-i2v-step-distilled"]
PROMPTS = {
    "plain": ("A cat in the rain.", "blurred, distorted, of low quality, and much more that nobody wants to see"),
    "quoted": ('A sign says "CAFÉ" and “open”.', 'watermark "stock"'),
    "nothing": ("", ""),
}


@pytest.mark.parametrize(
    ("kind", "prompts"),
    [
        (KINDS[0], "quoted"),
        *(pytest.param(KINDS[0], prompts, marks=pytest.mark.thorough) for prompts in ("plain", "nothing")),
        pytest.param(KINDS[1], "quoted", marks=pytest.mark.thorough),
        pytest.param(KINDS[2], "plain", marks=pytest.mark.thorough),
    ],
)
def test_same_latents_and_pixels_as_diffusers(kind, prompts, checkpoint, pipeline):
    pipe = pipeline(kind)
    prompt, negative = PROMPTS[prompts]
    image = load_image(PHOTO) if "i2v" in pipe.runtime.model.spec.tasks else None
    request = GenerationRequest(prompt=prompt, negative_prompt=negative, image=image, frames=9, steps=2, seed=5)
    latents = []
    video = pipe.generate(request, on_step=lambda event: latents.append(event.latents))

    theirs, seen = diffusers.DiffusionPipeline.from_pretrained(checkpoint(kind)), []
    step = theirs.scheduler.step

    def watch(*args, **kwargs):
        result = step(*args, **kwargs)
        seen.append(result[0].numpy().copy())
        return result

    theirs.scheduler.step = watch
    expected = theirs(
        **({} if image is None else {"image": image}), prompt=prompt, negative_prompt=negative, num_frames=9,
        num_inference_steps=2, generator=torch.Generator().manual_seed(5), output_type="np",
    ).frames[0]  # fmt: skip
    assert len(latents) == len(seen) == 2
    for ours, reference in zip(latents, seen, strict=True):
        assert np.abs(ours - reference).max() <= LATENT_TOLERANCE * np.abs(reference).max()
    assert video.pixels.shape == expected.shape and video.pixels.std() > 0.02
    assert np.abs(video.pixels - expected).max() <= PIXEL_TOLERANCE


@pytest.mark.thorough
def test_a_prompt_of_another_length_compiles_nothing(pipeline):
    pipe = pipeline(KINDS[0])

    def compile_s_after(prompt, negative):
        record_steps(pipe, GenerationRequest(prompt=prompt, negative_prompt=negative, frames=9, steps=1))
        return pipe.runtime.compile_s

    before = compile_s_after('a "sign"', "")
    assert before == compile_s_after("a cat in the rain, " * 9, 'a "logo"') == compile_s_after("", "blurred") > 0


@pytest.mark.thorough
def test_bfloat16_stays_within_its_bound(pipeline):
    """The bound of tests/wan_tpu/test_parity.py, of a flow with two layers."""
    guidance, blocks, latents = 6.0, 2, {}
    bound = (2 * guidance - 1) * np.sqrt(3 * blocks + 6) * 2**-8
    for dtype in ("float32", "bfloat16"):
        pipe = pipeline(KINDS[0], dtype)
        plan = pipe.plan(GenerationRequest(prompt='A sign says "open".', frames=9, steps=4))
        latents[dtype] = pipe.denoise(plan, pipe.encode(plan), pipe.initial_state(plan)).latents
    error = latents["bfloat16"] - latents["float32"]
    assert np.sqrt((error**2).mean()) <= bound * np.sqrt((latents["float32"] ** 2).mean())
    assert np.abs(error).max() > 0
