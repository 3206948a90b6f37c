"""CogVideoX's transformer on several devices, and its positions; test_cogvideox_parity.py has every published kind."""

import numpy as np
import pytest
from diffusers.pipelines.cogvideo import pipeline_cogvideox

from tests.children import run_on_devices
from wan_tpu.families.cogvideox.positions import _fit_grid
from wan_tpu.families.cogvideox.published import PUBLISHED
from wan_tpu.families.cogvideox.small import make_checkpoint

HEIGHT, WIDTH = 8, 12  # of the latents


@pytest.mark.meshes
@pytest.mark.long
def test_eight_devices_predict_what_one_does(tmp_path):
    kind = "cogvideox1.5-5b-i2v"
    folder = make_checkpoint(tmp_path / "checkpoint", kind)
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((1, PUBLISHED[kind].transformer["in_channels"], 4, HEIGHT, WIDTH)).astype(np.float32)
    text = rng.standard_normal((2, 226, 32)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", latents=latents, text=text)
    files = tmp_path / "inputs.npz", tmp_path / "predictions.npz"
    run_on_devices("tests.wan_tpu.cogvideox_worker", folder, *files, count=8)
    predictions = np.load(tmp_path / "predictions.npz")
    for mesh in predictions.files:
        assert np.abs(predictions[mesh] - predictions["1x1x1"]).max() <= 1e-4 * np.abs(predictions["1x1x1"]).max(), mesh


@pytest.mark.parametrize(("grid", "trained"), [((30, 45), (30, 45)), ((20, 60), (30, 45)), ((48, 20), (30, 45))])
def test_a_grid_is_fitted_as_diffusers_does(grid, trained):
    (top, left), (bottom, right) = pipeline_cogvideox.get_resize_crop_region_for_grid(grid, trained[1], trained[0])
    rows, columns = _fit_grid(grid, trained)
    np.testing.assert_allclose(rows, np.linspace(top, bottom * (grid[0] - 1) / grid[0], grid[0]))
    np.testing.assert_allclose(columns, np.linspace(left, right * (grid[1] - 1) / grid[1], grid[1]))
