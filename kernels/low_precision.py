"""Numbers in 8 bits: rows with one scale each for linear layers, blocks of Q and K for the first matmul of attention.

Shapes: L rows (tokens), C channels; B batch, N heads, D head width.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.tiles import by_rows, even_block, vmem_bytes

SUBLANES, LANES = 8, 128  # of a register
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
    return to_nearest(x * jnp.where(size > 0, largest(dtype) / size, 0.0), dtype), size / largest(dtype)


def to_nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """Return float32 numbers, at most `largest` in size, as the nearest ones of an 8-bit type."""
    if jnp.issubdtype(dtype, jnp.integer):
        whole = jax.lax.bitcast_convert_type(x + _TO_WHOLE, jnp.int32)
        x = whole - jax.lax.bitcast_convert_type(jnp.float32(_TO_WHOLE), jnp.int32)
    return x.astype(dtype)


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


def mean_key(k: jax.Array, kv_len: int) -> jax.Array:
    """Return the mean of the first `kv_len` keys, [B, 1, N * D] float32 of K [B, Lk, N * D].

    Without it each query's logits all move by as much, which softmax does not see. What is left of K needs fewer bits
    where channels have a bias, as K of trained models has (SageAttention, arXiv:2410.02367, section 4.2).
    """
    return jnp.mean(k[:, :kv_len].astype(jnp.float32), axis=1, keepdims=True)


def round_blocks(
    x: jax.Array,
    block: int,
    dtype: Any,
    *,
    tiles: int,
    width: int,
    shared: int = 1,
    first: int = 0,
    real: int | None = None,
    mean: jax.Array | None = None,
    terms: int = 1,
    interpret: Any = False,
) -> tuple[list[jax.Array], jax.Array]:
    """Divide each head's blocks of `block` tokens by a scale and round to dtype ("int8", "float8_e4m3fn").

    x       [B, L, at least (first + tiles) * shared * D], heads of width D, `shared` of them in a tile: those of the
            tiles from `first` on
    real    tokens that count; what the others hold is nothing to a scale
    mean    [B, 1, tiles * shared * D], subtracted
    terms   whose sum times the scales is near x: with two of floating-point numbers twice as many bits

    Returns the terms, [B, L, N * D] each, and scales [B, N, ceil(L / block)] float32.
    """
    (batch, length, _), lanes, blocks = x.shape, width * shared, pl.cdiv(x.shape[1], block)
    tile = pl.BlockSpec((None, block, lanes), lambda b, t, i: (b, i, t))
    row = pl.BlockSpec((None, 1, lanes), lambda b, t, i: (b, 0, t))
    *values, scales = pl.pallas_call(
        functools.partial(_block_kernel, width=width, real=length if real is None else real, centred=mean is not None),
        grid=(batch, tiles, blocks),
        in_specs=[
            pl.BlockSpec((None, block, lanes), lambda b, t, i: (b, i, first + t)),
            *([] if mean is None else [row]),
        ],
        out_specs=[
            *[tile] * terms,
            pl.BlockSpec((None, None, None, SUBLANES, lanes), lambda b, t, i: (b, t, i, 0, 0)),
        ],
        out_shape=[
            *[jax.ShapeDtypeStruct((batch, length, tiles * lanes), dtype)] * terms,
            jax.ShapeDtypeStruct((batch, tiles, blocks, SUBLANES, lanes), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((SUBLANES, lanes), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=8 * batch * length * tiles * lanes,
            transcendentals=0,
            bytes_accessed=batch * length * tiles * lanes * (x.dtype.itemsize + terms),
        ),
        name="round_blocks",
        interpret=interpret,
    )(x, *([] if mean is None else [mean]))
    by_head = scales[..., 0, ::width].transpose(0, 1, 3, 2)  # [B, tiles, shared, blocks]
    return values, by_head.reshape(batch, tiles * shared, blocks)


def round_blocks_reference(
    x: jax.Array, block: int, dtype: Any, *, heads: int, real: int | None = None, terms: int = 1
) -> tuple[list[jax.Array], jax.Array]:
    """Return the same as `round_blocks` of all heads, x [B, L, N * D] without a mean, in plain jnp."""
    batch, length, _ = x.shape
    blocks = -(-length // block)
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, blocks * block - length), (0, 0)))
    rest = padded.reshape(batch, blocks, block, heads, -1)
    counts = (jnp.arange(blocks * block) < (length if real is None else real)).reshape(1, blocks, block, 1, 1)
    sizes = jnp.max(jnp.where(counts, jnp.abs(rest), 0), axis=(2, 4), keepdims=True)
    rest = rest * jnp.where(sizes > 0, largest(dtype) / sizes, 0.0)
    values = []
    for _ in range(terms):
        nearest = to_nearest(rest, dtype)
        values.append(nearest.reshape(batch, blocks * block, -1)[:, :length])
        rest = rest - nearest.astype(jnp.float32)
    return values, sizes[:, :, 0, :, 0].swapaxes(1, 2) / largest(dtype)


def _block_kernel(x_ref, *refs, width, real, centred):  # type: ignore[no-untyped-def]
    mean_ref, refs = (refs[0], refs[1:]) if centred else (None, refs)
    *values, scale_ref, most_ref = refs
    block, lanes = x_ref.shape
    behind = real - pl.program_id(2) * block

    def read(here: Any) -> jax.Array:
        x = x_ref[here, :].astype(jnp.float32)
        return x if mean_ref is None else x - mean_ref[...]

    def find(start: jax.Array, count: int) -> None:
        row = start + jax.lax.broadcasted_iota(jnp.int32, (count, lanes), 0)
        x = jnp.where(row < behind, jnp.abs(read(pl.ds(start, count))), 0.0)
        most_ref[...] = jnp.maximum(most_ref[...], jnp.max(x.reshape(-1, SUBLANES, lanes), axis=0))

    most_ref[...] = jnp.zeros_like(most_ref)
    by_rows(block, 16 * ROWS_AT_ONCE, ROWS_AT_ONCE, find)
    lane = jax.lax.broadcasted_iota(jnp.int32, most_ref.shape, 1)
    sizes = jnp.zeros_like(most_ref)
    for start in range(0, lanes, width):
        own = (lane >= start) & (lane < start + width)
        sizes = jnp.where(own, jnp.max(jnp.where(own, most_ref[...], 0.0)), sizes)
    dtype = values[0].dtype
    scale_ref[...] = sizes / largest(dtype)
    inverse = jnp.where(sizes > 0, largest(dtype) / sizes, 0.0)[:1]

    def write(start: jax.Array, count: int) -> None:
        here = pl.ds(start, count)
        rest = read(here) * inverse
        for ref in values:
            ref[here, :] = to_nearest(rest, dtype)
            rest = rest - ref[here, :].astype(jnp.float32)

    by_rows(block, 4 * ROWS_AT_ONCE, ROWS_AT_ONCE, write)
