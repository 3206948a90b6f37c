"""MiniMax-H3's video VAE, its tiles spread over devices, against diffusers' module."""

import math

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from torch.utils.flop_counter import FlopCounterMode

from tests.children import run_on_devices
from tests.wan_tpu.minimax_h3_vae_worker import OVERLAP, TILE, make_decode, make_encode, open_config
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.minimax_h3 import encoder, vae
from wan_tpu.families.minimax_h3.clips import chunk_lengths
from wan_tpu.families.minimax_h3.tiling import lay_line
from wan_tpu.ops.halo import HaloCut
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh

CHANNELS = 24


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    draw = np.random.default_rng(1)
    module = (
        AutoencoderKLMiniMaxH3(
            block_out_channels=(4, 4, 8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=2,
            decoder_num_layers=2,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=16,
            decoder_num_register_tokens=3,
            latents_mean=draw.standard_normal(CHANNELS).tolist(),
            latents_std=draw.uniform(0.5, 1.5, CHANNELS).tolist(),
        )
        .eval()
        .requires_grad_(False)
    )
    # A new module's registers and scales of layers are zeros, which would hide mistakes.
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1 or "register" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (1 if "norm" in name else 0))
    side, shared = TILE * vae.STRIDE, OVERLAP * vae.STRIDE
    module.enable_tiling(side, side, shared, shared)
    return module


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("minimax_h3")
    theirs.save_pretrained(folder / "vae")
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 1, 1), heads=2)


def random_latents(clips, height, width):
    shape = 1, CHANNELS, 5 * clips + 2, height, width
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def random_pixels(frames, height, width):
    return np.random.default_rng(0).integers(0, 256, (1, 3, frames, height, width)).astype(np.float32)


def per_channel(values):
    return torch.tensor(values).view(1, -1, 1, 1, 1)


def decode_theirs(module, latents):
    """What diffusers' pipeline decodes, around [-1, 1]."""
    config = module.config
    with torch.no_grad():
        scaled = torch.tensor(latents) * per_channel(config.latents_std) + per_channel(config.latents_mean)
        video = module.decode(scaled).sample.float()
        unit = (video * per_channel(vae.PIXEL_DEVIATION) + per_channel(vae.PIXEL_MEAN)).clamp(0, 1)
    return 2 * unit.numpy() - 1


def encode_theirs(module, pixels):
    """The moments that diffusers' module encodes, frame by frame."""
    normalised = (torch.tensor(pixels) / 255 - per_channel(vae.PIXEL_MEAN)) / per_channel(vae.PIXEL_DEVIATION)
    with torch.no_grad():
        return np.concatenate(
            [module.encode(frame).latent_dist.parameters.numpy() for frame in normalised.split(1, dim=2)], axis=2
        )


def assert_close(ours, expected, tolerance=1e-5):
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= tolerance * np.abs(expected).max()


def test_rows_that_do_not_fill_a_register_change_nothing(theirs, folder, mesh, monkeypatch):
    """As on a TPU, where the rows of each level are padded to a multiple of 16."""
    monkeypatch.setattr(encoder, "cut_picture", lambda mesh, height, width: HaloCut(mesh, height, width, row_unit=16))
    pixels = random_pixels(1, 16 * 3, 16 * 2)
    assert_close(make_encode(folder, mesh)(pixels), encode_theirs(theirs, pixels))


def test_pixels_in_bfloat16_are_near_those_in_float32(theirs, folder, mesh):
    latents = random_latents(2, 2, 3)
    expected = decode_theirs(theirs, latents)
    difference = make_decode(folder, mesh, "bfloat16")(latents) - expected
    assert 1e-4 * expected.std() < np.sqrt(np.square(difference).mean()) <= 0.006 * expected.std()


def test_infinite_pixels_are_not_clipped_before_they_are_checked():
    pixels = np.array([np.inf, -np.inf, 0], np.float32)[:, None, None, None]
    assert np.isinf(np.asarray(vae._to_unit_range(pixels))[:, 0, 0, 0]).tolist() == [True, True, False]


@pytest.mark.parametrize("dropped", ["encoder", "decoder"])
def test_weights_are_in_float32_where_diffusers_keeps_them(dropped, folder, mesh):
    module = AutoencoderKLMiniMaxH3.from_pretrained(folder / "vae", torch_dtype=torch.bfloat16)
    theirs = {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in module.named_parameters()}
    params = load_component(Checkpoint(folder), vae.vae_half(open_config(folder), dropped), "bfloat16", mesh).params
    ours = {name.replace(".template.", ".0."): str(value.dtype) for name, value in params.items()}
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.meshes
@pytest.mark.parametrize("mesh", [(2, 2, 2)])
def test_several_devices_give_what_diffusers_does(mesh, theirs, folder, tmp_path):
    """Nine tiles: two on each of four of eight devices and one on another; five and four on two devices."""
    latents, pixels = random_latents(2, 8, 10), random_pixels(1, 16 * 8, 16 * 10)
    file, out = tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    np.savez(file, latents=latents, pixels=pixels)
    run_on_devices("tests.wan_tpu.minimax_h3_vae_worker", folder, file, out, *mesh, count=math.prod(mesh))
    ours = np.load(out)
    assert_close(ours["decoded"], decode_theirs(theirs, latents))
    assert_close(ours["encoded"], encode_theirs(theirs, pixels))


def test_tiles_lie_where_diffusers_puts_them(theirs):
    for length in range(1, 200):
        line = lay_line(length, vae.TILE, vae.OVERLAP).enlarge(vae.STRIDE)
        expected = theirs._split_tiles(16 * length, 256, 64)
        assert (list(line.starts), [line.size] * len(line.starts), list(line.overlaps)) == expected


def test_the_last_chunk_of_the_decoder_has_a_length_of_its_own():
    lengths = [chunk_lengths(5 * clips + 2) for clips in range(1, 7)]
    assert lengths == [(7,), (12,), (13, 4), (13, 9), (13, 10, 4), (13, 10, 9)]


def test_operations_are_those_of_all_tiles_and_clips(folder):
    """The frames before a keyframe, which diffusers multiplies though they are zeros, aren't counted."""
    config = open_config(folder)
    with torch.device("meta"), torch.no_grad():
        module = AutoencoderKLMiniMaxH3.from_config(config.vae).eval()
        with FlopCounterMode(display=False) as counter:
            module.decode(torch.empty(1, CHANNELS, 12, 20, 33))
        decoding = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            module.encode(torch.empty(1, 3, 1, 320, 528))
        encoding = counter.get_total_flops()
    assert vae.count_decoding(config, (1, CHANNELS, 12, 20, 33)) == decoding
    assert encoding / 3 < vae.count_encoding(config, 320, 528) < encoding / 2.5
