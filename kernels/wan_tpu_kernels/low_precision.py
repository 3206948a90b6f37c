"""Rounding to 8 bits: rows with one scale each for linear layers, and Q, K and V for attention.

Shapes: L rows (tokens), C channels; B batch, N heads, D head width.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.tiles import by_rows, even_block, vmem_bytes

SUBLANES, LANES = 8, 128  # The shape of a vector register.
ROWS = 256  # Rows of a tile.
ROWS_AT_ONCE = 32  # Rows of one iteration of the inner loop: a register of 8-bit values holds as many.
TOKENS, TOKENS_AT_ONCE = 2048, 256  # Tokens of a tile, and of one iteration, for one head's queries and keys.
SMALLEST = 2.0**-100  # Divisors below this are replaced by it.
# The last bit of this float32 is worth 1. Adding a number below 2^22 in size leaves the nearest whole number, ties to
# even, in its last bits; adding a whole number to its bits adds that number to its value.
MAGIC = 1.5 * 2.0**23


class Rounded(NamedTuple):
    """Rows in 8 bits.

    Attributes:
        values: [L, C] int8, at most 127 in size, or float8_e4m3fn, at most 448.
        scales: [L, 128] float32, the factor of each row's values, repeated in all lanes because a kernel reads whole
            registers.
    """

    values: jax.Array
    scales: jax.Array


def largest_value(dtype: Any) -> float:
    """Return the largest value of an 8-bit type whose negative is also a value of the type."""
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def can_multiply(dtype: Any) -> bool:
    """Return whether the TPU of the current mesh multiplies matrices of an 8-bit type."""
    return pltpu.get_tpu_info().is_matmul_supported(dtype, dtype)


def largest_size(x: jax.Array, axis: int) -> jax.Array:
    """Return max |x| over an axis, which is kept; NaN where there is a NaN, which XLA's own maximum may lose on CPU.

    Without their sign bit, float32 numbers have the order of their bits, and infinity and NaN come last.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=axis, keepdims=True), jnp.float32)


def to_8_bits(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return rows [L, C] float32 divided by a scale each and rounded to dtype, and the scales [L, 1]."""
    size = largest_size(x, -1)
    return to_nearest(x * (largest_value(dtype) / jnp.maximum(size, SMALLEST)), dtype), size / largest_value(dtype)


def to_nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """Round float32 numbers, at most `largest_value` in size, to the nearest ones of an 8-bit type."""
    if jnp.issubdtype(dtype, jnp.integer):
        whole = jax.lax.bitcast_convert_type(x + MAGIC, jnp.int32)
        x = whole - jax.lax.bitcast_convert_type(jnp.float32(MAGIC), jnp.int32)
    return x.astype(dtype)


def round_rows(x: jax.Array | tuple[jax.Array, ...], dtype: Any, *, interpret: bool = False) -> Rounded:
    """Round rows to 8 bits, in one pass over HBM.

    Args:
        x: [L, C], or laid out as in columns.py: an array for each part of every group's columns.
        dtype: The 8-bit type.
        interpret: As for `pallas_call`.
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
    """Compute the same as `round_rows`, in plain jnp."""
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


def round_keys(
    k: jax.Array,
    kv_len: int | jax.Array,
    dtype: Any,
    *,
    tiles: int,
    width: int,
    shared: int = 1,
    first: int = 0,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Subtract the mean key from keys and round them to 8 bits, with one scale per head.

    Subtracting the mean key changes all logits of a query by the same amount, which doesn't affect softmax. The
    remainder needs fewer bits where channels have a bias, as K of trained models has (SageAttention, arXiv:2410.02367,
    section 4.2). Values are rounded likewise: weights sum to one, so their mean is added to the output.

    Args:
        k: [B, Lk, at least (first + tiles) * shared * D], laid out like Q of `round_queries`.
        kv_len: Rows from here on are ignored; an array [1] where only the program knows it.
        dtype: The 8-bit type.
        tiles: Number of tiles of heads to round.
        width: D.
        shared: Heads in a tile.
        first: The first tile.
        interpret: As for `pallas_call`.

    Returns:
        The keys, [B, Lk, N * D] of dtype, at least 32 rows; the scales and the mean, [B, N * D] float32.
    """
    k = jnp.pad(k, ((0, 0), (0, max(0, ROWS_AT_ONCE - k.shape[1])), (0, 0)))
    (batch, rows, _), lanes = k.shape, width * shared
    block = _token_block(rows, ROWS_AT_ONCE)
    tile = pl.BlockSpec((None, block, lanes), lambda b, t, i, *_: (b, i, first + t))
    count = [kv_len] if isinstance(kv_len, jax.Array) else []
    grid, numbers = (batch, tiles, pl.cdiv(rows, block)), batch * rows * tiles * lanes
    parts = pl.pallas_call(
        functools.partial(_key_range_kernel, kv_len=None if count else kv_len),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(count),
            grid=grid,
            in_specs=[tile],
            out_specs=pl.BlockSpec((None, 3, SUBLANES, lanes), lambda b, t, i, *_: (b, 0, 0, t)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, 3, SUBLANES, tiles * lanes), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=4 * numbers, transcendentals=0, bytes_accessed=numbers * k.dtype.itemsize),
        name="key_range",
        interpret=interpret,
    )(*count, k)
    mean, most, least = parts[:, 0].sum(axis=1) / kv_len, parts[:, 1].max(axis=1), parts[:, 2].min(axis=1)
    scales, inverse = _head_scales(jnp.maximum(most - mean, mean - least), width, dtype)
    row = pl.BlockSpec((None, 1, lanes), lambda b, t, i: (b, 0, t))
    values = pl.pallas_call(
        _key_kernel,
        grid=grid,
        in_specs=[tile, row, row],
        out_specs=pl.BlockSpec((None, block, lanes), lambda b, t, i: (b, i, t)),
        out_shape=jax.ShapeDtypeStruct((batch, rows, tiles * lanes), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=4 * numbers, transcendentals=0, bytes_accessed=numbers * (k.dtype.itemsize + 1)
        ),
        name="round_keys",
        interpret=interpret,
    )(k, mean[:, None], inverse[:, None])
    return values, scales, mean


def round_keys_reference(
    k: jax.Array, kv_len: int | jax.Array, dtype: Any, *, heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the same as `round_keys` of all heads, in plain jnp."""
    is_real, k = (jnp.arange(k.shape[1]) < kv_len)[:, None], k.astype(jnp.float32)
    mean = jnp.where(is_real, k, 0).sum(axis=1, keepdims=True) / kv_len
    largest = largest_size(jnp.where(is_real, k - mean, 0), 1)
    scales, inverse = _head_scales(largest[:, 0], k.shape[2] // heads, dtype)
    return to_nearest((k - mean) * inverse[:, None], dtype), scales, mean[:, 0]


def _token_block(rows: int, unit: int) -> int:
    """Return the number of rows of a tile: a multiple of `unit` if there are enough rows, and at most `rows`."""
    return even_block(rows, min(TOKENS, max(unit, rows // unit * unit)), unit)


def _head_scales(sizes: jax.Array, width: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return the scale of each channel's head, and its inverse, from the channels' sizes [B, N * D]."""
    by_head = sizes.reshape(len(sizes), -1, width)
    sizes = jnp.broadcast_to(largest_size(by_head, 2), by_head.shape).reshape(sizes.shape)
    return sizes / largest_value(dtype), largest_value(dtype) / jnp.maximum(sizes, SMALLEST)


def _key_range_kernel(*refs, kv_len):  # type: ignore[no-untyped-def]
    *count, k_ref, range_ref = refs
    kv_len = count[0][0] if count else kv_len
    block, lanes = k_ref.shape
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        range_ref[0] = jnp.zeros((SUBLANES, lanes), jnp.float32)
        range_ref[1] = jnp.full((SUBLANES, lanes), -jnp.inf)
        range_ref[2] = jnp.full((SUBLANES, lanes), jnp.inf)

    def rows(start: jax.Array, count: int, real: jax.Array | None = None) -> None:
        k = k_ref[pl.ds(start, count), :].astype(jnp.float32)
        row = start + jax.lax.broadcasted_iota(jnp.int32, (count, lanes), 0)

        def mask(otherwise: float) -> jax.Array:
            return (k if real is None else jnp.where(row < real, k, otherwise)).reshape(-1, SUBLANES, lanes)

        range_ref[0] += jnp.sum(mask(0.0), axis=0)
        range_ref[1] = jnp.maximum(range_ref[1], jnp.max(mask(-jnp.inf), axis=0))
        range_ref[2] = jnp.minimum(range_ref[2], jnp.min(mask(jnp.inf), axis=0))

    real = kv_len - step * block
    pl.when(real >= block)(lambda: by_rows(block, TOKENS_AT_ONCE, ROWS_AT_ONCE, rows))
    masked_rows = functools.partial(rows, real=real)
    pl.when((real > 0) & (real < block))(lambda: by_rows(block, TOKENS_AT_ONCE, ROWS_AT_ONCE, masked_rows))


def _key_kernel(k_ref, mean_ref, inverse_ref, o_ref):  # type: ignore[no-untyped-def]
    def rows(start: jax.Array, count: int) -> None:
        here = pl.ds(start, count)
        scaled = (k_ref[here, :].astype(jnp.float32) - mean_ref[...]) * inverse_ref[...]
        o_ref[here, :] = to_nearest(scaled, o_ref.dtype)

    by_rows(k_ref.shape[0], TOKENS_AT_ONCE, ROWS_AT_ONCE, rows)


def round_queries(
    q: jax.Array,
    unit: jax.Array,
    dtype: Any,
    *,
    width: int,
    shared: int = 1,
    first: int = 0,
    interpret: Any = False,
) -> tuple[list[jax.Array], jax.Array]:
    """Multiply queries by `unit` and round them to 8 bits, with a scale for each row and head.

    Args:
        q: [B, Lq, at least (first + tiles) * shared * D]: the heads of the tiles from `first` on are used.
        unit: [B, tiles * shared * D] float32.
        dtype: The 8-bit type.
        width: D.
        shared: Heads in a tile.
        first: The first tile.
        interpret: As for `pallas_call`.

    Returns:
        The terms whose sum times the scales approximates the product, [B, Lq, N * D] each: one of int8, or two of
        float8, which has 3 bits of mantissa. And the scales, [B * tiles, shared, Lq] float32, powers of two for int8.
    """
    (batch, rows, _), lanes, terms = q.shape, width * shared, 1 if dtype == jnp.int8 else 2
    tiles = unit.shape[1] // lanes
    block = _token_block(rows, LANES)
    tile = pl.BlockSpec((None, block, lanes), lambda b, t, i: (b, i, t))
    *values, scales = pl.pallas_call(
        functools.partial(_query_kernel, width=width),
        grid=(batch, tiles, pl.cdiv(rows, block)),
        in_specs=[
            pl.BlockSpec((None, block, lanes), lambda b, t, i: (b, i, first + t)),
            pl.BlockSpec((None, 1, lanes), lambda b, t, i: (b, 0, t)),
        ],
        out_specs=[*[tile] * terms, pl.BlockSpec((None, shared, block), lambda b, t, i: (b * tiles + t, 0, i))],
        out_shape=[
            *[jax.ShapeDtypeStruct((batch, rows, tiles * lanes), dtype)] * terms,
            jax.ShapeDtypeStruct((batch * tiles, shared, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=8 * batch * rows * tiles * lanes,
            transcendentals=0,
            bytes_accessed=batch * rows * tiles * lanes * (q.dtype.itemsize + terms),
        ),
        name="round_queries",
        interpret=interpret,
    )(q, unit[:, None])
    return values, scales


def round_queries_reference(
    q: jax.Array, unit: jax.Array, dtype: Any, *, heads: int
) -> tuple[list[jax.Array], jax.Array]:
    """Compute the same as `round_queries` of all heads, with scales [B, N, Lq], in plain jnp."""
    scaled = (q.astype(jnp.float32) * unit[:, None]).reshape(*q.shape[:2], heads, -1)
    values, scales = _round_heads(scaled, dtype)
    return [value.reshape(q.shape) for value in values], scales[..., 0].swapaxes(1, 2)


def _round_heads(x: jax.Array, dtype: Any) -> tuple[list[jax.Array], jax.Array]:
    """Return the terms of x and their scales, one for the whole last axis."""
    scales = jnp.maximum(largest_size(x, -1) / largest_value(dtype), SMALLEST)
    if dtype == jnp.int8:  # Scales are rounded up to a power of two.
        bits = jax.lax.bitcast_convert_type(scales, jnp.int32) + 0x7FFFFF
        power = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
        scales = jnp.where(jnp.isfinite(scales), power, jnp.nan)
    rest, values = x * (1 / scales), []
    for _ in range(1 if dtype == jnp.int8 else 2):
        values.append(to_nearest(rest, dtype))
        rest = rest - values[-1].astype(jnp.float32)
    return values, scales


def _query_kernel(q_ref, unit_ref, *refs, width):  # type: ignore[no-untyped-def]
    *value_refs, scale_ref = refs

    def rows(start: jax.Array, count: int) -> None:
        here = pl.ds(start, count)
        scaled = q_ref[here, :].astype(jnp.float32) * unit_ref[...]
        for head in range(scale_ref.shape[0]):
            lanes = slice(head * width, (head + 1) * width)
            values, scales = _round_heads(scaled[:, lanes], value_refs[0].dtype)
            for ref, value in zip(value_refs, values, strict=True):
                ref[here, lanes] = value
            scale_ref[head : head + 1, here] = jnp.broadcast_to(scales, (count, LANES)).T[:1]

    by_rows(q_ref.shape[0], TOKENS_AT_ONCE, LANES, rows)
