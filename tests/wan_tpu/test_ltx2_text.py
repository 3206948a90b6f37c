"""The texts of LTX-2 for video and sound, against transformers' Gemma and diffusers' connectors."""

import dataclasses
import shutil

import diffusers
import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2 import connectors, gemma, text
from wan_tpu.families.ltx2.config import read_config
from wan_tpu.families.ltx2.published import PUBLISHED
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.components import Loaded, load_component
from wan_tpu.runtime.mesh import make_mesh

TOLERANCE = 1e-4  # Relative, root mean square.
PROMPTS = {
    "nothing": "",
    "words": "A cat looks into the camera, and birds sing.",
    "too long": "the sea and the wind " * 100,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    parts = {"connectors": {"rope_type": "interleaved"}, "text_encoder": {"sliding_window": 8}}
    return make_checkpoint(tmp_path_factory.mktemp("ltx2") / "checkpoint", "ltx-2", **parts)


def distance(ours, theirs):
    """Return the relative root mean square of a difference."""
    return np.sqrt(((ours - theirs) ** 2).mean() / (theirs**2).mean())


@torch.no_grad()
def test_interleaved_connectors_make_the_texts_of_diffusers(folder):
    """Whole runs against diffusers have the others."""
    pipeline = diffusers.LTX2Pipeline.from_pretrained(folder)
    config, mesh = read_config(Checkpoint(folder)), make_mesh((1, 1, 1), heads=4)
    tokenizer = Tokenizer(folder / "tokenizer", config.text_encoder["vocab_size"])
    parts = [
        load_component(Checkpoint(folder), component, "float32", mesh)
        for component in (gemma.text_encoder(config.text_encoder), connectors.connectors(config))
    ]

    @jax.jit
    def encode(params, ids, mask):
        return text.encode_prompt(*(Loaded(part.module, p) for part, p in zip(parts, params, strict=True)), ids, mask)

    for name, prompt in PROMPTS.items():
        ids, mask, cuts = text.tokenize_prompt(tokenizer, prompt)
        states, expected_mask, _, _ = pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)
        video, audio, _ = pipeline.connectors(states, expected_mask, padding_side=pipeline.tokenizer.padding_side)
        assert np.array_equal(mask, expected_mask.numpy())
        assert ["and the" in cut.end for cut in cuts] == [True] * (name == "too long")
        texts, count = encode([part.params for part in parts], ids, mask), max(1, mask.sum())
        for stream, expected in (("text", video.numpy()), ("audio_text", audio.numpy())):
            assert distance(texts[stream], expected) <= TOLERANCE
            # Registers outnumber the prompt's tokens, which come first; those must be right by themselves.
            assert distance(texts[stream][:, :count], expected[:, :count]) <= TOLERANCE
    assert encode._cache_size() == 1  # One program serves all prompts.


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
