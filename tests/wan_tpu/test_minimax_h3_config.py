"""What MiniMax-H3's configuration files say: published ones are recognised, others are refused with a reason."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size
from PIL import Image

from tests.wan_tpu.minimax_h3_files import FILES, INDEX
from tests.wan_tpu.published_files import write
from wan_tpu import CheckpointError, Conditioning, GenerationRequest, InvalidRequest
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families import open_spec, published_spec
from wan_tpu.families.minimax_h3 import classes, published
from wan_tpu.families.minimax_h3.config import read_config
from wan_tpu.families.minimax_h3.published import PUBLISHED
from wan_tpu.families.model import published_model
from wan_tpu.families.shared import t5
from wan_tpu.plan import AUDIO, VIDEO
from wan_tpu.reference import Reference

MODEL = PUBLISHED["minimax-h3"]
SPEC = published_spec("minimax-h3")


@pytest.fixture
def folder(tmp_path):
    """Writes the published files, changed or not; `...` in place of a value: no such key, of a file: no such file."""

    def write_files(changed=None):
        files = dict(FILES)
        for file, values in (changed or {}).items():
            content = files.pop(file, {})
            if values is not ...:
                files[file] = {key: value for key, value in (content | values).items() if value is not ...}
        return write(tmp_path / "model", files)

    return write_files


# ---- The index of a modular pipeline.


@pytest.mark.parametrize("missing", ["model_index.json", "modular_model_index.json"])
def test_published_files_are_those_of_the_preset_with_either_index(missing, folder):
    """Its repository has both, of which diffusers writes the second one."""
    source = folder({missing: ...})
    checkpoint = Checkpoint(source)
    assert read_config(checkpoint) == MODEL
    assert published.recognise(MODEL) == open_spec(source).name == "minimax-h3"
    assert {name for name in INDEX if not name.startswith("_") and checkpoint.has(name)} == {
        *("text_encoder", "tokenizer", "processor", "transformer", "transformer_ref"),
        *("vae", "audio_vae", "scheduler", "audio_scheduler"),
    }
    assert not checkpoint.has("image_encoder")


def test_index_with_the_origin_goes_into_copies(folder):
    checkpoint = Checkpoint(folder({"model_index.json": ...}))
    others = checkpoint.read_small_files()
    assert json.loads(others["modular_model_index.json"])["_name_or_path"] == checkpoint.source
    assert "transformer/config.json" in others


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([None, None, {"subfolder": "vae"}], "has no vae; give a complete MiniMax-H3 checkpoint"),
        (["diffusers", "AutoencoderKLMiniMaxH3", {"subfolder": "FL2VA/vae"}], 'vae in the folder "FL2VA/vae"; move'),
        (["diffusers", None, {}], "has vae: .*give the name of a library and of a class"),
        (["diffusers", "AutoencoderKLMiniMaxH3", {}, {}], "has vae: .*give the name of a library and of a class"),
        (["diffusers", "AutoencoderKLWan", {}], "vae AutoencoderKLWan; supported: AutoencoderKLMiniMaxH3"),
    ],
)
def test_index_that_names_another_vae_is_refused(entry, message, folder):
    source = folder({"model_index.json": ..., "modular_model_index.json": {"vae": entry}})
    with pytest.raises(CheckpointError, match=message):
        read_config(Checkpoint(source))


# ---- What is left out, and what must not differ.


@pytest.mark.parametrize(
    ("kind", "ours", "published"),
    [
        (transformers.Qwen3VLTextModel, classes.TEXT, MODEL.text_encoder),
        (transformers.Qwen3VLVisionModel, classes.VISION, MODEL.vision),
    ],
)
def test_keys_that_qwen_s_file_lacks_have_the_class_s_defaults(kind, ours, published):
    config = json.loads(kind.config_class().to_json_string(use_diff=False))
    assert {key: config[key] for key in ours} == ours
    # The class reads them as it reads the file itself, whose names are those of an older version.
    part = "text_config" if kind is transformers.Qwen3VLTextModel else "vision_config"
    file = kind.config_class(**copy.deepcopy(FILES["text_encoder/config.json"][part]))
    with torch.device("meta"):
        small = t5.from_transformers(kind, published | {"num_hidden_layers": 1, "depth": 1})
    for key in published:
        if key not in ("num_hidden_layers", "depth"):
            assert getattr(small.config, key) == getattr(file, key), key


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"transformer/config.json": {"patch_size": [1, 1, 1]}}, r"patch_size \[1, 1, 1\]; supported: \[1, 2, 2\]"),
        ({"transformer/config.json": {"num_layers": "50"}}, "num_layers '50' in transformer/config.json"),
        ({"transformer/config.json": {"rope_freq_dim": 24}}, "rope_freq_dim 24; with .* 128 it must be at most 21"),
        ({"vae/config.json": {"clip_length": 33}}, "vae clip_length 33; supported: 17"),
        ({"vae/config.json": {"spatial_downsample_factors": [2, 2, 2, 1, 1, 1]}}, "8 in all; supported: 16"),
        ({"vae/config.json": {"latents_mean": [0.5]}}, "vae latents_mean of 1 numbers; with latent_channels 24"),
        ({"vae/config.json": {"latent_channels": 8, "latents_mean": [0.0] * 8, "latents_std": [1.0] * 8}},
         "the transformer has in_channels 24, but its counterpart has 8"),
        ({"audio_vae/config.json": {"sampling_rate": 44100}}, "800 samples a latent; .* 44100 it must be 1102.5"),
        ({"text_encoder/config.json": {"text_config": ...}}, "has no text_config, which Qwen3-VL's has"),
        ({"text_encoder/config.json": {"vision_config": {"out_hidden_size": 5120, "patch_size": 14}}}, "patch_size 14"),
    ],
)  # fmt: skip
def test_checkpoint_that_would_be_computed_otherwise_is_refused(changed, message, folder):
    with pytest.raises(CheckpointError, match=message):
        open_spec(folder(changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"}},
            "mrope_interleaved False; supported: True",
        ),
        ({"rope_scaling": {"mrope_section": [24, 20], "mrope_interleaved": True}}, "three numbers whose sum is 64"),
        ({"rope_theta": None}, "rope_theta None"),
        ({"attention_bias": True}, "attention_bias True; supported: False"),
        ({"hidden_size": 2048}, "out_hidden_size 5120 in its vision_config; it must be 2048"),
    ],
)
def test_text_encoder_that_would_be_computed_otherwise_is_refused(changed, message, folder):
    text = FILES["text_encoder/config.json"]["text_config"] | changed
    with pytest.raises(CheckpointError, match=message):
        open_spec(folder({"text_encoder/config.json": {"text_config": text}}))


# ---- Sampling.


@pytest.mark.parametrize("picture", [(9, 16), (1, 1), (21, 9), (431, 600)])
def test_sizes_of_other_shapes_are_those_of_diffusers(picture):
    height, width = picture
    assert SPEC.size_like(picture) == resolve_canvas_size(width, height, 32, 768, 768 * 1344)


@pytest.mark.parametrize(("width", "height"), [(401, 100), (100, 401)])
def test_image_that_is_longer_than_diffusers_allows_is_refused_unless_the_size_is_given(width, height):
    with pytest.raises(ValueError, match="supports aspect ratios from 1:4 to 4:1"):
        resolve_canvas_size(width, height, 32, 768, 768 * 1344)
    request = GenerationRequest(prompt="a cat", image=Image.new("RGB", (width, height)))
    with pytest.raises(InvalidRequest, match=f"{width}x{height}.* 1:4 .*4:1"):
        SPEC.plan(request)
    plan = SPEC.plan(dataclasses.replace(request, width=512, height=512))
    assert (plan.request.width, plan.request.height) == (512, 512)
    assert SPEC.size_like((100, 400)) == resolve_canvas_size(400, 100, 32, 768, 768 * 1344)


@pytest.mark.parametrize(
    ("preset", "video", "sound"),
    [
        ("turbo-4", [1, 18 / 19, 6 / 7, 2 / 3], [1, 0.9, 0.75, 0.5]),
        ("turbo-4-sla", [1, 18 / 19, 6 / 7, 2 / 3], [1, 0.9, 0.75, 0.5]),
        # FastVideo's own levels, by its program.
        ("fasth3", [11988 / 11989, 8988 / 9239, 12 / 13, 0.8], [2997 / 2998, 2247 / 2498, 0.75, 0.5]),
    ],
)
def test_distilled_presets_have_the_noise_levels_that_they_were_trained_with(preset, video, sound):
    request = SPEC.plan(GenerationRequest(prompt="a cat", preset=preset)).request
    schedules = SPEC.schedules(request)
    assert 1 - schedules[VIDEO].timesteps == pytest.approx(video, abs=1e-6)
    assert 1 - schedules[AUDIO].timesteps == pytest.approx(sound, abs=1e-6)
    assert [lora.path.count("/") for lora in request.loras] == [2 + (preset == "fasth3")]


@pytest.mark.parametrize("preset", ["turbo-4-sla", "fasth3-vsa"])
def test_an_adapter_in_place_of_a_presets_own_keeps_no_sparse_attention_unsaid(preset):
    own = SPEC.plan(GenerationRequest(prompt="a cat", preset=preset))
    copy = f"/adapters/{own.request.loras[0].path.rpartition('/')[2]}"
    for loras, warned in (([copy], 0), (["style.safetensors", copy], 0), (["style.safetensors"], 1)):
        plan = SPEC.plan(GenerationRequest(prompt="a cat", preset=preset, loras=loras))
        assert len(plan.warnings) - len(own.warnings) == warned
    assert not SPEC.plan(GenerationRequest(prompt="a cat", preset="turbo-4", loras=["style.safetensors"])).warnings


def test_video_sparse_attention_without_gates_is_refused():
    with pytest.raises(InvalidRequest) as refused:
        SPEC.plan(GenerationRequest(prompt="a cat", preset="fasth3-vsa", loras=[]))
    assert refused.value.field == "loras"
    assert SPEC.plan(GenerationRequest(prompt="a cat", preset="turbo-4-sla", loras=[])).warnings


@pytest.mark.thorough
def test_sparse_attention_has_a_step_of_its_own_with_fewer_operations():
    """At 362 frames, dense attention is most of a step."""
    sparse, dense = (
        SPEC.plan(GenerationRequest(prompt="a cat", frames=362, preset=preset)) for preset in ("turbo-4-sla", "turbo-4")
    )
    differing = {stage for stage, name in sparse.shapes.items() if name != dense.shapes[stage]}
    assert differing == {"denoise"}
    model = published_model("minimax-h3")
    operations = [model.count_step(plan.request, plan.experts[0], images=0) for plan in (sparse, dense)]
    attention = 4 * 56 * 128 * 50 * (107_856 + 1206 + 1024) ** 2
    assert operations[1] - operations[0] == int(0.85 * attention)


@pytest.mark.parametrize(
    ("preset", "grid"),
    [
        ({"preset": "turbo-8"}, {"steps": 8, "shift": 6.0}),
        ({"preset": "turbo-8-references", "references": [Reference("image", None, 64, 64)]}, {"steps": 8}),
        ({"preset": "turbo-4-references", "references": [Reference("image", None, 64, 64)]}, {"steps": 4}),
    ],
)
def test_turbo_is_the_shifted_grid(preset, grid):
    plans = [SPEC.plan(GenerationRequest(prompt="a cat", **fields)).request for fields in (preset, grid)]
    preset, grid = (SPEC.schedules(request) for request in plans)
    for part in (VIDEO, AUDIO):
        assert preset[part].timesteps == pytest.approx(grid[part].timesteps, abs=1e-6)


@pytest.mark.parametrize("own", [{"fps": 30}, {"guidance_scale": 4}])
def test_own_defaults_that_have_no_effect_are_refused(own, folder):
    source = folder({"wan_tpu.json": {"defaults": own}})
    with pytest.raises(CheckpointError, match=f"defaults.*{next(iter(own))}"):
        open_spec(source)


def test_own_defaults_that_have_an_effect_are_those_of_requests(folder):
    source = folder({"wan_tpu.json": {"defaults": {"fps": 24, "shift": 6, "generate_audio": False}}})
    plan = open_spec(source).plan(GenerationRequest(prompt="a cat"))
    assert (plan.request.shift, plan.has_sound) == (6, False)


# ---- Keyframes.

WIDE, TALL = Image.new("RGB", (30, 20)), Image.new("RGB", (20, 30))
KEYFRAMES = [{"image": WIDE}, {"last_image": WIDE}, {"image": WIDE, "last_image": TALL}]


@pytest.mark.parametrize("images", KEYFRAMES, ids=lambda images: " and ".join(images))
def test_video_has_the_shape_of_its_first_keyframe(images):
    plan = SPEC.plan(GenerationRequest(prompt="a cat", **images))
    assert (plan.images, plan.has_image, plan.prompts) == (len(images), True, ())
    expected = resolve_canvas_size(*WIDE.size, 32, 768, 768 * 1344)
    assert (plan.request.height, plan.request.width) == expected


def test_only_another_number_of_keyframes_takes_other_programs():
    first, last, both = (SPEC.plan(GenerationRequest(height=64, width=96, **images)).shapes for images in KEYFRAMES)
    assert first == last
    assert {stage for stage in both if both[stage] != first[stage]} == {"encoder", "denoise"}


@pytest.mark.parametrize(("anchors", "expected"), [([0], (True, False)), ([1], (False, True)), ([0, 1], (True, True))])
def test_files_between_stages_say_which_keyframes_there_are(anchors, expected):
    latents = np.zeros((1, 8, len(anchors), 4, 6), np.float32)
    conditioning = Conditioning({"anchors": np.array([anchors], np.int32)}, image_latents=latents)
    assert (conditioning.has_image, conditioning.has_last_image) == expected


@pytest.mark.parametrize("images", KEYFRAMES, ids=lambda images: " and ".join(images))
def test_preset_distilled_from_text_alone_takes_no_keyframes(images):
    request = GenerationRequest(prompt="a cat", preset="fasth3", **images)
    with pytest.raises(InvalidRequest, match=r"image.*fasth3.*turbo-4.*turbo-8"):
        SPEC.plan(request)
    assert SPEC.plan(GenerationRequest(prompt="a cat", preset="turbo-4", **images)).images == len(images)
