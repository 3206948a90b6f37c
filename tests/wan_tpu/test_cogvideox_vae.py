"""CogVideoX's VAE, chunk by chunk and cut over devices, against diffusers' module."""

import diffusers
import numpy as np
import pytest
import torch

from tests.children import run_on_devices
from tests.wan_tpu.cogvideox_vae_worker import cut, halves
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.cogvideox.small import make_checkpoint
from wan_tpu.families.cogvideox.spec import CogVideoXSpec
from wan_tpu.runtime.mesh import make_mesh

HEIGHT, WIDTH = 4, 6  # of the latents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("cogvideox") / "checkpoint", "cogvideox-2b")


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.AutoencoderKLCogVideoX.from_pretrained(folder / "vae").eval()


@pytest.fixture(scope="module")
def ours(folder):
    return halves(folder, make_mesh((1, 1, 1), heads=2))


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("frames", [1, 4, pytest.param(7, marks=pytest.mark.long)])
def test_latents_are_decoded_as_diffusers_does(frames, theirs, ours, folder):
    latents = random(1, 16, frames, HEIGHT, WIDTH)
    with torch.no_grad():
        expected = theirs.decode(torch.tensor(latents)).sample.numpy()
    output = ours[1](cut(latents, CogVideoXSpec.open(Checkpoint(folder)).decoder_chunks(frames)))
    assert output.shape == expected.shape
    assert np.abs(output - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("frames", [1, 9])
def test_pixels_are_encoded_as_diffusers_does(frames, theirs, ours):
    pixels = random(1, 3, frames, 8 * HEIGHT, 8 * WIDTH)
    with torch.no_grad():
        expected = theirs.encode(torch.tensor(pixels)).latent_dist.parameters.numpy()
    output = ours[0]([pixels])
    assert output.shape == expected.shape
    assert np.abs(output - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.meshes
@pytest.mark.thorough
def test_eight_devices_give_what_diffusers_does(theirs, folder, tmp_path):
    width = 5  # Five of eight devices have a column, three have only padding.
    file, out = tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    latents, pixels = random(1, 16, 4, HEIGHT, width), random(1, 3, 1, 8 * HEIGHT, 8 * width)
    np.savez(file, latents=latents, pixels=pixels)
    run_on_devices("tests.wan_tpu.cogvideox_vae_worker", folder, file, out, count=8)
    output = np.load(out)
    with torch.no_grad():
        expected = {
            "decoded": theirs.decode(torch.tensor(latents)).sample.numpy(),
            "encoded": theirs.encode(torch.tensor(pixels)).latent_dist.parameters.numpy(),
        }
    for name, values in expected.items():
        assert np.abs(output[name] - values).max() <= 1e-4 * np.abs(values).max(), name
