"""HunyuanVideo-1.5's transformer, against diffusers' module."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from wan_tpu.families.hunyuan15.context import Given, context, embed_time
from wan_tpu.families.hunyuan15.presets import PRESETS
from wan_tpu.families.hunyuan15.small import _TRANSFORMER
from wan_tpu.runtime.bridge import call, to_torch

TEXT, GLYPHS, IMAGE = 20, 7, 9
RNG = np.random.default_rng(0)


def drawn(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module", params=[False, True], ids=["", "meanflow"])
def theirs(request):
    torch.manual_seed(0)
    settings = PRESETS["hunyuanvideo1.5-480p-i2v"].transformer | _TRANSFORMER | {"use_meanflow": request.param}
    return diffusers.HunyuanVideo15Transformer3DModel.from_config(settings).eval().requires_grad_(False)


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize(("text", "glyphs"), [((20, 3), (7, 0)), ((1, 20), (0, 0)), ((5, 6), (1, 7))])
def test_the_context_is_that_of_diffusers_without_what_is_not_there(text, glyphs, image, theirs):
    """Two branches of other lengths, through one program."""
    seen = {}

    def look(module, args):
        seen["hidden"], seen["context"], seen["time"], seen["mask"] = args[:4]

    hook = theirs.transformer_blocks[0].register_forward_pre_hook(look)
    embeddings, glyph_embeddings = drawn(2, TEXT, 32), drawn(2, GLYPHS, 24)
    pictures = drawn(1, IMAGE, 16)
    masks = [np.arange(length) < np.array(counts)[:, None] for length, counts in ((TEXT, text), (GLYPHS, glyphs))]
    following = torch.tensor([300.0, 300.0]) if theirs.config.use_meanflow else None
    theirs(
        torch.from_numpy(drawn(2, 9, 1, 2, 3)), torch.tensor([640.5, 640.5]), torch.from_numpy(embeddings),
        torch.from_numpy(masks[0].astype(np.float32)), following, torch.from_numpy(glyph_embeddings),
        torch.from_numpy(masks[1].astype(np.float32)),
        torch.from_numpy(np.repeat(pictures, 2, 0) if image else np.zeros((2, IMAGE, 16), np.float32)),
    )  # fmt: skip
    hook.remove()

    @jax.jit
    def ours(params, given, timestep, following):
        def method(module):
            found, count = context(module, given, timestep)
            return to_torch((found, count, embed_time(module, timestep, following, torch.float32)))

        return call(theirs, params, method)

    params = {name: jnp.asarray(value.numpy()) for name, value in theirs.named_parameters()}
    counts = [jnp.asarray(one, jnp.int32) for one in (text, glyphs)]
    given = Given(embeddings, counts[0], glyph_embeddings, counts[1], pictures if image else None)
    found, count, time = ours(params, jax.tree.map(jnp.asarray, given), jnp.float32([640.5]), jnp.float32([300.0]))
    assert count.tolist() == [t + g + image * IMAGE for t, g in zip(text, glyphs, strict=True)]
    for branch, number in enumerate(count.tolist()):
        expected = seen["context"][branch].numpy()
        assert seen["mask"][branch].sum() == number
        assert np.abs(found[branch, :number] - expected[:number]).max() <= 1e-5 * np.abs(expected).max()
        assert not np.asarray(found[branch, number:]).any()
        assert np.abs(time[0] - seen["time"][branch].numpy()).max() <= 1e-5
