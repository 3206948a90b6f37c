"""LTX-2's VAE and latent upsampler, cut over devices, against diffusers' modules."""

import math
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel

from tests.children import run_on_devices
from tests.wan_tpu.chunk_runs import cut
from tests.wan_tpu.ltx2_vae_worker import make_decode, make_encode, make_upsample
from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2 import upsampler, vae
from wan_tpu.families.ltx2.published import PUBLISHED
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.families.shared import causal_vae
from wan_tpu.families.shared.flop_count import count
from wan_tpu.ops.halo import HaloCut
from wan_tpu.runtime.mesh import make_mesh

KINDS = ("ltx-2-distilled", "ltx-2.3-distilled")  # Reflected edges and residual enlargements; zeros and none.
HEIGHT, WIDTH = 2, 3  # of the latents


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ltx2") / "checkpoint", request.param)


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.AutoencoderKLLTX2Video.from_pretrained(folder / "vae").eval()


@pytest.fixture(scope="module")
def their_upsampler(folder):
    return LTX2LatentUpsamplerModel.from_pretrained(folder / "latent_upsampler").eval()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 1, 1), heads=4)


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def per_channel(values):
    return values.detach().numpy()[None, :, None, None, None]


def decode(module, latents):
    """What diffusers' pipeline decodes."""
    with torch.no_grad():
        scaled = torch.tensor(latents * per_channel(module.latents_std) + per_channel(module.latents_mean))
        return module.decode(scaled).sample.numpy()


def encode(module, pixels):
    """The moments that diffusers' module encodes, their means as its pipeline normalises them."""
    with torch.no_grad():
        moments = module.encode(torch.tensor(pixels)).latent_dist.parameters.numpy()
    mean, logarithms = np.split(moments, 2, axis=1)
    normalised = (mean - per_channel(module.latents_mean)) / per_channel(module.latents_std)
    return np.concatenate([normalised, logarithms], axis=1)


def double(module, vae_module, latents):
    """What diffusers' pipelines make of normalised latents between two stages."""
    mean, deviation = per_channel(vae_module.latents_mean), per_channel(vae_module.latents_std)
    with torch.no_grad():
        return (module(torch.tensor(latents * deviation + mean)).numpy() - mean) / deviation


def assert_close(ours, expected, tolerance=1e-4):
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= tolerance * np.abs(expected).max()


def test_rows_that_do_not_fill_a_tile_change_nothing(theirs, their_upsampler, folder, mesh, monkeypatch):
    """As on a TPU, where the rows of each level are padded to a multiple of 16."""

    def cut_picture(mesh, height, width):
        return HaloCut(mesh, height, width, row_unit=16)

    monkeypatch.setattr(causal_vae, "cut_picture", cut_picture)
    monkeypatch.setattr(upsampler, "cut_picture", cut_picture)
    latents, pixels = random(1, 16, 2, 3, 2), random(1, 3, 9, 96, 64)
    assert_close(make_decode(folder, mesh)(latents), decode(theirs, latents))
    assert_close(make_encode(folder, mesh)(cut(pixels, vae.FRAME_STRIDE)), encode(theirs, pixels))
    assert_close(make_upsample(folder, mesh)(latents), double(their_upsampler, theirs, latents))


def test_latents_are_rounded_to_bfloat16_after_they_are_denormalised(theirs, folder, mesh):
    """As diffusers' pipeline does. Before that, 64 would leave their 8 bits no fraction."""
    latents, decode_moved = random(1, 16, 1, HEIGHT, WIDTH), make_decode(folder, mesh, "bfloat16")
    far = latents - 64 / per_channel(theirs.latents_std)
    difference = decode_moved(far, 64) - decode_moved(latents)
    assert np.sqrt(np.square(difference).mean()) < 0.01 * decode(theirs, latents).std()


@pytest.mark.meshes
@pytest.mark.thorough
@pytest.mark.parametrize(("width", "mesh"), [(5, (2, 2, 2)), (3, (1, 2, 1))])
def test_several_devices_give_what_diffusers_does(width, mesh, theirs, their_upsampler, folder, tmp_path):
    """A column on five of eight devices and none on three; two devices with 2 columns and 1."""
    latents, pixels = random(1, 16, 2, HEIGHT, width), random(1, 3, 9, 32 * HEIGHT, 32 * width)
    file, out = tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    np.savez(file, latents=latents, pixels=pixels)
    run_on_devices("tests.wan_tpu.ltx2_vae_worker", folder, file, out, *mesh, count=math.prod(mesh))
    ours = np.load(out)
    assert_close(ours["decoded"], decode(theirs, latents))
    assert_close(ours["encoded"], encode(theirs, pixels))
    assert_close(ours["upsampled"], double(their_upsampler, theirs, latents))


CONFIG = PUBLISHED["ltx-2.3-distilled"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestep_conditioning": True}, "timestep_conditioning = True.*False"),
        ({"decoder_causal": True}, "decoder_causal = True"),
        ({"decoder_inject_noise": [False, True, False, False, False]}, "decoder_inject_noise"),
        ({"downsample_type": ["conv"] * 4}, "spatial.*temporal.*spatiotemporal"),
        ({"spatio_temporal_scaling": [True, True, True, False]}, "spatio_temporal_scaling"),
        ({"encoder_spatial_padding_mode": "circular"}, "zeros.*replicate.*reflect"),
    ],
)
def test_a_vae_that_no_model_has_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        vae.vae_half(replace(CONFIG, vae=CONFIG.vae | change), "encoder")


def test_a_decoder_that_changes_channels_before_it_enlarges_is_refused():
    component = vae.vae_half(replace(CONFIG, vae=CONFIG.vae | {"upsample_factor": [1, 1, 1, 1]}), "encoder")
    with torch.device("meta"), pytest.raises(CheckpointError, match="channels"):
        component.build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "latent_upsampler"),
        ({"temporal_upsample": True}, "temporal_upsample = True.*False"),
        ({"use_rational_resampler": True, "rational_spatial_scale": 1.5}, "rational_spatial_scale = 1.5"),
    ],
)
def test_an_upsampler_that_does_something_else_is_refused(settings, message):
    settings = None if settings is None else CONFIG.upsampler | settings
    with pytest.raises(CheckpointError, match=message):
        upsampler.upsampler(replace(CONFIG, upsampler=settings))


def test_operations_of_the_published_models():
    """Of 121 frames of 1920x1088. The decoder of 2.3 has more layers than that of 2.0 where there are most pixels."""
    for kind, decoding, encoding in (("ltx-2", 319.9e12, 12.37e12), ("ltx-2.3", 624.4e12, 9.01e12)):
        config = PUBLISHED[kind]
        assert vae.count_decoding(config, (1, 128, 16, 34, 60)) == pytest.approx(decoding, rel=0.001)
        assert vae.count_encoding(config, (1, 3, 1, 1088, 1920)) == pytest.approx(encoding, rel=0.001)
    latents = torch.empty((1, 128, 16, 17, 30), device="meta")
    upsampling = count(lambda: LTX2LatentUpsamplerModel.from_config(CONFIG.upsampler), lambda module: module(latents))
    assert upsampling == pytest.approx(19.4e12, rel=0.01)
