"""What is known of CogVideoX models from their configuration, against diffusers' own pipelines."""

import numpy as np
import pytest
from diffusers.pipelines.cogvideo import pipeline_cogvideox

from wan_tpu.families.cogvideox.positions import _fit_grid
from wan_tpu.families.cogvideox.published import PUBLISHED
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


@pytest.mark.parametrize(("grid", "trained"), [((30, 45), (30, 45)), ((20, 60), (30, 45)), ((48, 20), (30, 45))])
def test_a_grid_is_fitted_as_diffusers_does(grid, trained):
    (top, left), (bottom, right) = pipeline_cogvideox.get_resize_crop_region_for_grid(grid, trained[1], trained[0])
    rows, columns = _fit_grid(grid, trained)
    np.testing.assert_allclose(rows, np.linspace(top, bottom * (grid[0] - 1) / grid[0], grid[0]))
    np.testing.assert_allclose(columns, np.linspace(left, right * (grid[1] - 1) / grid[1], grid[1]))
