"""A Wan transformer's tokens, joined to latents again, and the angles of their positions.

Shapes: T H W latent frames, height, width, L tokens, D head width, C channels.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.families.shared.tokens import combine_axes
from wan_tpu.runtime.bridge import to_jax


def unpatchify(tokens: jax.Array, latent_shape: tuple[int, ...], patch: Sequence[int], channels: int) -> jax.Array:
    """Join tokens [L, patch values] to latents [1, C, T, H, W]."""
    grid = [n // p for n, p in zip(latent_shape[2:], patch, strict=True)]
    array = tokens.reshape(1, *grid, *patch, channels)
    return array.transpose(0, 7, 1, 4, 2, 5, 3, 6).reshape(1, channels, *latent_shape[2:])


def rope_tables(module: Any, grid: list[int]) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of the tokens' angles, each [L, D], for pairs (i, i + D/2): [cos, cos], [-sin, sin]."""
    rope = module.rope
    tables = []
    for table in (to_jax(rope.freqs_cos), to_jax(rope.freqs_sin)):
        halves = table[:, ::2]  # diffusers stores each angle twice, for the pair (2i, 2i+1).
        ends = np.cumsum([rope.t_dim // 2, rope.h_dim // 2])
        axes = jnp.split(halves, ends, axis=1)
        tables.append(combine_axes([axis[:size] for axis, size in zip(axes, grid, strict=True)]))
    cos, sin = tables
    return jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)
