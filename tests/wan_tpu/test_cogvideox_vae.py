"""CogVideoX's VAE, chunk by chunk and cut over devices, against diffusers' module."""

import diffusers
import numpy as np
import pytest
import torch

from tests.children import run_on_devices
from wan_tpu.families.cogvideox.small import make_checkpoint

HEIGHT = 4  # of the latents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("cogvideox") / "checkpoint", "cogvideox-2b")


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.AutoencoderKLCogVideoX.from_pretrained(folder / "vae").eval()


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


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
