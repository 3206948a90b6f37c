"""What LTX-2's configuration files say: published ones are recognised, and others are refused with a reason."""

import dataclasses

import pytest
from diffusers.pipelines.ltx2 import utils

from tests.wan_tpu.ltx2_files import LTX_REPOSITORIES
from tests.wan_tpu.published_files import write
from wan_tpu import CheckpointError
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.ltx2 import published
from wan_tpu.families.ltx2.config import MODELS, read_config
from wan_tpu.families.ltx2.published import PUBLISHED

DEV, DISTILLED = "diffusers/LTX-2.3-Diffusers", "diffusers/LTX-2.3-Distilled-Diffusers"
NAMES = {
    "Lightricks/LTX-2": "ltx-2",
    "rootonchair/LTX-2-19b-distilled": "ltx-2-distilled",
    DEV: "ltx-2.3",
    DISTILLED: "ltx-2.3-distilled",
}


@pytest.fixture
def read(tmp_path):
    """Reads a repository's files, changed or not; `...` in place of a value: no such key, of a file: no such file."""

    def read_files(repository, changed=None, name="model"):
        files = dict(LTX_REPOSITORIES[repository])
        for file, values in (changed or {}).items():
            content = files.pop(file, {})
            if values is not ...:
                files[file] = {key: value for key, value in (content | values).items() if value is not ...}
        return read_config(Checkpoint(write(tmp_path / name, files)))

    return read_files


@pytest.mark.parametrize(("repository", "name"), NAMES.items())
def test_published_files_are_those_of_a_preset(repository, name, read):
    """Settings for sampling are in test_original.py and test_published_files.py."""
    config = read(repository)
    assert published.recognise(config) == name
    # Gemma's file leaves out what its class says, and LTX-2.3 has its upsampler with the distilled model.
    same = dataclasses.replace(config, text_encoder=PUBLISHED[name].text_encoder)
    if repository == DEV:
        same = dataclasses.replace(same, upsampler=PUBLISHED[name].upsampler)
    assert same == PUBLISHED[name]
    assert {key: PUBLISHED[name].text_encoder[key] for key in config.text_encoder} == config.text_encoder


def test_names_that_wan_tpu_json_may_have_are_the_presets():
    assert tuple(PUBLISHED) == MODELS
    # LTX-2.5's files can be read only by who has accepted its licence.
    assert {*NAMES.values(), "ltx-2.5", "ltx-2.5-distilled"} == set(PUBLISHED)
    assert set(NAMES) == set(LTX_REPOSITORIES)
    assert all(published.recognise(config) == name for name, config in PUBLISHED.items())


def test_negative_prompt_is_lightricks_and_diffusers_has_none():
    """diffusers keeps theirs as a constant, which its pipelines don't use."""
    for kind, config in PUBLISHED.items():
        expected = "" if kind.endswith("distilled") else utils.DEFAULT_NEGATIVE_PROMPT
        own = published.defaults(config).negative_prompt
        if kind == "ltx-2.5":  # It begins with more than diffusers' constant.
            assert own.startswith("has_subtitles, ")
            own = own[-len(expected) :]
        assert own == expected
        assert published.diffusers_defaults(config).negative_prompt == ""


def test_sampling_settings_are_those_of_diffusers():
    assert list(published.DISTILLED_SIGMAS) == utils.DISTILLED_SIGMA_VALUES
    assert list(published.SECOND_STAGE_SIGMAS) == utils.STAGE_2_DISTILLED_SIGMA_VALUES


@pytest.mark.parametrize(
    ("repository", "name", "distilled"),
    [
        # The scheduler decides, since it is right for one of the two only.
        (DISTILLED, "ltx-2.3-dev", True),
        # A distilled model with the other's scheduler is known by its name, the nearest part of it first.
        (DEV, "distilled/ltx-2.3-dev", False),
        (DEV, "dev/LTX-2.3-Distilled", True),
        (DEV, "models--diffusers--LTX-2.3-Distilled-Diffusers/snapshots/8823af45", True),
        (DEV, "LTX-2.3-device", False),
    ],
)
def test_scheduler_or_name_says_what_is_distilled(repository, name, distilled, read):
    assert read(repository, name=name).distilled == distilled


def test_wan_tpu_json_says_what_is_distilled(read):
    assert read(DEV, {"wan_tpu.json": {"model": "ltx-2.3-distilled"}}).distilled
    assert not read(DISTILLED, {"wan_tpu.json": {"model": "ltx-2.3"}}, "other").distilled


def test_distilled_model_without_an_upsampler_makes_smaller_videos(read):
    config = read(DISTILLED, {"latent_upsampler/config.json": ...})
    assert config.upsampler is None
    defaults = published.defaults(config)
    assert published.recognise(config) == "ltx-2.3-distilled"
    assert (defaults.height, defaults.width, defaults.steps) == (512, 768, 8)


TRANSFORMER_FILE = "transformer/config.json"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        # A part of LTX-2.5 alone.
        ({"model_index.json": {"text_encoder": ["transformers", "Gemma4UnifiedForConditionalGeneration"]}},
         "text_encoder Gemma4UnifiedForConditionalGeneration.*LTX-2.3.*Gemma3ForConditionalGeneration"),
        ({TRANSFORMER_FILE: {"ff_bias": False}}, "text_encoder Gemma3.*LTX-2.5.*Gemma4"),
        ({TRANSFORMER_FILE: {"use_keyframes_abs_pos_embedding": True}}, "use_keyframes_abs_pos_embedding True"),
        # What neither version is.
        ({TRANSFORMER_FILE: {"gated_attn": False}}, "gated_attn False.*audio_gated_attn True.*LTX-2.0"),
        ({TRANSFORMER_FILE: {"rope_type": ...}}, "transformer rope_type 'interleaved'.*'split'"),
        ({TRANSFORMER_FILE: {"num_layers": "48"}}, "num_layers '48'.*transformer/config.json"),
        ({"audio_vae/config.json": {"causality_axis": "width"}}, "causality_axis 'width'.*'height'"),
        ({"audio_vae/config.json": {"mel_bins": 32}}, r"audio_in_channels 128\b.*\b32\b mel_bins.*\b64\b"),
        ({"scheduler/scheduler_config.json": {"use_karras_sigmas": True}}, "use_karras_sigmas True"),
        ({"model_index.json": {"vocoder": [None, None]}}, "vocoder.*LTX-2"),
        ({"text_encoder/config.json": {"text_config": ...}}, "text_config"),
        ({"wan_tpu.json": {"decoder": "magic"}}, "decoder 'magic'.*convolutional.*diffusion"),
        ({"wan_tpu.json": {"decoder": "diffusion"}}, "no diffusion_decoder"),
        ({"wan_tpu.json": {"model": "ltx-3"}}, "model 'ltx-3'.*ltx-2.*ltx-2-distilled"),
        ({"wan_tpu.json": {"model": "ltx-2"}}, "model 'ltx-2'.*LTX-2.3"),
    ],
)  # fmt: skip
def test_checkpoint_that_would_be_computed_otherwise_is_refused(changed, message, read):
    with pytest.raises(CheckpointError, match=message):
        read(DEV, changed)
