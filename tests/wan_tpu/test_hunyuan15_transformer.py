"""HunyuanVideo-1.5's transformer, against diffusers' module."""

import functools

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.children import run_on_devices
from tests.wan_tpu import hunyuan15_worker
from wan_tpu.families.hunyuan15.context import Encodings, embed_time, make_context
from wan_tpu.families.hunyuan15.published import PUBLISHED
from wan_tpu.families.hunyuan15.small import _TRANSFORMER, make_checkpoint
from wan_tpu.runtime.bridge import call, to_torch
from wan_tpu.runtime.mesh import make_mesh

TEXT, GLYPHS, IMAGE = 20, 7, 9
RNG = np.random.default_rng(0)


def draw_normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module", params=[False, True], ids=["", "meanflow"])
def theirs(request):
    torch.manual_seed(0)
    settings = PUBLISHED["hunyuanvideo1.5-480p-i2v"].transformer | _TRANSFORMER | {"use_meanflow": request.param}
    return diffusers.HunyuanVideo15Transformer3DModel.from_config(settings).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def ours(theirs):
    """Return a program for prompts of any length: our context [B, tokens, C] and [B], and embedded time [B, C]."""

    @jax.jit
    def program(params, encodings, timestep, following):
        def method(module):
            context, count = make_context(module, encodings, timestep)
            return to_torch((context, count, embed_time(module, timestep, following, torch.float32)))

        return call(theirs, params, method)

    params = {name: jnp.asarray(value.numpy()) for name, value in theirs.named_parameters()}
    return functools.partial(program, params)


@pytest.mark.parametrize(
    ("text", "glyphs", "image"),
    [((20, 3), (7, 0), False), ((20, 3), (7, 0), True), ((1, 20), (0, 0), False), ((5, 6), (1, 7), True)],
)
def test_context_equals_that_of_diffusers_without_padding(text, glyphs, image, theirs, ours):
    """Two branches of different lengths run through one program."""
    seen = {}

    def look(module, args):
        seen["hidden"], seen["context"], seen["time"], seen["mask"] = args[:4]

    hook = theirs.transformer_blocks[0].register_forward_pre_hook(look)
    embeddings, glyph_embeddings = draw_normal(2, TEXT, 32), draw_normal(2, GLYPHS, 24)
    pictures = draw_normal(1, IMAGE, 16)
    masks = [np.arange(length) < np.array(counts)[:, None] for length, counts in ((TEXT, text), (GLYPHS, glyphs))]
    following = torch.tensor([300.0, 300.0]) if theirs.config.use_meanflow else None
    theirs(
        torch.from_numpy(draw_normal(2, 9, 1, 2, 3)), torch.tensor([640.5, 640.5]), torch.from_numpy(embeddings),
        torch.from_numpy(masks[0].astype(np.float32)), following, torch.from_numpy(glyph_embeddings),
        torch.from_numpy(masks[1].astype(np.float32)),
        torch.from_numpy(np.repeat(pictures, 2, 0) if image else np.zeros((2, IMAGE, 16), np.float32)),
    )  # fmt: skip
    hook.remove()

    counts = [np.asarray(lengths, np.int32) for lengths in (text, glyphs)]
    encodings = Encodings(embeddings, counts[0], glyph_embeddings, counts[1], pictures if image else None)
    context, count, time = map(np.asarray, ours(encodings, np.float32([640.5]), np.float32([300.0])))
    assert count.tolist() == [t + g + image * IMAGE for t, g in zip(text, glyphs, strict=True)]
    for branch, number in enumerate(count.tolist()):
        expected = seen["context"][branch].numpy()
        assert seen["mask"][branch].sum() == number
        assert np.abs(context[branch, :number] - expected[:number]).max() <= 1e-5 * np.abs(expected).max()
        assert not np.asarray(context[branch, number:]).any()
        assert np.abs(time[0] - seen["time"][branch].numpy()).max() <= 1e-5


KINDS = ["hunyuanvideo1.5-480p-i2v", "hunyuanvideo1.5-480p-i2v-step-distilled"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hunyuan15") / request.param, request.param)


def inputs():
    """Latents, and two branches of other lengths."""
    return draw_normal(1, 9, 3, 3, 5), {
        "text": draw_normal(2, TEXT, 32),
        "text_tokens": np.array([6, 20], np.int32),
        "glyphs": draw_normal(2, GLYPHS, 24),
        "glyph_tokens": np.array([7, 0], np.int32),
        "image": draw_normal(1, IMAGE, 16),
    }


def test_each_branch_is_predicted_as_diffusers_does(folder):
    latents, encodings = inputs()
    model = diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(folder / "transformer").eval()
    predictions = hunyuan15_worker.predict(folder, make_mesh((1, 1, 1), heads=4), latents, encodings)
    for branch in range(2):
        parts = {name: torch.from_numpy(encodings[name][branch : branch + 1]) for name in ("text", "glyphs")}
        counts = {name: int(encodings[name][branch]) for name in ("text_tokens", "glyph_tokens")}
        with torch.no_grad():
            expected = model(
                torch.from_numpy(latents),
                torch.tensor([hunyuan15_worker.TIMESTEP]),
                parts["text"],
                (torch.arange(TEXT) < counts["text_tokens"])[None].float(),
                torch.tensor([hunyuan15_worker.FOLLOWING]) if model.config.use_meanflow else None,
                parts["glyphs"],
                (torch.arange(GLYPHS) < counts["glyph_tokens"])[None].float(),
                torch.from_numpy(encodings["image"]),
            ).sample[0].numpy()  # fmt: skip
        assert np.abs(predictions[branch] - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.meshes
@pytest.mark.long
@pytest.mark.parametrize("folder", KINDS[:1], indirect=True)
@pytest.mark.parametrize("precisions", ["float32", pytest.param("float32,int8", marks=pytest.mark.thorough)])
def test_eight_devices_predict_what_one_does(precisions, folder, tmp_path):
    latents, encodings = inputs()
    file, out = tmp_path / "inputs.npz", tmp_path / "predictions.npz"
    np.savez(file, latents=latents, **encodings)
    run_on_devices("tests.wan_tpu.hunyuan15_worker", folder, file, out, precisions, count=8)
    predictions = np.load(out)
    assert len(predictions.files) == 2 * len(precisions.split(","))  # One device and several.
    for name in predictions.files:
        precision, _ = name.split()
        alone = predictions[f"{precision} 1x1x1"]
        # In 8 bits sums in another order round to other numbers of bfloat16, and those to others of int8.
        tolerance = {"float32": 1e-4, "int8": 0.02}[precision]
        assert np.abs(predictions[name] - alone).max() <= tolerance * np.abs(alone).max(), name
    if "int8" not in precisions:
        return
    far = np.abs(predictions["int8 1x1x1"] - predictions["float32 1x1x1"]).max()
    assert 1e-4 < far / np.abs(predictions["float32 1x1x1"]).max() < 0.05
