"""HunyuanVideo-1.5's VAE, frame by frame and cut over devices, against diffusers' module."""

import json
import math
import shutil

import diffusers
import numpy as np
import pytest
import torch

from tests.children import run_on_devices
from tests.wan_tpu.chunk_runs import cut
from tests.wan_tpu.hunyuan15_vae_worker import halves
from wan_tpu.errors import CheckpointError
from wan_tpu.families import open_spec
from wan_tpu.families.hunyuan15.small import make_checkpoint
from wan_tpu.runtime.mesh import make_mesh

HEIGHT = 3  # of the latents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hunyuan15") / "checkpoint", "hunyuanvideo1.5-480p-t2v")


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.AutoencoderKLHunyuanVideo15.from_pretrained(folder / "vae").eval()


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


TILE, TILED_HEIGHT, TILED_WIDTH = 64, 5, 9  # pixels; of the latents, in two rows of three tiles of 4 x 4 and less
IN_TILES = [(TILED_HEIGHT, TILED_WIDTH), (3, 4)]  # the second is one tile


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


@pytest.mark.parametrize(("height", "width"), IN_TILES)
def test_tiles_are_those_of_diffusers(height, width, tiling, tiled_folder):
    encode, decode = halves(tiled_folder, make_mesh((1, 1, 1), heads=4), 3)
    latents, pixels = random(1, 4, 3, height, width), random(1, 3, 1, 16 * height, 16 * width)
    outputs = decode(cut(latents, 1)), encode(cut(pixels, 4))
    for ours, expected in zip(outputs, moments_and_pixels(tiling, latents, pixels), strict=True):
        assert ours.shape == expected.shape
        assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()


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
