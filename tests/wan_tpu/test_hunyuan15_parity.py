"""Whole runs of HunyuanVideo-1.5 against diffusers' own pipelines."""

import diffusers
import numpy as np
import pytest
import torch

from tests.conftest import PHOTO, denoised
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.hunyuan15.model import HunyuanModel
from wan_tpu.families.hunyuan15.small import make_checkpoint
from wan_tpu.families.hunyuan15.spec import HunyuanSpec
from wan_tpu.media.image import load_image
from wan_tpu.pipeline import Pipeline
from wan_tpu.progress import Silent
from wan_tpu.request import GenerationRequest
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.runtime.runtime import Runtime

LATENT_TOLERANCE, PIXEL_TOLERANCE = 1e-4, 2e-3  # relative to the largest; half a level of 8 bits
KINDS = ["hunyuanvideo1.5-720p-t2v", "hunyuanvideo1.5-480p-i2v", "hunyuanvideo1.5-480p-i2v-step-distilled"]
PROMPTS = {
    "plain": ("A cat in the rain.", "blurred, distorted, of low quality, and much more that nobody wants to see"),
    "quoted": ('A sign says "CAFÉ" and “open”.', 'watermark "stock"'),
    "nothing": ("", ""),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hunyuan15") / request.param, request.param)


def open_pipeline(folder, dtype="float32"):
    checkpoint = Checkpoint(folder)
    model = HunyuanModel(HunyuanSpec.open(checkpoint), checkpoint)
    return Pipeline(Runtime(model, make_mesh((1, 1, 1), heads=4), dtype, keep_weights=True), Silent())


@pytest.fixture(scope="module")
def pipe(folder):
    return open_pipeline(folder)


@pytest.mark.parametrize(
    ("folder", "prompts"),
    [
        (KINDS[0], "quoted"),
        *(pytest.param(KINDS[0], prompts, marks=pytest.mark.long) for prompts in ("plain", "nothing")),
        pytest.param(KINDS[1], "quoted", marks=pytest.mark.long),
        pytest.param(KINDS[2], "plain", marks=pytest.mark.long),
    ],
    indirect=["folder"],
)
def test_same_latents_and_pixels_as_diffusers(prompts, folder, pipe):
    prompt, negative = PROMPTS[prompts]
    image = load_image(PHOTO) if "i2v" in pipe.runtime.model.spec.tasks else None
    request = GenerationRequest(
        prompt=prompt, negative_prompt=negative, image=image, frames=9, steps=3, seed=5
    )  # fmt: skip
    latents = []
    video = pipe.generate(request, on_step=lambda event: latents.append(event.latents))

    theirs, seen = diffusers.DiffusionPipeline.from_pretrained(folder), []
    step = theirs.scheduler.step

    def watch(*args, **kwargs):
        result = step(*args, **kwargs)
        seen.append(result[0].numpy().copy())
        return result

    theirs.scheduler.step = watch
    expected = theirs(
        **({} if image is None else {"image": image}), prompt=prompt, negative_prompt=negative, num_frames=9,
        num_inference_steps=3, generator=torch.Generator().manual_seed(5), output_type="np",
    ).frames[0]  # fmt: skip
    assert len(latents) == len(seen) == 3
    for ours, reference in zip(latents, seen, strict=True):
        assert np.abs(ours - reference).max() <= LATENT_TOLERANCE * np.abs(reference).max()
    assert video.pixels.shape == expected.shape and video.pixels.std() > 0.02
    assert np.abs(video.pixels - expected).max() <= PIXEL_TOLERANCE


@pytest.mark.parametrize("folder", KINDS[:1], indirect=True)
def test_a_prompt_of_another_length_compiles_nothing(pipe):
    def compile_s_after(prompt, negative):
        denoised(pipe, GenerationRequest(prompt=prompt, negative_prompt=negative, frames=9, steps=1))
        return pipe.runtime.compile_s

    before = compile_s_after('a "sign"', "")
    assert before == compile_s_after("a cat in the rain, " * 9, 'a "logo"') == compile_s_after("", "blurred") > 0


@pytest.mark.parametrize("folder", [pytest.param(KINDS[1], marks=pytest.mark.long), KINDS[2]], indirect=True)
def test_a_run_goes_on_from_a_state_bit_for_bit(pipe):
    plan = pipe.plan(GenerationRequest(prompt="A cat", image=load_image(PHOTO), frames=9, steps=4))
    conditioning, start = pipe.encode(plan), pipe.initial_state(plan)
    whole = pipe.denoise(plan, conditioning, start)
    resumed = pipe.denoise(plan, conditioning, pipe.denoise(plan, conditioning, start, stop=2))
    assert np.array_equal(whole.latents, resumed.latents)


@pytest.mark.long
@pytest.mark.parametrize("folder", KINDS[:1], indirect=True)
def test_bfloat16_stays_within_its_bound(folder, pipe):
    """The bound of tests/wan_tpu/test_parity.py, of a flow with two layers."""
    guidance, blocks, latents = 6.0, 2, {}
    bound = (2 * guidance - 1) * np.sqrt(3 * blocks + 6) * 2**-8
    for dtype in ("float32", "bfloat16"):
        opened_pipe = pipe if dtype == "float32" else open_pipeline(folder, dtype)
        plan = opened_pipe.plan(GenerationRequest(prompt='A sign says "open".', frames=9, steps=4))
        latents[dtype] = opened_pipe.denoise(plan, opened_pipe.encode(plan), opened_pipe.initial_state(plan)).latents
    error = latents["bfloat16"] - latents["float32"]
    assert np.sqrt((error**2).mean()) <= bound * np.sqrt((latents["float32"] ** 2).mean())
    assert np.abs(error).max() > 0
