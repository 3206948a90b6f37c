"""The texts of LTX-2 for video and sound, against transformers' Gemma and diffusers' connectors."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.children import run_on_devices
from tests.wan_tpu import ltx2_text_worker
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2 import connectors, gemma, text
from wan_tpu.families.ltx2.config import read_config
from wan_tpu.families.ltx2.published import PUBLISHED
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh

TOLERANCE = 1e-4  # Relative, root mean square.
PROMPTS = {
    "nothing": "",
    "a word": " cat\n",
    "words": "A cat looks into the camera, and birds sing.",
    "another script": "一只猫看着镜头, на заднем плане «море» 🌊",
    "too long": "the sea and the wind " * 100,
}


@dataclasses.dataclass
class Case:
    """A model with its small checkpoint's own settings. Published tokenizers put <bos> before every prompt."""

    kind: str
    connectors: dict
    window: int
    bos: bool


CASES = {
    "2.3": Case("ltx-2.3", {}, window=8, bos=True),
    "2.0": Case("ltx-2", {}, window=1024, bos=True),
    "2.5": Case("ltx-2.5", {}, window=8, bos=False),
    "interleaved": Case("ltx-2", {"rope_type": "interleaved"}, window=8, bos=False),
}


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    case = CASES[request.param]
    folder = make_checkpoint(
        tmp_path_factory.mktemp("ltx2") / "checkpoint",
        case.kind,
        connectors=case.connectors,
        text_encoder={"sliding_window": case.window},
    )
    file = folder / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_bos_token": case.bos}))
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    """Return a function that encodes a prompt as diffusers does: the mask and both texts."""
    pipeline = diffusers.LTX2Pipeline.from_pretrained(folder)

    @torch.no_grad()
    def encode(prompt):
        states, mask, _, _ = pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)
        video, audio, _ = pipeline.connectors(states, mask, padding_side=pipeline.tokenizer.padding_side)
        return mask.numpy(), {"text": video.numpy(), "audio_text": audio.numpy()}

    return encode


@pytest.fixture(scope="module")
def ours(folder):
    """Return the tokenizer, a function that encodes tokens, and the program behind it."""
    encode, program = ltx2_text_worker.open_encoder(folder, make_mesh((1, 1, 1), heads=4))
    return SimpleNamespace(tokenizer=ltx2_text_worker.open_tokenizer(folder), encode=encode, program=program)


def distance(ours, theirs):
    """Return the relative root mean square of a difference."""
    return np.sqrt(((ours - theirs) ** 2).mean() / (theirs**2).mean())


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_become_the_texts_that_diffusers_makes(name, folder, theirs, ours):
    ids, mask, cuts = text.tokenize_prompt(ours.tokenizer, PROMPTS[name])
    expected_mask, expected = theirs(PROMPTS[name])
    assert np.array_equal(mask, expected_mask)
    assert ids.shape == mask.shape == (1, 1024) and ids.dtype == mask.dtype == np.int32
    assert ["and the" in cut.end for cut in cuts] == [True] * (name == "too long")
    texts = ours.encode(ids, mask)
    assert texts.keys() == expected.keys()
    for stream, values in texts.items():
        assert values.shape == expected[stream].shape and values.dtype == np.float32
        assert distance(values, expected[stream]) <= TOLERANCE
        # Registers outnumber the prompt's tokens, which come first; those must be right by themselves.
        count = max(1, mask.sum())
        assert distance(values[:, :count], expected[stream][:, :count]) <= TOLERANCE
    assert ours.program._cache_size() == 1  # One program serves all prompts.


@pytest.mark.thorough
@pytest.mark.meshes
@pytest.mark.parametrize("folder", ["2.3", "2.5", pytest.param("2.0", marks=pytest.mark.thorough)], indirect=True)
def test_several_devices_make_the_texts_of_one(folder, tmp_path):
    run_on_devices("tests.wan_tpu.ltx2_text_worker", folder, PROMPTS["words"], tmp_path / "out.npz", count=8)
    texts = np.load(tmp_path / "out.npz")
    assert len(texts.files) == 6
    for name in texts.files:
        assert distance(texts[name], texts[f"{name.split()[0]} 1x1x1"]) <= TOLERANCE, name


@pytest.mark.parametrize("folder", ["2.3", pytest.param("2.0", marks=pytest.mark.thorough)], indirect=True)
def test_bfloat16_stays_within_its_bound(folder, ours):
    """Every block rounds the residual stream about three times, and some more happens on the way in and out."""
    blocks = 6 + 2  # Of Gemma and of the connectors.
    ids, mask, _ = text.tokenize_prompt(ours.tokenizer, PROMPTS["words"])
    encode, _ = ltx2_text_worker.open_encoder(folder, make_mesh((1, 1, 1), heads=4), "bfloat16")
    exact, count = ours.encode(ids, mask), mask.sum()
    for stream, values in encode(ids, mask).items():
        assert values.dtype.name == "bfloat16"
        error = distance(values[:, :count].astype(np.float32), exact[stream][:, :count])
        assert 0 < error <= np.sqrt(3 * blocks + 6) * 2**-8


@pytest.mark.parametrize("folder", ["2.0"], indirect=True)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", ""])
def test_weights_are_read_under_their_names_in_other_versions_of_transformers(prefix, folder, tmp_path):
    config, mesh = read_config(Checkpoint(folder)), make_mesh((1, 1, 1), heads=4)
    published = load_file(folder / "text_encoder" / "model.safetensors")
    marker = next(name for name in published if name.endswith("embed_tokens.weight")).removesuffix(
        "embed_tokens.weight"
    )
    renamed = {name.replace(marker, prefix) if name.startswith(marker) else name: x for name, x in published.items()}
    (tmp_path / "text_encoder").mkdir()
    shutil.copy(folder / "model_index.json", tmp_path)
    save_file(renamed, tmp_path / "text_encoder" / "model.safetensors")
    loaded = load_component(Checkpoint(tmp_path), gemma.text_encoder(config.text_encoder), "float32", mesh)
    assert np.array_equal(loaded.params["embed_tokens.weight"], published[f"{marker}embed_tokens.weight"])
    stacked = loaded.params["layers.template.1.mlp.up_proj.weight"]  # The second layer of each group of three.
    assert np.array_equal(stacked[1], published[f"{marker}layers.4.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("connectors", {"audio_connector_num_learnable_registers": None}, "None.*audio"),
        ("connectors", {"video_connector_num_learnable_registers": 100}, r"\b100\b.*video"),
        ("connectors", {"text_proj_in_factor": 26}, r"text_proj_in_factor 26\b.*num_hidden_layers 48\b.*\b49\b"),
        ("text_encoder", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_configurations_of_other_models_are_refused(part, change, message):
    config = PUBLISHED["ltx-2"]
    config = dataclasses.replace(config, **{part: getattr(config, part) | change})
    with pytest.raises(CheckpointError, match=message):
        connectors.connectors(config) if part == "connectors" else gemma.text_encoder(config.text_encoder)


@pytest.mark.parametrize(
    ("kind", "projected", "streams"),
    [("ltx-2.3", 4096 + 2048, (4096, 2048)), pytest.param("ltx-2", 3840, (3840, 3840), marks=pytest.mark.thorough)],
)
def test_operations_are_those_of_the_matrices(kind, projected, streams):
    """Gemma 3 12B has 10.77 G parameters in the matrices of its layers."""
    config, tokens = PUBLISHED[kind], text.TEXT_TOKENS
    layer = 3840 * (2 * 4096 + 2 * 2048 + 3 * 15360) + 2 * tokens * 4096
    expected = 48 * layer + 49 * 3840 * projected
    for stream, width in zip(("video", "audio"), streams, strict=True):
        heads = config.connectors[f"{stream}_connector_num_attention_heads"] * config.connectors[f"{stream}_gated_attn"]
        block = 12 * width**2 + heads * width + 2 * tokens * width
        expected += config.connectors[f"{stream}_connector_num_layers"] * block
    assert text.count_flops(config) == 2 * tokens * expected
