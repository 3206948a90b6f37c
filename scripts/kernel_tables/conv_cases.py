"""The convolution of a video VAE, at given sizes, as `bundles.count_bundles` expects it.

The file is run by its path in a process that imports nothing of the package.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from wan_tpu_kernels.vae.causal_conv import causal_conv
from wan_tpu_kernels.vae.folded_conv import folded_conv

CASES = __file__


def build_causal(frames: int, columns: int, rows: int, channels: int) -> tuple[Callable[..., Any], list[Any]]:
    """Return the second convolution of a residual block, with the residual, and its arguments [T, X, Y, C]."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def run(x: Any, past: Any, left: Any, right: Any, weight: Any, bias: Any, residual: Any) -> jax.Array:
        return causal_conv(x, weight, bias, past=past, edges=(left, right), residual=residual, before=(1, 1))

    strip = array(frames, columns, rows, channels)
    edge = array(frames + 2, 1, rows, channels)
    weight = array(3, 3, 3, channels, channels)
    past = array(max(frames, 2), columns, rows, channels)  # a chunk of one frame keeps the one before it, too
    return run, [strip, past, edge, edge, weight, array(channels), strip]


def build_centred(frames: int, columns: int, rows: int, channels: int) -> tuple[Callable[..., Any], list[Any]]:
    """Return a residual block's second convolution in a VAE that isn't causal, over a whole video [T, X, Y, C]."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def run(x: Any, left: Any, right: Any, weight: Any, bias: Any, residual: Any) -> jax.Array:
        return causal_conv(x, weight, bias, edges=(left, right), residual=residual, before=(1, 1), centred=True)

    strip, edge = array(frames, columns, rows, channels), array(frames, 1, rows, channels)
    return run, [strip, edge, edge, array(3, 3, 3, channels, channels), array(channels), strip]


def build_folded(
    frames: int, columns: int, rows: int, channels: int, fold: int
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a residual block's second convolution, which normalises for the next block, with folded rows."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def run(x: Any, past: Any, left: Any, right: Any, weight: Any, vector: Any, residual: Any) -> jax.Array:
        return folded_conv(
            x, weight, vector, fold=fold, past=past, edges=(left, right), residual=residual, norm_after=vector,
            keeps_raw=True, before=(1, 1),
        )  # fmt: skip

    size = columns, rows // fold, fold * channels
    strip, past = array(frames, *size), array(max(frames, 2), *size)
    edge = array(frames + 2, 1, *size[1:])
    return run, [strip, past, edge, edge, array(3, 3, 3, channels, channels), array(channels), strip]
