"""The work of a stage, against closed formulas and against counting every frame."""

import diffusers
import pytest
import torch
from PIL import Image

from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.families import preset_spec
from wan_tpu.families.shared import flop_count as flops
from wan_tpu.families.wan.model import WanModel


def test_a_step_of_the_14b_model():
    """Projections, attention and feed-forward of 40 blocks, by hand; embeddings and the output add under 1 %."""
    model = WanModel(preset_spec("wan2.2-i2v-a14b"))
    request = GenerationRequest(image=Image.new("RGB", (8, 8))).resolve(model.spec.defaults)
    shape = model.spec.latent_shape(request)
    tokens, width, hidden, text = model.spec.tokens(shape), 5120, 13824, 512
    assert tokens == 75_600
    projections = 2 * tokens * width * (4 * width + 2 * width + 2 * hidden) + 2 * text * width * 2 * width
    attention = 4 * tokens * width * (tokens + text)
    assert model.flops.step(shape, branches=2) == pytest.approx(2 * 40 * (projections + attention), rel=0.01)


@pytest.mark.parametrize("kind", ["wan2.2-i2v-a14b", "wan2.2-ti2v-5b"])
def test_frames_counted_by_chunks_equal_all_frames(kind, checkpoint):
    model = load_pipeline(checkpoint(kind), dtype="float32", mesh=(1, 1, 1)).runtime.model
    request = GenerationRequest(image=Image.new("RGB", (8, 8)), height=64, width=96, frames=13).resolve(
        model.spec.defaults
    )

    def vae():
        return diffusers.AutoencoderKLWan.from_config(model.config.vae)

    shape = model.spec.latent_shape(request)
    latents = torch.empty(shape, device="meta")
    assert model.flops.decoder(shape) == flops.count(vae, lambda module: module.decode(latents))
    frames = 1 if model.config.expand_timesteps else 13
    pixels = torch.empty(1, 3, frames, 64, 96, device="meta")
    text = model.flops.encoder(GenerationRequest().resolve(model.spec.defaults), prompts=1)
    assert model.flops.encoder(request, prompts=1) - text == flops.count(vae, lambda module: module.encode(pixels))
