"""What is known of CogVideoX models from their configuration, against diffusers' own pipelines."""

import diffusers
import numpy as np
import pytest
from diffusers.pipelines.cogvideo import pipeline_cogvideox

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.cogvideox.positions import _fit_grid
from wan_tpu.families.cogvideox.published import PUBLISHED
from wan_tpu.families.cogvideox.small import make_checkpoint
from wan_tpu.families.cogvideox.spec import CogVideoXSpec
from wan_tpu.request import GenerationRequest


@pytest.mark.parametrize(
    ("kind", "tokens", "padding"),
    [("cogvideox1.5-5b", 44_880, 1), ("cogvideox-5b", 17_550, 0), ("cogvideox1.5-5b-i2v", 44_880, 1)],
)
def test_full_size(kind, tokens, padding):
    spec = CogVideoXSpec(PUBLISHED[kind])
    request = spec.plan(GenerationRequest(), image=kind.endswith("i2v")).request
    assert spec.tokens(spec.latent_shape(request)) == 226 + tokens
    assert spec.padding(request) == padding


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("cogvideox1.5-5b", {"frames": 85}, r"frames.*\b85\b.*8n \+ 1\b.*\b81\b"),
        ("cogvideox1.5-5b", {"height": 2416}, "height.*2416.*cogvideox1.5-5b.*2400"),
        ("cogvideox-5b-i2v", {"height": 512}, r"height.*\b512\b.*cogvideox-5b-i2v.*\b480\b"),
        ("cogvideox-5b-i2v", {"frames": 25}, r"frames.*\b25\b.*cogvideox-5b-i2v.*\b49\b"),
        ("cogvideox-2b", {"shift": 3.0}, r"shift.*\b3\b.*cogvideox-2b"),
        ("cogvideox-2b", {"solver": "unipc"}, "'unipc'.* dpm.*ddim"),
        ("cogvideox-2b", {"steps": 1000, "frames": 0}, r"frames.*\b0\b"),
    ],
)
def test_what_a_model_does_not_make_is_refused_with_what_it_does(kind, fields, message):
    with pytest.raises(InvalidRequest, match=message):
        CogVideoXSpec(PUBLISHED[kind]).plan(GenerationRequest(**fields), image=kind.endswith("i2v"))


def test_a_scheduler_that_predicts_noise_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "checkpoint", "cogvideox-2b")
    diffusers.CogVideoXDDIMScheduler(prediction_type="epsilon").save_pretrained(folder / "scheduler")
    with pytest.raises(CheckpointError, match=r"prediction_type 'epsilon'.*'v_prediction'"):
        CogVideoXSpec.open(Checkpoint(folder))


@pytest.mark.parametrize(("grid", "trained"), [((30, 45), (30, 45)), ((20, 60), (30, 45)), ((48, 20), (30, 45))])
def test_a_grid_is_fitted_as_diffusers_does(grid, trained):
    (top, left), (bottom, right) = pipeline_cogvideox.get_resize_crop_region_for_grid(grid, trained[1], trained[0])
    rows, columns = _fit_grid(grid, trained)
    np.testing.assert_allclose(rows, np.linspace(top, bottom * (grid[0] - 1) / grid[0], grid[0]))
    np.testing.assert_allclose(columns, np.linspace(left, right * (grid[1] - 1) / grid[1], grid[1]))
