"""What HunyuanVideo-1.5's transformer sees beside the video, made anew in every step: image, quoted text, prompt.

diffusers masks tokens that aren't there. Here those that are there come first, in diffusers' order, and their number is
an array: so one program serves prompts of every length, and what isn't there takes no part in anything.

Shapes: B branches of guidance, S and G tokens of the longest prompt and quoted text, I of the image, K = I + G + S.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from wan_tpu.runtime.bridge import to_jax, to_torch

_PROMPT, _GLYPHS, _IMAGE = range(3)  # rows of the embedding that says what a token is


class Given(NamedTuple):
    """What the encoders have made.

    text    [B, S, 3584]; text_tokens   int32 [B], how many of them are there, the first ones
    glyphs  [B, G, 1472]; glyph_tokens  the same
    image   [1, I, 1152], the same for every branch, or None
    """

    text: jax.Array
    text_tokens: jax.Array
    glyphs: jax.Array
    glyph_tokens: jax.Array
    image: jax.Array | None


def context(module: Any, given: Given, timestep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the tokens beside the video's, [B, K, C], and how many of them are there, int32 [B]; others are zero.

    module  the transformer, inside `wan_tpu.runtime.bridge.call`; timestep  float32 [1]
    """
    kinds = to_jax(module.cond_type_embed.weight)
    text = _refined(module.context_embedder, given, timestep) + kinds[_PROMPT]
    glyphs = to_jax(module.context_embedder_2(to_torch(given.glyphs))) + kinds[_GLYPHS]
    parts = [_first(glyphs, given.glyph_tokens)]
    if given.image is not None:
        image = to_jax(module.image_embedder(to_torch(given.image))) + kinds[_IMAGE]
        parts.insert(0, jnp.broadcast_to(image, (len(text), *image.shape[1:])))
    before = sum(part.shape[1] for part in parts[:-1]) + given.glyph_tokens
    room = jnp.concatenate([*parts, jnp.zeros_like(text)], axis=1)
    put = jax.vmap(lambda room, rows, start: jax.lax.dynamic_update_slice(room, rows, (start, 0)))
    return put(room, _first(text, given.text_tokens), before), before + given.text_tokens


def embed_time(module: Any, timestep: jax.Array, following: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Return the embedding of a step, [1, C]; following: the next step's timestep, for the step-distilled model."""
    embed = module.time_embed
    found = embed.timestep_embedder(embed.time_proj(to_torch(timestep)).to(dtype))
    if embed.use_meanflow:
        found = found + embed.timestep_embedder_r(embed.time_proj_r(to_torch(following)).to(dtype))
    return to_jax(found)


def _refined(refiner: Any, given: Given, timestep: jax.Array) -> jax.Array:
    """HunyuanVideo15TokenRefiner: [B, S, C]; rows that aren't there are of no use, and not NaN."""
    there = jnp.arange(given.text.shape[1]) < given.text_tokens[:, None]
    rows = jnp.where(there[:, :, None], given.text, 0)
    pooled = rows.astype(jnp.float32).sum(1) / given.text_tokens[:, None]
    branches, length = there.shape
    keys = to_torch(jnp.broadcast_to(there[:, None, None], (branches, 1, length, length)))
    embedding = refiner.time_text_embed(to_torch(timestep), to_torch(pooled.astype(rows.dtype)))
    hidden = refiner.proj_in(to_torch(rows))
    for block in refiner.token_refiner.refiner_blocks:
        hidden = block(hidden, embedding, keys)
    return to_jax(hidden)


def _first(rows: jax.Array, count: jax.Array) -> jax.Array:
    """Return rows [B, L, C] with zeros after the first `count` [B]."""
    return jnp.where((jnp.arange(rows.shape[1]) < count[:, None])[:, :, None], rows, 0)
