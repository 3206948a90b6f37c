"""Normalisation of queries or keys head by head, then rotary embedding, in one pass over HBM.

Heads narrower than the 128 lanes of a register share one: their means are a product with a matrix of ones in blocks,
which the idle matrix unit gives back spread over each head's lanes, and a rotation is two rolls and a choice. Pairs are
(i, i + D/2) of each head, as in rms_norm_rope.py.

Shapes: L rows (tokens), N heads, D head width, S heads in the lanes of one register.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.columns import Columns, Cut
from wan_tpu_kernels.tiles import by_rows, even_block, pass_over, sublanes, vmem_bytes

ROWS = 512  # of a tile, as in layer_norm.py
ROWS_AT_ONCE, COLUMNS_AT_ONCE = 128, 4  # of the loop inside: registers' worth of lanes, tried at 3,072 channels

Tables = tuple[jax.Array, jax.Array]


def head_norm_rope(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tables: Tables | None,
    *,
    eps: float,
    groups: int = 1,
    parts: tuple[int, ...] = (),
    interpret: bool = False,
) -> Cut:
    """Return each head of x normalised, rotated, computed in float32, in the dtype of x.

    x             [L, N*D]
    weight, bias  [D], the same for every head: LayerNorm, (x - mean) / sqrt(variance + eps) * weight + bias; without a
                  bias RMSNorm, x / sqrt(mean square + eps) * weight
    tables        cosines and sines [L, D] of each row's angles: [cos, cos] and [-sin, sin]; None: no rotation
    groups, parts  of the result's columns, see columns.py
    """
    (rows, channels), head = x.shape, len(weight)
    block, columns = even_block(rows, ROWS, sublanes(x.dtype)), Columns(channels, groups, parts)
    whole_registers = LANES % head == 0 and all(width % LANES == 0 for width in columns.widths)
    shared = LANES // head if whole_registers else 1
    vectors = [weight] if bias is None else [weight, bias]
    whole = pl.BlockSpec((1, shared * head), lambda i: (0, 0))
    specs = [pl.BlockSpec((block, channels), lambda i: (i, 0)), *(whole for _ in vectors)]
    arrays = [x, *(jnp.tile(vector[None].astype(jnp.float32), (1, shared)) for vector in vectors)]
    if tables is not None:
        specs += [pl.BlockSpec((block, head), lambda i: (i, 0))] * 2
        arrays += tables
    found = pl.pallas_call(
        functools.partial(
            _kernel, eps=eps, head=head, columns=columns, centred=bias is not None, rotated=tables is not None
        ),
        out_shape=columns.shapes(rows, x.dtype),
        grid=(pl.cdiv(rows, block),),
        in_specs=specs,
        out_specs=columns.specs(block),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem_bytes(interpret=interpret)
        ),
        cost_estimate=pass_over(x),
        name="head_norm" if tables is None else "head_norm_rope",
        interpret=interpret,
    )(*arrays)
    return columns.given(found)


def head_norm_rope_reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tables: Tables | None,
    *,
    eps: float,
    groups: int = 1,
    parts: tuple[int, ...] = (),
) -> Cut:
    """Return the same as `head_norm_rope`, in plain jnp."""
    heads = x.astype(jnp.float32).reshape(x.shape[0], -1, len(weight))
    if bias is not None:
        heads = heads - heads.mean(-1, keepdims=True)
    normed = heads * jax.lax.rsqrt((heads * heads).mean(-1, keepdims=True) + eps) * weight.astype(jnp.float32)
    if bias is not None:
        normed = normed + bias.astype(jnp.float32)
    if tables is not None:
        cos, sin = (table[:, None] for table in tables)
        normed = normed * cos + jnp.roll(normed, len(weight) // 2, axis=-1) * sin
    return Columns(x.shape[1], groups, parts).cut(normed.reshape(x.shape).astype(x.dtype))


def _kernel(x_ref, weight_ref, *refs, eps, head, columns, centred, rotated):  # type: ignore[no-untyped-def]
    (bias_ref, *others) = refs if centred else (None, *refs)
    tables, results = (others[:2], others[2:]) if rotated else ((), others)
    channels, width = x_ref.shape[1], weight_ref.shape[1]
    shared = width // head

    def rows(start: jax.Array, count: int) -> None:
        here = pl.ds(start, count)
        angles = [jnp.concatenate([table[here, :]] * shared, axis=1) for table in tables]
        for first in range(0, channels, width * COLUMNS_AT_ONCE):
            starts = range(first, min(first + width * COLUMNS_AT_ONCE, channels), width)
            given = jnp.concatenate([x_ref[here, lane : lane + width] for lane in starts])  # one below another
            x = given.astype(jnp.float32)
            if centred:
                x = x - _mean(given, head)
            y = x * jax.lax.rsqrt(_mean(x * x, head, rounded=given.dtype == jnp.bfloat16) + eps) * weight_ref[...]
            if centred:
                y = y + bias_ref[...]
            if tables:
                cos, sin = (jnp.concatenate([table] * len(starts)) for table in angles)
                y = y * cos + _other_half(y, head) * sin
            y = y.astype(x_ref.dtype)
            for index, lane in enumerate(starts):
                columns.store(results, here, lane, y[index * count : (index + 1) * count])

    by_rows(x_ref.shape[0], ROWS_AT_ONCE, sublanes(x_ref.dtype), rows)


def _mean(x: jax.Array, head: int, *, rounded: bool = False) -> jax.Array:
    """Return the mean of each head in all of its lanes, float32: x [rows, S*D] -> the same, or [rows, 1] of one head.

    rounded: positive float32 values are taken as the sum of two bfloat16, 2^-17 off at most.
    """
    width = x.shape[1]
    if width == head:
        return x.astype(jnp.float32).mean(-1, keepdims=True)
    if rounded:
        most = x.astype(jnp.bfloat16)
        x = jnp.concatenate([most, (x - most.astype(jnp.float32)).astype(jnp.bfloat16)], axis=1)
    shape = x.shape[1], width
    of_row, of_column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) % width // head for axis in (0, 1))
    blocks = jnp.where(of_row == of_column, 1 / head, 0.0).astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, blocks, precision=precision, preferred_element_type=jnp.float32)


def _other_half(x: jax.Array, head: int) -> jax.Array:
    """Swap the halves of each head: x [rows, S*D]."""
    width, half = x.shape[1], head // 2
    later = pltpu.roll(x, half, 1)
    if width == head:
        return later
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(lane % head < half, pltpu.roll(x, width - half, 1), later)
