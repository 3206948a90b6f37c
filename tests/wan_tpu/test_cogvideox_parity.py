"""CogVideoX models against diffusers' own pipelines: latents after each step, and pixels."""

import diffusers
import numpy as np
import pytest
import torch

from tests.conftest import PHOTO
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.cogvideox.model import CogVideoXModel
from wan_tpu.families.cogvideox.presets import PRESETS
from wan_tpu.families.cogvideox.small import make_checkpoint
from wan_tpu.families.cogvideox.spec import CogVideoXSpec
from wan_tpu.media.image import load_image
from wan_tpu.pipeline import Pipeline
from wan_tpu.progress import Silent
from wan_tpu.request import GenerationRequest
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.runtime.runtime import Runtime

LATENT_TOLERANCE, PIXEL_TOLERANCE = 1e-4, 2e-3  # relative to the largest; half a level of 8 bits
SIZE = {"height": 64, "width": 96, "frames": 9, "steps": 4}
SCHEDULERS = {"ddim": diffusers.CogVideoXDDIMScheduler, "dpm": diffusers.CogVideoXDPMScheduler}
NAMED = [("cogvideox1.5-5b", "ddim"), ("cogvideox1.5-5b-i2v", "dpm"), ("cogvideox-2b", "dpm")]
OTHERS = [(kind, solver) for kind in PRESETS for solver in SCHEDULERS if (kind, solver) not in NAMED]


@pytest.mark.parametrize(
    ("kind", "solver"), [*NAMED, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS)]
)
def test_same_latents_and_pixels_as_diffusers(kind, solver, tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint", kind)
    checkpoint = Checkpoint(folder)
    model = CogVideoXModel(CogVideoXSpec.open(checkpoint), checkpoint)
    pipe = Pipeline(Runtime(model, make_mesh((1, 1, 1), heads=model.spec.heads), "float32", keep_weights=True), Silent())
    request = GenerationRequest(
        prompt="A cat in the rain", negative_prompt="blurred", seed=5, solver=solver, guidance_scale=6.0,
        image=PHOTO if "i2v" in model.spec.tasks else None, **SIZE,
    )  # fmt: skip
    latents = []
    video = pipe.generate(request, on_step=lambda event: latents.append(event.latents))

    theirs = diffusers.DiffusionPipeline.from_pretrained(folder)
    theirs.scheduler = SCHEDULERS[solver].from_config(theirs.scheduler.config)
    seen = []

    def look(pipeline, step, timestep, values):
        seen.append(values["latents"].transpose(1, 2).numpy().copy())
        return values

    given = {} if request.image is None else {"image": load_image(PHOTO)}
    expected = theirs(
        **given, prompt=request.prompt, negative_prompt=request.negative_prompt, height=64, width=96, num_frames=9,
        num_inference_steps=4, guidance_scale=6.0, use_dynamic_cfg=solver == "dpm",
        generator=torch.Generator().manual_seed(5), output_type="np", callback_on_step_end=look,
    ).frames[0]  # fmt: skip
    assert len(latents) == len(seen) == 4
    for ours, reference in zip(latents, seen, strict=True):
        assert np.abs(ours - reference).max() <= LATENT_TOLERANCE * np.abs(reference).max()
    assert video.pixels.shape == expected.shape and video.pixels.std() > 0.05
    assert np.abs(video.pixels - expected).max() <= PIXEL_TOLERANCE
