"""The context of HunyuanVideo-1.5's transformer, computed in every step: image, quoted text and prompt.

diffusers masks padding tokens. Here the real tokens come first, in diffusers' order, and their number is an array: so
one program serves prompts of every length, and padding takes no part in anything.

Shapes: B branches of guidance, S and G tokens of the longest prompt and quoted text, I of the image, K = I + G + S.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from wan_tpu.runtime.bridge import to_jax, to_torch

_PROMPT, _GLYPHS, _IMAGE = range(3)  # Rows of the embedding of token kinds.


class Encodings(NamedTuple):
    """The encoders' outputs."""

    text: jax.Array  # [B, S, 3584].
    text_tokens: jax.Array  # Int32 [B], the number of real tokens of `text`, which come first.
    glyphs: jax.Array  # [B, G, 1472].
    glyph_tokens: jax.Array  # Int32 [B], the same of `glyphs`.
    image: jax.Array | None  # [1, I, 1152], the same for every branch, or None.


def make_context(module: Any, encodings: Encodings, timestep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the context's tokens, [B, K, C], and the number of real ones, int32 [B]; the others are zero.

    Args:
        module: The transformer, inside `wan_tpu.runtime.bridge.call`.
        timestep: float32 [1].
    """
    kinds = to_jax(module.cond_type_embed.weight)
    text = _refine(module.context_embedder, encodings, timestep) + kinds[_PROMPT]
    glyphs = to_jax(module.context_embedder_2(to_torch(encodings.glyphs))) + kinds[_GLYPHS]
    parts = [_mask_rows(glyphs, encodings.glyph_tokens)]
    if encodings.image is not None:
        image = to_jax(module.image_embedder(to_torch(encodings.image))) + kinds[_IMAGE]
        parts.insert(0, jnp.broadcast_to(image, (len(text), *image.shape[1:])))
    before = sum(part.shape[1] for part in parts[:-1]) + encodings.glyph_tokens
    room = jnp.concatenate([*parts, jnp.zeros_like(text)], axis=1)
    put = jax.vmap(lambda room, rows, start: jax.lax.dynamic_update_slice(room, rows, (start, 0)))
    return put(room, _mask_rows(text, encodings.text_tokens), before), before + encodings.text_tokens


def embed_time(module: Any, timestep: jax.Array, timestep_r: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Return the embedding of a step, [1, C]; the step-distilled model also embeds the next timestep."""
    embed = module.time_embed
    embedding = embed.timestep_embedder(embed.time_proj(to_torch(timestep)).to(dtype))
    if embed.use_meanflow:
        embedding = embedding + embed.timestep_embedder_r(embed.time_proj_r(to_torch(timestep_r)).to(dtype))
    return to_jax(embedding)


def _refine(refiner: Any, encodings: Encodings, timestep: jax.Array) -> jax.Array:
    """Run the HunyuanVideo15TokenRefiner and return [B, S, C]; padding rows are meaningless, but not NaN."""
    real = jnp.arange(encodings.text.shape[1]) < encodings.text_tokens[:, None]
    rows = jnp.where(real[:, :, None], encodings.text, 0)
    pooled = rows.astype(jnp.float32).sum(1) / encodings.text_tokens[:, None]
    branches, length = real.shape
    keys = to_torch(jnp.broadcast_to(real[:, None, None], (branches, 1, length, length)))
    embedding = refiner.time_text_embed(to_torch(timestep), to_torch(pooled.astype(rows.dtype)))
    hidden = refiner.proj_in(to_torch(rows))
    for block in refiner.token_refiner.refiner_blocks:
        hidden = block(hidden, embedding, keys)
    return to_jax(hidden)


def _mask_rows(rows: jax.Array, count: jax.Array) -> jax.Array:
    """Return rows [B, L, C] with zeros after the first `count` [B]."""
    return jnp.where((jnp.arange(rows.shape[1]) < count[:, None])[:, :, None], rows, 0)
