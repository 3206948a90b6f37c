"""Latents as a transformer's tokens: cut into patches, with the angles of their positions.

Shapes: T H W latent frames, height, width, L tokens, D head width, C channels.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Rows = TypeVar("Rows", jax.Array, np.ndarray)


def patchify(latents: jax.Array, patch: Sequence[int]) -> jax.Array:
    """Cut latents [1, C, T, H, W] into tokens [L, C * patch], with values in the order of a convolution's weight."""
    _, channels, *size = latents.shape
    frames, height, width = (n // p for n, p in zip(size, patch, strict=True))
    array = latents.reshape(1, channels, frames, patch[0], height, patch[1], width, patch[2])
    return array.transpose(0, 2, 4, 6, 1, 3, 5, 7).reshape(frames * height * width, -1)


def unpatchify(tokens: Rows, latent_shape: tuple[int, ...], patch: Sequence[int]) -> Rows:
    """Join tokens [L, values of a patch], in the order of `patchify`, to latents [1, C, T, H, W]."""
    grid = [n // p for n, p in zip(latent_shape[2:], patch, strict=True)]
    array = tokens.reshape(1, *grid, latent_shape[1], *patch)
    return array.transpose(0, 4, 1, 5, 2, 6, 3, 7).reshape(latent_shape)


def pad_rows(rows: jax.Array, length: int) -> jax.Array:
    """Append rows of zeros to [..., L, values] and return [..., length, values]."""
    return jnp.pad(rows, (*[(0, 0)] * (rows.ndim - 2), (0, length - rows.shape[-2]), (0, 0)))


def combine_axes(axes: Sequence[jax.Array]) -> jax.Array:
    """Return the values of each point's coordinates side by side, [L, a+b+c], from [T, a], [H, b] and [W, c]."""
    grid = [len(axis) for axis in axes]
    parts = [
        jnp.broadcast_to(axis.reshape(*[n if i == k else 1 for k, n in enumerate(grid)], -1), (*grid, axis.shape[1]))
        for i, axis in enumerate(axes)
    ]
    return jnp.concatenate(parts, axis=-1).reshape(-1, sum(axis.shape[1] for axis in axes))


def half_split(heads: int, values: np.ndarray) -> np.ndarray:
    """Reorder the outputs of a query or key projection, [N*D, ...], so that pairs (2i, 2i+1) become (i, i + D/2)."""
    per_head = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(values.shape)
