"""HunyuanVideo-1.5's VAE, frame by frame and cut over devices, against diffusers' module."""

import subprocess
import sys

import diffusers
import numpy as np
import pytest
import torch

from tests.conftest import ROOT, with_devices
from tests.wan_tpu.hunyuan15_vae_worker import cut, halves
from wan_tpu.families.hunyuan15.small import make_checkpoint
from wan_tpu.runtime.mesh import make_mesh

HEIGHT, WIDTH, FRAMES = 3, 4, 4  # of the latents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hunyuan15") / "checkpoint", "hunyuanvideo1.5-480p-t2v")


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.AutoencoderKLHunyuanVideo15.from_pretrained(folder / "vae").eval()


@pytest.fixture(scope="module")
def ours(folder):
    return halves(folder, make_mesh((1, 1, 1), heads=4), FRAMES)


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("frames", [1, FRAMES])
def test_latents_are_decoded_as_diffusers_does(frames, theirs, ours):
    latents = random(1, 4, frames, HEIGHT, WIDTH)
    with torch.no_grad():
        expected = theirs.decode(torch.tensor(latents)).sample.numpy()
    found = ours[1](cut(latents, 1))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("frames", [1, 9])
def test_pixels_are_encoded_as_diffusers_does(frames, theirs, ours):
    pixels = random(1, 3, frames, 16 * HEIGHT, 16 * WIDTH)
    with torch.no_grad():
        expected = theirs.encode(torch.tensor(pixels)).latent_dist.parameters.numpy()
    found = ours[0](cut(pixels, 4))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_frames_that_come_later_change_nothing(theirs, ours):
    latents = random(1, 4, FRAMES, HEIGHT, WIDTH)
    changed = latents.copy()
    changed[:, :, -1] += 1
    first, second = (ours[1](cut(given, 1)) for given in (latents, changed))
    assert np.array_equal(first[:, :, :-4], second[:, :, :-4])
    assert np.abs(first[:, :, -4:] - second[:, :, -4:]).max() > 1e-3


@pytest.mark.long
def test_several_devices_give_what_one_does(folder, tmp_path):
    width = 5  # a column on five of eight devices, nothing but padding on three
    given, out = tmp_path / "given.npz", tmp_path / "found.npz"
    np.savez(given, latents=random(1, 4, 3, HEIGHT, width), pixels=random(1, 3, 1, 16 * HEIGHT, 16 * width))
    command = [sys.executable, "-m", "tests.wan_tpu.hunyuan15_vae_worker", folder, given, out]
    subprocess.run(command, env=with_devices(8), cwd=ROOT, check=True)
    found = np.load(out)
    for name in found.files:
        one = found[f"{name.split()[0]} 1x1x1"]
        assert np.abs(found[name] - one).max() <= 1e-4 * np.abs(one).max(), name
