"""Whole runs of LTX-2 against the rules of Lightricks' own pipelines, in plain torch."""

import functools

import numpy as np
import pytest
from diffusers.pipelines.ltx2.utils import DEFAULT_NEGATIVE_PROMPT

from scripts.published.ltx_rules import Lightricks
from tests.conftest import PHOTO
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.media.image import load_image
from wan_tpu.pipeline import load_pipeline
from wan_tpu.request import GenerationRequest

TOLERANCE = 2e-5  # Lightricks' own pipelines and this reference differ by up to 5e-6 (scripts/compare_ltx.py).
SIZE = (64, 128, 9)
STEPS, SEED, PROMPT = 3, 5, "A cat in the rain."


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda kind: make_checkpoint(tmp_path_factory.mktemp("ltx2") / kind, kind))


def make_ours(folder, **fields):
    """Return the state after each step."""
    pipe, states = load_pipeline(folder, "float32", mesh=(1, 1, 1)), []
    height, width, frames = SIZE
    request = GenerationRequest(prompt=PROMPT, seed=SEED, height=height, width=width, frames=frames, **fields)
    pipe.generate(request, on_step=lambda event: states.append(event.state))
    return states


def assert_close(state, expected):
    for ours, theirs in zip((np.asarray(state.latents), np.asarray(state.audio)), expected, strict=True):
        assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("kind", "has_image"),
    [
        pytest.param("ltx-2", False, marks=pytest.mark.long),
        ("ltx-2", True),
        pytest.param("ltx-2.3", False, marks=pytest.mark.long),
        pytest.param("ltx-2.3", True, marks=pytest.mark.long),
    ],
)
def test_guided_models_make_what_lightricks_makes(kind, has_image, folders):
    image = load_image(PHOTO) if has_image else None
    expected = Lightricks(folders(kind)).make_in_one_stage(PROMPT, DEFAULT_NEGATIVE_PROMPT, STEPS, SEED, SIZE, image)
    assert_close(make_ours(folders(kind), image=image, steps=STEPS)[-1], expected)


@pytest.mark.parametrize(
    ("kind", "has_image"),
    [
        pytest.param("ltx-2-distilled", True, marks=pytest.mark.long),
        pytest.param("ltx-2.3-distilled", False, marks=pytest.mark.long),
        ("ltx-2.3-distilled", True),
    ],
)
def test_both_stages_of_distilled_models_make_what_lightricks_makes(kind, has_image, folders):
    image = load_image(PHOTO) if has_image else None
    first, second = Lightricks(folders(kind)).make_in_two_stages(PROMPT, SEED, SIZE, image)
    states = make_ours(folders(kind), image=image)
    assert_close(states[7], first)
    assert_close(states[-1], second)
