"""CogVideoX's transformer against diffusers' module, of every published kind."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.cogvideo import pipeline_cogvideox

from tests.children import run_on_devices
from tests.wan_tpu.cogvideox_worker import TIMESTEP, predict
from wan_tpu.families.cogvideox.positions import _fit_grid
from wan_tpu.families.cogvideox.published import PUBLISHED
from wan_tpu.families.cogvideox.small import make_checkpoint
from wan_tpu.runtime.mesh import make_mesh

HEIGHT, WIDTH, FRAMES = 8, 12, 4  # of the latents; 3 frames where two aren't one token


def theirs(folder, latents, text):
    """What diffusers' module predicts, [B, C, T, H, W], with the positions that its pipeline gives it."""
    module = diffusers.CogVideoXTransformer3DModel.from_pretrained(folder / "transformer").eval()
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    rotary = None
    if module.config.use_rotary_positional_embeddings:
        rotary = pipe._prepare_rotary_positional_embeddings(
            8 * latents.shape[3], 8 * latents.shape[4], latents.shape[2], "cpu"
        )
    ofs = None if module.config.ofs_embed_dim is None else torch.full((1,), 2.0)
    hidden = torch.tensor(latents).transpose(1, 2).expand(len(text), -1, -1, -1, -1)
    with torch.no_grad():
        output = module(
            hidden, torch.tensor(text), torch.tensor([TIMESTEP]).expand(len(text)), ofs=ofs, image_rotary_emb=rotary
        )
    return output.sample.transpose(1, 2).numpy()


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize(
    "size",
    [pytest.param((HEIGHT, WIDTH), id="as trained"), pytest.param((4, 12), id="wider", marks=pytest.mark.thorough)],
)
def test_transformer_predicts_what_diffusers_predicts(kind, size, tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint", kind)
    config = PUBLISHED[kind].transformer
    if config["use_learned_positional_embeddings"] and size != (HEIGHT, WIDTH):
        pytest.skip("it makes one size alone")
    frames = FRAMES if config["patch_size_t"] else 3
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((1, config["in_channels"], frames, *size)).astype(np.float32)
    text = rng.standard_normal((2, 226, 32)).astype(np.float32)
    expected = theirs(folder, latents, text)
    predicted = predict(folder, make_mesh((1, 1, 1), heads=2), latents, text)
    assert np.abs(predicted - expected).max() <= 1e-5 * np.abs(expected).max()


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
