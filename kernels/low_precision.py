"""Numbers in 8 bits: rows with one scale each for linear layers, blocks of Q and K for the first matmul of attention.

Shapes: L rows (tokens), C channels; B batch, N heads, D head width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.tiles import by_rows, even_block, vmem_bytes

LANES = 128  # of a register
ROWS = 256  # of a tile
ROWS_AT_ONCE = 32  # of the loop inside: a register of 8 bits has as many
# Added to a float32 of less than 2^22 in size it leaves the nearest whole number, ties to even, in the last bits.
_TO_WHOLE = 1.5 * 2**23


class Rounded(NamedTuple):
    """Rows in 8 bits.

    values  [L, C] int8, at most 127 in size, or float8_e4m3fn, at most 448
    scales  [L, 128] float32, what a row's values are multiplied with, in all lanes: a kernel reads whole registers
    """

    values: jax.Array
    scales: jax.Array


def largest(dtype: Any) -> float:
    """Return the largest value that an 8-bit type is used with: what -x has too."""
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def to_8_bits(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return rows [L, C] float32 divided by a scale each and rounded to dtype, and the scales [L, 1]."""
    size = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scaled = x * jnp.where(size > 0, largest(dtype) / size, 0.0)
    if jnp.issubdtype(dtype, jnp.integer):
        whole = jax.lax.bitcast_convert_type(scaled + _TO_WHOLE, jnp.int32)
        scaled = whole - jax.lax.bitcast_convert_type(jnp.float32(_TO_WHOLE), jnp.int32)
    return scaled.astype(dtype), size / largest(dtype)


def round_rows(x: jax.Array | tuple[jax.Array, ...], dtype: Any, *, interpret: bool = False) -> Rounded:
    """Return rows in 8 bits, in one pass over HBM.

    x  [L, C], or laid out as kernels/columns.py has it: an array for each part of every group's columns
    """
    parts = x if isinstance(x, tuple) else (x,)
    rows, channels = parts[0].shape[-2], sum(part.size for part in parts) // parts[0].shape[-2]
    block = even_block(rows, ROWS, 32)
    specs = [
        pl.BlockSpec((block, part.shape[1]), lambda i: (i, 0))
        if part.ndim == 2
        else pl.BlockSpec((part.shape[0], block, part.shape[2]), lambda i: (0, i, 0))
        for part in parts
    ]
    values, scales = pl.pallas_call(
        _round_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((rows, channels), dtype),
            jax.ShapeDtypeStruct((rows, LANES), jnp.float32),
        ],
        grid=(pl.cdiv(rows, block),),
        in_specs=specs,
        out_specs=[pl.BlockSpec((block, channels), lambda i: (i, 0)), pl.BlockSpec((block, LANES), lambda i: (i, 0))],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem_bytes(interpret=interpret)
        ),
        cost_estimate=pl.CostEstimate(
            flops=8 * rows * channels,
            transcendentals=0,
            bytes_accessed=rows * channels * (parts[0].dtype.itemsize + 1),
        ),
        name="round_rows",
        interpret=interpret,
    )(*parts)
    return Rounded(values, scales)


def round_rows_reference(x: jax.Array | tuple[jax.Array, ...], dtype: Any) -> Rounded:
    """Return the same as `round_rows`, in plain jnp."""
    x = jnp.concatenate(x, axis=-1) if isinstance(x, tuple) else x
    x = x if x.ndim == 2 else x.transpose(1, 0, 2).reshape(x.shape[1], -1)
    values, scales = to_8_bits(x.astype(jnp.float32), dtype)
    return Rounded(values, jnp.broadcast_to(scales, (len(x), LANES)))


def _round_kernel(*refs):  # type: ignore[no-untyped-def]
    *parts, values_ref, scales_ref = refs

    def rows(start: jax.Array, count: int) -> None:
        here = pl.ds(start, count)
        if parts[0].ndim == 2:
            pieces = [part[here, :] for part in parts]
        else:
            pieces = [part[group, here, :] for group in range(parts[0].shape[0]) for part in parts]
        pieces = [piece.astype(jnp.float32) for piece in pieces]
        whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
        values, scales = to_8_bits(whole, values_ref.dtype)
        values_ref[here, :] = values
        scales_ref[here, :] = jnp.broadcast_to(scales, (count, LANES))

    by_rows(values_ref.shape[0], ROWS_AT_ONCE, 32, rows)


def smooth(k: jax.Array) -> jax.Array:
    """Subtract from K [B, Lk, N * D] its mean over the keys; float32.

    Each query's logits all move by q.mean(K), which softmax does not see. What is left needs fewer bits where channels
    have a bias, as K of trained models has (SageAttention, arXiv:2410.02367, section 4.2).
    """
    k = k.astype(jnp.float32)
    return k - jnp.mean(k, axis=1, keepdims=True)


def quantize(x: jax.Array, heads: int, block: int, dtype: str, terms: int = 1) -> tuple[list[jax.Array], jax.Array]:
    """Divide each head's blocks of `block` tokens by a scale and round to dtype ("int8", "float8_e4m3fn").

    x [B, L, N * D] -> terms [B, L, N * D] each of dtype, and scales [B, N, ceil(L / block)] float32: the sum of the
    terms times the scales is near x, with two terms twice as many bits of it.

    Heads stay side by side in the last axis, and blocks are slices, not a reshape of padded rows: both would make XLA
    copy the whole array.
    """
    length, d = x.shape[1], x.shape[2] // heads
    target = jnp.dtype(dtype)
    whole = jnp.issubdtype(target, jnp.integer)
    by_column = [
        jnp.max(jnp.abs(x[:, start : start + block].astype(jnp.float32)), axis=1) for start in range(0, length, block)
    ]
    columns = jnp.stack(by_column, axis=1)  # [B, blocks, N * D]
    scales = jnp.max(columns.reshape(*columns.shape[:2], heads, d), axis=-1) / largest(target)
    scales = jnp.where(scales > 0, scales, 1.0)
    rest = x.astype(jnp.float32) / jnp.repeat(jnp.repeat(scales, d, axis=2), block, axis=1)[:, :length]
    values = []
    for _ in range(terms):
        values.append((jnp.round(rest) if whole else rest).astype(target))
        rest = rest - values[-1].astype(jnp.float32)
    return values, scales.transpose(0, 2, 1)
