"""HunyuanVideo-1.5's VAE, frame by frame and cut over devices, against diffusers' module."""

import json
import math
import shutil

import diffusers
import numpy as np
import pytest
import torch

from tests.children import run_on_devices
from wan_tpu.errors import CheckpointError
from wan_tpu.families import open_spec
from wan_tpu.families.hunyuan15.small import make_checkpoint

HEIGHT = 3  # of the latents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hunyuan15") / "checkpoint", "hunyuanvideo1.5-480p-t2v")


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.AutoencoderKLHunyuanVideo15.from_pretrained(folder / "vae").eval()


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


TILE, TILED_WIDTH = 64, 9  # pixels; of the latents, in three tiles of 3 x 4 and less


@pytest.fixture(scope="module")
def tiled_folder(folder, tmp_path_factory):
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("hunyuan15") / "tiled")
    (copy / "wan_tpu.json").write_text(json.dumps({"vae_tile": TILE}))
    return copy


def moments_and_pixels(module, latents, pixels):
    """What diffusers' module decodes and encodes."""
    with torch.no_grad():
        decoded = module.decode(torch.tensor(latents)).sample.numpy()
        return decoded, module.encode(torch.tensor(pixels)).latent_dist.parameters.numpy()


@pytest.fixture
def tiling(theirs):
    theirs.enable_tiling(TILE, TILE, TILE // 16, TILE // 16)
    yield theirs
    theirs.disable_tiling()


@pytest.mark.parametrize(("settings", "message"), [({"vae_tile": 100}, r"\b64\b"), ({"tile": 64}, "tile")])
def test_tiles_that_there_are_not_are_refused(settings, message, tiled_folder, tmp_path):
    copy = shutil.copytree(tiled_folder, tmp_path / "copy")
    (copy / "wan_tpu.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=message):
        open_spec(copy)


@pytest.mark.meshes
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tiled", "mesh"),
    [(False, (2, 2, 2)), (True, (1, 2, 2))],
    ids=["whole", "tiled"],
)
def test_several_devices_give_what_diffusers_does(tiled, mesh, theirs, folder, tiled_folder, tmp_path, request):
    module = request.getfixturevalue("tiling") if tiled else theirs
    # Whole: a column on five of eight devices, nothing but padding on three. Tiled: three tiles on four devices.
    width = TILED_WIDTH if tiled else 5
    latents, pixels = random(1, 4, 2, HEIGHT, width), random(1, 3, 1, 16 * HEIGHT, 16 * width)
    file, out = tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    np.savez(file, latents=latents, pixels=pixels)
    arguments = (tiled_folder if tiled else folder, file, out, *mesh)
    run_on_devices("tests.wan_tpu.hunyuan15_vae_worker", *arguments, count=math.prod(mesh))
    output = np.load(out)
    for name, expected in zip(("decoded", "encoded"), moments_and_pixels(module, latents, pixels), strict=True):
        assert np.abs(output[name] - expected).max() <= 1e-4 * np.abs(expected).max(), name
