"""Helios' checkpoints: how they are recognised, and that every tensor of the transformer is read once."""

import dataclasses
import inspect
import json
import re
import shutil

import diffusers
import pytest

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.helios.config import read_config
from wan_tpu.families.helios.published import CUSTOM, PUBLISHED, TRANSFORMER, defaults, recognise
from wan_tpu.families.helios.small import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("helios"), "helios-distilled", transformer={"is_amplify_history": True}
    )


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_model_is_recognised_by_its_configuration(kind):
    assert recognise(PUBLISHED[kind]) == kind
    other = dataclasses.replace(PUBLISHED[kind], transformer=TRANSFORMER | {"num_layers": 30})
    assert recognise(other) == CUSTOM
    assert defaults(other).guidance_scale == defaults(PUBLISHED[kind]).guidance_scale


def test_omitted_keys_have_the_defaults_of_diffusers():
    parameters = inspect.signature(diffusers.HeliosTransformer3DModel.__init__).parameters
    theirs = {name: parameter.default for name, parameter in parameters.items() if name in TRANSFORMER}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in theirs.items()} == TRANSFORMER


def test_configuration_is_read_from_a_checkpoint(folder):
    config = read_config(Checkpoint(folder))
    assert config.pyramid == PUBLISHED["helios-distilled"].pyramid
    assert config.distilled and not config.scaled_guidance


def test_shifts_are_read_from_the_schedulers_file_as_pipelines_do(folder, tmp_path):
    shutil.copytree(folder / "scheduler", tmp_path / "scheduler")
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_shift": 0.7, "max_image_seq_len": 8192}))
    theirs = diffusers.HeliosDMDScheduler.from_pretrained(tmp_path / "scheduler").config
    for other in ("transformer", "text_encoder", "vae", "tokenizer", "model_index.json"):
        (tmp_path / other).symlink_to(folder / other)
    pyramid = read_config(Checkpoint(tmp_path)).pyramid
    assert (pyramid.shifts, pyramid.shift_tokens) == ((0.7, 1.15), (256, 8192))
    assert (theirs.base_shift, theirs.max_image_seq_len) == (0.7, 8192)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("transformer/config.json", "zero_history_timestep", False),
        ("transformer/config.json", "rope_dim", [4, 4]),
        ("scheduler/scheduler_config.json", "_class_name", "UniPCMultistepScheduler"),
        ("model_index.json", "is_distilled", False),
        ("scheduler/scheduler_config.json", "stages", 4),
        ("scheduler/scheduler_config.json", "time_shift_type", "square"),
    ],
)
def test_checkpoint_that_would_give_another_video_is_refused(folder, file, key, value):
    path = folder / file
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {key: value}))
    try:
        with pytest.raises(CheckpointError, match=re.escape(str(value))):
            read_config(Checkpoint(folder))
    finally:
        path.write_text(before)
