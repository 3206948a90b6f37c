"""A model of one's own brings its defaults and presets in wan_tpu.json."""

import dataclasses
import json
import shutil

import pytest

from tests.conftest import ROOT
from wan_tpu import CheckpointError, GenerationRequest
from wan_tpu.families import open_spec
from wan_tpu.requested_adapter import RequestedAdapter


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("wan2.2-i2v-a14b"), tmp_path / "copy")


def test_a_model_of_ones_own_has_its_own_defaults(copy):
    published = open_spec(copy).defaults
    (copy / "wan_tpu.json").write_text('{"defaults": {"height": 64, "frames": 17, "guidance_scale": 3}}')
    own = open_spec(copy).defaults
    assert own == dataclasses.replace(published, height=64, frames=17, guidance_scale=3, guidance_scale_2=3)
    (copy / "wan_tpu.json").write_text('{"defaults": {"steps": null, "guidance_scale": 3, "guidance_scale_2": 2}}')
    assert open_spec(copy).defaults == dataclasses.replace(published, guidance_scale=3, guidance_scale_2=2)
    assert open_spec(ROOT / "examples" / "small-wan2.2-i2v").usual_sizes == [(64, 64)]


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"hight": 64}, "there is no setting hight; allowed: height, width"),
        ({"height": 65}, "height is 65"),
        ({"steps": "many"}, "steps"),
        ([64], "in defaults"),
    ],
)
def test_own_defaults_that_are_wrong_are_named(copy, defaults, message):
    (copy / "wan_tpu.json").write_text(json.dumps({"defaults": defaults}))
    with pytest.raises(CheckpointError, match=f"wan_tpu.json: .*{message}"):
        open_spec(copy)


def test_a_model_of_ones_own_has_its_own_presets(copy):
    preset = {
        "about": "in two steps",
        "source": "here",
        "settings": {"sigmas": [1, 0.5], "loras": ["./a.safetensors:0.5@high"]},
    }
    (copy / "wan_tpu.json").write_text(json.dumps({"presets": {"fast": preset}}))
    spec = open_spec(copy)
    request = spec.plan(GenerationRequest(preset="fast"), image="i2v" in spec.tasks).request
    assert (request.steps, request.sigmas) == (2, (1.0, 0.5))
    assert request.loras == (RequestedAdapter(f"{copy.resolve()}/a.safetensors", 0.5, "high"),)
    for wrong, message in (
        ({"about": "x"}, "presets fast must have the keys about, source and settings"),
        (preset | {"settings": {"prompt": "a"}}, "there is no setting prompt"),
        (preset | {"settings": {"sigmas": [2]}}, "in presets fast, sigmas"),
    ):
        (copy / "wan_tpu.json").write_text(json.dumps({"presets": {"fast": wrong}}))
        with pytest.raises(CheckpointError, match=message):
            open_spec(copy)
