"""Normalisation of queries or keys head by head, then rotary embedding, in one pass over HBM.

Heads narrower than the 128 lanes of a register share a register. Their means are a product with a block-diagonal matrix
of ones, which the otherwise idle matrix unit returns spread over each head's lanes, and a rotation is two rolls and a
select. Channels are paired (i, i + D/2) in each head, as in rms_norm_rope.py.

Shapes: L rows (tokens), N heads, D head width, S heads in the lanes of one register.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.columns import ColumnParts, Columns
from wan_tpu_kernels.tiles import by_rows, even_block, pass_over, sublanes, vmem_bytes

ROWS = 512  # Rows of a tile, as in layer_norm.py.
# Rows, and registers' widths of columns, of one iteration of the inner loop: the best tried at 3,072 channels. With 16
# rows, as a prime number of sixteens would need, a row takes twice as long: tiles have whole iterations.
ROWS_AT_ONCE, COLUMNS_AT_ONCE = 128, 4

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
) -> ColumnParts:
    """Normalise each head of x and rotate it, in float32; the result has the dtype of x.

    With a bias this is LayerNorm, (x - mean) / sqrt(variance + eps) * weight + bias; without, RMSNorm,
    x / sqrt(mean square + eps) * weight.

    Args:
        x: [L, N*D].
        weight: [D], the same for every head.
        bias: [D], or None.
        tables: Cosines and sines [L, D] of each row's angles, as [cos, cos] and [-sin, sin]; None for no rotation.
        eps: Added to the variance or the mean square.
        groups, parts: The layout of the result's columns, see columns.py.
        interpret: As for `pallas_call`.
    """
    (rows, channels), head = x.shape, len(weight)
    block, columns = even_block(rows, ROWS, ROWS_AT_ONCE), Columns(channels, groups, parts)
    whole_registers = LANES % head == 0 and all(width % LANES == 0 for width in columns.widths)
    shared = LANES // head if whole_registers else 1
    vectors = [weight] if bias is None else [weight, bias]
    whole = pl.BlockSpec((1, shared * head), lambda i: (0, 0))
    specs = [pl.BlockSpec((block, channels), lambda i: (i, 0)), *(whole for _ in vectors)]
    arrays = [x, *(jnp.tile(vector[None].astype(jnp.float32), (1, shared)) for vector in vectors)]
    if tables is not None:
        specs += [pl.BlockSpec((block, head), lambda i: (i, 0))] * 2
        arrays += tables
    results = pl.pallas_call(
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
    return columns.unwrap(results)


def head_norm_rope_reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tables: Tables | None,
    *,
    eps: float,
    groups: int = 1,
    parts: tuple[int, ...] = (),
) -> ColumnParts:
    """Compute the same as `head_norm_rope`, in plain jnp."""
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
    (bias_ref, *refs_left) = refs if centred else (None, *refs)
    tables, results = (refs_left[:2], refs_left[2:]) if rotated else ((), refs_left)
    channels, width = x_ref.shape[1], weight_ref.shape[1]
    shared = width // head

    def rows(start: jax.Array, count: int) -> None:
        here = pl.ds(start, count)
        angles = [jnp.concatenate([table[here, :]] * shared, axis=1) for table in tables]
        for first in range(0, channels, width * COLUMNS_AT_ONCE):
            starts = range(first, min(first + width * COLUMNS_AT_ONCE, channels), width)
            stacked = jnp.concatenate([x_ref[here, lane : lane + width] for lane in starts])
            x = stacked.astype(jnp.float32)
            if centred:
                x = x - head_means(stacked, head)
            squares = head_means(x * x, head, rounded=stacked.dtype == jnp.bfloat16)
            y = x * jax.lax.rsqrt(squares + eps) * weight_ref[...]
            if centred:
                y = y + bias_ref[...]
            if tables:
                cos, sin = (jnp.concatenate([table] * len(starts)) for table in angles)
                y = y * cos + swap_halves(y, head) * sin
            y = y.astype(x_ref.dtype)
            for index, lane in enumerate(starts):
                columns.store(results, here, lane, y[index * count : (index + 1) * count])

    by_rows(x_ref.shape[0], ROWS_AT_ONCE, sublanes(x_ref.dtype), rows)


def head_means(x: jax.Array, head: int, *, rounded: bool = False) -> jax.Array:
    """Return the mean of each head in all of its lanes, float32.

    Args:
        x: [rows, S*D].
        head: D.
        rounded: Whether to split positive float32 values into the sum of two bfloat16, off by at most 2^-17.

    Returns:
        [rows, S*D], or [rows, 1] if there is one head.
    """
    width = x.shape[1]
    if width == head:
        return x.astype(jnp.float32).mean(-1, keepdims=True)
    if rounded:
        leading = x.astype(jnp.bfloat16)
        x = jnp.concatenate([leading, (x - leading.astype(jnp.float32)).astype(jnp.bfloat16)], axis=1)
    shape = x.shape[1], width
    of_row, of_column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) % width // head for axis in (0, 1))
    blocks = jnp.where(of_row == of_column, 1 / head, 0.0).astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, blocks, precision=precision, preferred_element_type=jnp.float32)


def swap_halves(x: jax.Array, head: int) -> jax.Array:
    """Swap the halves of each head of x [rows, S*D]."""
    width, half = x.shape[1], head // 2
    later = pltpu.roll(x, half, 1)
    if width == head:
        return later
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(lane % head < half, pltpu.roll(x, width - half, 1), later)
