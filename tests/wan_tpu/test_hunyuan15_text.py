"""HunyuanVideo-1.5's embeddings of prompts and images, against diffusers' pipelines."""

import diffusers
import jax
import numpy as np
import pytest
import torch

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.hunyuan15 import components, text
from wan_tpu.families.hunyuan15.small import make_checkpoint
from wan_tpu.families.hunyuan15.spec import HunyuanSpec
from wan_tpu.families.shared.tokenizing import Tokenizer, tokenize
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh

PROMPTS = {
    "nothing": "",
    "words": "A cat looks into the camera.",
    "quoted": 'A neon sign says "OPEN ALL NIGHT", below it “Café” and once more "OPEN ALL NIGHT".',
    "another script": "一只猫看着镜头, на заднем плане «море».",
    "too long": "word " * 2000 + 'and "a quote"' + ' "very long quote"' * 40,
    "a long quote": 'A sign: "' + "long " * 100 + '"',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hunyuan15") / "checkpoint", "hunyuanvideo1.5-480p-i2v")


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.DiffusionPipeline.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizers(folder):
    return {"text": Tokenizer(folder / "tokenizer", 259), "glyphs": Tokenizer(folder / "tokenizer_2", 384)}


@pytest.fixture(scope="module")
def run(folder):
    """Returns a function that runs a component's function on arrays."""
    checkpoint, mesh = Checkpoint(folder), make_mesh((1, 1, 1), heads=4)
    config = HunyuanSpec.open(checkpoint).config
    kinds = {"text": components.text_encoder, "glyphs": components.glyph_encoder, "image": components.image_encoder}
    loaded = {name: load_component(checkpoint, kind(config), "float32", mesh) for name, kind in kinds.items()}

    def run(name, function, *args):
        run_it = jax.jit(lambda params, *args: function(loaded[name].module, params, *args))
        return np.asarray(run_it(loaded[name].params, *args))

    return run


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_embedded_as_diffusers_does(name, tokenizers, theirs, run):
    prompt = PROMPTS[name]
    with torch.no_grad():
        expected, mask, glyphs, glyph_mask = (array.numpy() for array in theirs.encode_prompt(prompt, device="cpu"))
    ids, ours, cuts = text.tokenize_prompt(tokenizers["text"], prompt)
    assert np.array_equal(ours[:, 108:], mask)
    assert [cut.read for cut in cuts] == [1000] * (name == "too long")
    embedded, read = run("text", text.encode_prompt, ids, ours), mask[0] > 0
    assert embedded.shape == expected.shape
    assert np.abs(embedded - expected)[:, read].max() <= 1e-4 * np.abs(expected[:, read]).max()
    quoted = text.tokenize_glyphs(tokenizers["glyphs"], prompt)
    assert (quoted is None) == (not glyph_mask.any())
    if quoted is not None:
        ids, ours, warnings = quoted
        assert np.array_equal(ours, glyph_mask)
        assert bool(warnings) == (name == "a long quote")
        embedded = run("glyphs", text.encode_glyphs, ids, ours)
        read = glyph_mask[0] > 0
        assert np.abs(embedded - glyphs)[:, read].max() <= 1e-4 * np.abs(glyphs[:, read]).max()


def test_missing_tokenizer_is_named(tmp_path, folder):
    with pytest.raises(CheckpointError, match="tokenizer"):
        text.tokenize_prompt(Tokenizer(tmp_path, 384), "a cat")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    with pytest.raises(CheckpointError, match=r"\b1 words.*\b384\b"):
        tokenize(Tokenizer(tmp_path, 384), "a cat", 16)
    with pytest.raises(CheckpointError, match=r"token 119.* 100"):
        tokenize(Tokenizer(folder / "tokenizer_2", 100), "a cat", 16)
