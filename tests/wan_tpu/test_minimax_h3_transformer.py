"""MiniMax-H3's transformer, against diffusers' module and the layout of its pipeline's sequence."""

import re

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_minimax_h3
from diffusers.modular_pipelines.minimax_h3 import before_denoise as reference
from safetensors.torch import load_file

from tests.children import run_on_devices
from tests.wan_tpu.minimax_h3_reference import attend_sparsely, attend_to_tiles, relative
from tests.wan_tpu.minimax_h3_worker import KINDS, Lists, Predictor
from wan_tpu.families.minimax_h3 import components
from wan_tpu.families.minimax_h3.fasth3 import FastH3
from wan_tpu.families.minimax_h3.small import make_checkpoint
from wan_tpu.ops.sparse_linear import Density
from wan_tpu.ops.video_sparse import Sparsity
from wan_tpu.runtime.mesh import make_mesh

SOUND = 10  # Both channels' latents.
DENSITY, ANCHORS = 0.3, ("first", "last")
FASTH3 = FastH3(0.8, (0.999, 0.5))
TIMES = 0.25, 0.5, 0.999  # Of the video and the text, the sound, keyframes.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("h3") / "model")


@pytest.fixture(scope="module")
def theirs(folder):
    module = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(folder / "transformer")
    return module.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """A checkpoint with gates, and diffusers' module with them."""
    folder = make_checkpoint(tmp_path_factory.mktemp("h3") / "fasth3", fasth3=FASTH3)
    module = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(folder / "transformer")
    components.add_gates(module)
    module.load_state_dict(load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors"))
    return folder, module.eval().requires_grad_(False)


def draw_inputs(config, *, words, anchors, vision, grid, padded):
    """Draw a sequence with a text of `words` real rows and `vision` rows of images, which come after two words."""
    rng = np.random.default_rng(0)

    def draw_normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    images = np.arange(2, 2 + vision)
    others = np.setdiff1d(np.arange(vision + words), images)
    return {
        "video": draw_normal(1, config.in_channels, *grid),
        "sound": draw_normal(SOUND, config.audio_in_channels),
        "text": draw_normal(vision + padded, config.text_dim),
        "positions": np.concatenate([images, others, np.arange(vision + words, vision + padded)]).astype(np.int32),
        "count": np.int32(vision + words),
        "vision": np.int32(vision),
        "anchors": np.array(anchors, str),
        "times": np.float32(TIMES),
        "keyframes": draw_normal(1, config.in_channels, len(anchors), *grid[1:]),
    }


@torch.no_grad()
def predict_theirs(theirs, inputs):
    """Return what diffusers computes for the same rows, in its own order."""
    patch, count = theirs.config.patch_size, int(inputs["count"])
    order = inputs["positions"][:count]
    text = torch.from_numpy(inputs["text"][:count])[torch.from_numpy(np.argsort(order))]
    tags = torch.ones(count, dtype=torch.long)
    tags[torch.from_numpy(order[: int(inputs["vision"])]).long()] = 0
    layout = reference.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags, *inputs["video"].shape[2:], SOUND // 2, patch, 2, 2, 0, tuple(map(str, inputs["anchors"]))
    )
    places, tags, video_indices, audio_indices, text_indices, keyframes, _ = layout
    times, indices = reference.MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video_indices, audio_indices, keyframes, 0, count, TIMES[0], TIMES[1], TIMES[2], 1.0
    )
    parts = (torch.from_numpy(inputs[name]) for name in ("keyframes", "video"))
    rows = torch.cat([reference.patchify_video_latents(part, patch) for part in parts])
    video, sound = theirs(
        hidden_states=rows[None],
        audio_hidden_states=torch.from_numpy(inputs["sound"])[None],
        encoder_hidden_states=text[None],
        timestep=times,
        timestep_indices=indices,
        token_tags=tags,
        position_ids=places,
        video_indices=video_indices,
        audio_indices=audio_indices,
        text_indices=text_indices,
        return_dict=False,
    )
    return video[0, keyframes:].numpy(), sound[0].numpy()


def test_sparse_attention_is_lightx2vs(theirs, folder, monkeypatch):
    """Blocks are of the sequence in its authors' order. Texts of any length share a program, and are refined so."""
    made, published = Lists(), Lists()
    attend = attend_sparsely(DENSITY, record=published.add)
    monkeypatch.setattr(transformer_minimax_h3, "dispatch_attention_fn", attend)
    ours = Predictor(folder, make_mesh((1, 1, 1), heads=8), sparse=Density(DENSITY))
    with made.record():
        for words in (7, 150):
            inputs = draw_inputs(theirs.config, words=words, anchors=ANCHORS, vision=90, grid=(12, 8, 12), padded=256)
            for actual, expected in zip(ours.predict(inputs), predict_theirs(theirs, inputs), strict=True):
                assert relative(actual, expected) < 1e-5
    assert ours.compiled == 1
    np.testing.assert_array_equal(made.table, published.table)


def test_video_sparse_attention_is_fastvideos(gated):
    """With boxes of every size, a text that isn't whole tiles, and rows of images in it."""
    folder, theirs = gated
    ours = Predictor(folder, make_mesh((1, 1, 1), heads=8), sparse=Sparsity(0.8))
    for words in (7, 150):
        inputs = draw_inputs(theirs.config, words=words, anchors=ANCHORS, vision=90, grid=(12, 14, 18), padded=256)
        with attend_to_tiles(theirs, 0.8, (12, 7, 9), keyframes=len(ANCHORS) * 63, sound=SOUND):
            expected = predict_theirs(theirs, inputs)
        for actual, part in zip(ours.predict(inputs), expected, strict=True):
            assert relative(actual, part) < 1e-5
    assert ours.compiled == 1


def test_weights_are_in_float32_where_diffusers_keeps_them(folder):
    theirs = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
    expected = {
        re.sub(r"^transformer_blocks\.\d+", "transformer_blocks.template", name): str(value.dtype).removeprefix(
            "torch."
        )
        for name, value in (*theirs.named_parameters(), *theirs.named_buffers())
    }
    assert Predictor(folder, make_mesh((1, 1, 1), heads=8), "bfloat16").kinds == expected


@pytest.mark.meshes
def test_eight_devices_predict_as_diffusers_lightx2v_and_fastvideo_do(theirs, folder, gated, tmp_path, monkeypatch):
    inputs = draw_inputs(theirs.config, words=150, anchors=("first",), vision=90, grid=(12, 8, 12), padded=256)
    np.savez(tmp_path / "inputs.npz", **inputs)
    files = tmp_path / "inputs.npz", tmp_path / "predictions.npz"
    run_on_devices("tests.wan_tpu.minimax_h3_worker", folder, gated[0], *files, count=8)
    predictions = dict(np.load(tmp_path / "predictions.npz"))
    expected, published = {"float32": predict_theirs(theirs, inputs)}, Lists()
    with attend_to_tiles(gated[1], KINDS["tiles"].value, (12, 4, 6), keyframes=24, sound=SOUND):
        expected["tiles"] = predict_theirs(gated[1], inputs)
    attend = attend_sparsely(DENSITY, record=published.add)
    monkeypatch.setattr(transformer_minimax_h3, "dispatch_attention_fn", attend)
    expected["sparse"] = predict_theirs(theirs, inputs)
    for index, name in enumerate(("video", "sound")):
        for kind, parts in expected.items():
            assert relative(predictions[f"{kind} {name}"], parts[index]) < 1e-4
        assert relative(expected["sparse"][index], expected["float32"][index]) > 1e-3
        assert relative(predictions[f"int8 {name}"], expected["float32"][index]) < 0.15
    np.testing.assert_array_equal(predictions["lists"], published.table)
