"""Small LTX-2 checkpoints: diffusers' pipeline makes videos with sound from them, and nothing in them is neutral."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline, LTX2LatentUpsamplerModel

from wan_tpu.families.ltx2.published import PUBLISHED
from wan_tpu.families.ltx2.small import make_checkpoint

SECONDS = 9 / 24


def _is_later(kind):
    """Return whether a kind is later than LTX-2.0."""
    return PUBLISHED[kind].transformer["cross_attn_mod"]


KINDS = [pytest.param(kind, marks=pytest.mark.thorough) if kind == "ltx-2.5" else kind for kind in PUBLISHED]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    """Returns a kind, its small checkpoint's folder and diffusers' pipeline."""
    folder = make_checkpoint(tmp_path_factory.mktemp("ltx2") / request.param, request.param)
    pipeline = diffusers.LTX2Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return request.param, folder, pipeline


UNGUIDED = {f"{prefix}{name}_scale": 1.0 for prefix in ("", "audio_") for name in ("guidance", "modality")}
WITHOUT_STG = {"stg_scale": 0.0, "audio_stg_scale": 0.0}


def generate(kind, pipeline, prompt, **arguments):
    settings = WITHOUT_STG | {"use_cross_timestep": _is_later(kind)}
    if PUBLISHED[kind].distilled:
        settings |= UNGUIDED
    elif _is_later(kind):
        settings |= {"stg_scale": 1.0, "audio_stg_scale": 1.0, "spatio_temporal_guidance_blocks": [1]}
    settings |= {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2, "output_type": "np"}
    generator = torch.Generator().manual_seed(7)
    return pipeline(prompt, generator=generator, return_dict=False, **settings | arguments)


def test_diffusers_makes_a_video_with_sound(checkpoint):
    kind, _, pipeline = checkpoint
    video, sound = generate(kind, pipeline, "A cat looks")
    sound = sound.numpy()
    rate = pipeline.vocoder.config.output_sampling_rate
    assert rate == (48000 if _is_later(kind) else 24000)
    assert video.shape == (1, 9, 64, 96, 3)
    # The mel spectrogram has 100 frames a second; its decoder makes 4 a latent, less 3.
    assert sound.shape == (1, 2, (4 * round(SECONDS * 25) - 3) * rate // 100)
    assert np.isfinite(video).all()
    assert np.isfinite(sound).all()
    # Neither grey nor black and white, neither silent nor clipped.
    assert 0.1 < video.std() < 0.4
    assert ((video <= 0) | (video >= 1)).mean() < 0.2
    assert sound.std(axis=2).min() > 0.02
    assert (np.abs(sound) >= 1).mean() < 0.01


def test_prompt_matters(checkpoint):
    kind, _, pipeline = checkpoint
    latents = [
        generate(kind, pipeline, prompt, output_type="latent", **UNGUIDED, **WITHOUT_STG)
        for prompt in ("A cat looks into the camera. " * 5, "Rain falls on a tin roof. " * 5)
    ]
    for cat, rain in zip(*latents, strict=True):
        assert float((cat - rain).std() / cat.std()) > 0.03


def test_every_tensor_has_its_own_values(checkpoint):
    _, _, pipeline = checkpoint
    for name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            constant = [
                key for key, tensor in part.state_dict().items() if tensor.numel() > 1 and float(tensor.std()) == 0
            ]
            assert not constant, (name, constant)


def test_sizes_differ_where_published_ones_do(checkpoint):
    """Video and audio have other widths, so that a program that mixes them up fails."""
    _, _, pipeline = checkpoint
    transformer = pipeline.transformer.config
    widths = [transformer.cross_attention_dim, transformer.audio_cross_attention_dim, transformer.in_channels]
    assert len({*widths, pipeline.text_encoder.config.text_config.hidden_size}) == 4
    assert set(pipeline.text_encoder.config.text_config.layer_types) == {"sliding_attention", "full_attention"}


def test_latents_double(checkpoint):
    _, folder, pipeline = checkpoint
    upsampler = LTX2LatentUpsamplerModel.from_pretrained(folder, subfolder="latent_upsampler")
    doubling = LTX2LatentUpsamplePipeline(vae=pipeline.vae, latent_upsampler=upsampler)
    latents = torch.randn(1, 16, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    (doubled,) = doubling(latents=latents, height=64, width=96, num_frames=9, output_type="latent", return_dict=False)
    assert doubled.shape == (1, 16, 2, 4, 6)
    assert bool(torch.isfinite(doubled).all())
