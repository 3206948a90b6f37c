"""Latents as a Wan transformer's tokens: cut into patches and put together again, with the angles of their places.

Shapes: T H W latent frames, height, width, L tokens, D head width, C channels.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.runtime.bridge import to_jax


def patches(latents: jax.Array, patch: Sequence[int]) -> jax.Array:
    """Cut latents [1, C, T, H, W] into tokens [L, C * patch], values in the order of the convolution's weight."""
    _, channels, *size = latents.shape
    frames, height, width = (n // p for n, p in zip(size, patch, strict=True))
    array = latents.reshape(1, channels, frames, patch[0], height, patch[1], width, patch[2])
    return array.transpose(0, 2, 4, 6, 1, 3, 5, 7).reshape(frames * height * width, -1)


def unpatchify(tokens: jax.Array, latent_shape: tuple[int, ...], patch: Sequence[int], channels: int) -> jax.Array:
    """Lay tokens [L, patch values] out as latents [1, C, T, H, W]."""
    grid = [n // p for n, p in zip(latent_shape[2:], patch, strict=True)]
    array = tokens.reshape(1, *grid, *patch, channels)
    return array.transpose(0, 7, 1, 4, 2, 5, 3, 6).reshape(1, channels, *latent_shape[2:])


def rope_tables(module: Any, grid: list[int]) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of tokens' angles, each [L, D], for pairs (i, i + D/2): [cos, cos] and [-sin, sin]."""
    rope = module.rope
    tables = []
    for table in (to_jax(rope.freqs_cos), to_jax(rope.freqs_sin)):
        halves = table[:, ::2]  # diffusers stores each angle twice, for the pair (2i, 2i+1)
        ends = np.cumsum([rope.t_dim // 2, rope.h_dim // 2])
        parts = [
            jnp.broadcast_to(
                part[:size].reshape(*[size if i == axis else 1 for i in range(3)], -1), (*grid, part.shape[1])
            )
            for axis, (part, size) in enumerate(zip(jnp.split(halves, ends, axis=1), grid, strict=True))
        ]
        tables.append(jnp.concatenate(parts, axis=-1).reshape(-1, halves.shape[1]))
    cos, sin = tables
    return jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)


def padded(rows: jax.Array, length: int) -> jax.Array:
    """Append rows of zeros: [..., L, values] -> [..., length, values]."""
    return jnp.pad(rows, (*[(0, 0)] * (rows.ndim - 2), (0, length - rows.shape[-2]), (0, 0)))
