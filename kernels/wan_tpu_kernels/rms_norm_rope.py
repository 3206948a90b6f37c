"""RMS normalisation of queries or keys over all heads, then rotary embedding, in one pass over HBM.

Channels are paired (i, i + D/2) in each head, so that a rotation is a roll by half a head and not a shuffle of
neighbouring lanes. Weights of models that pair (2i, 2i + 1) are permuted once, when they are loaded.

Shapes: L rows (tokens), N heads, D head width.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.columns import ColumnParts, Columns
from wan_tpu_kernels.head_norm_rope import swap_halves
from wan_tpu_kernels.tiles import by_rows, even_block, pass_over, sublanes, vmem_bytes

ROWS, ROWS_AT_ONCE = 512, 64  # Rows of a tile, and of one iteration of the inner loop, as in layer_norm.py.
ROWS_OF_TABLES = 128  # Rows of a tile if every head has its own angles: the tables then have four times the bytes of x.


def rms_norm_rope(
    x: jax.Array,
    weight: jax.Array,
    tables: tuple[jax.Array, jax.Array] | None,
    *,
    eps: float,
    head: int | None = None,
    groups: int = 1,
    parts: tuple[int, ...] = (),
    interpret: bool = False,
) -> ColumnParts:
    """Compute x / sqrt(mean square + eps) * weight and rotate it, in float32; the result has the dtype of x.

    Args:
        x: [L, N*D]. The mean is over all heads.
        weight: [N*D].
        tables: Cosines and sines [L, D] of each row's angles, as [cos, cos] and [-sin, sin]; None for no rotation.
        eps: Added to the mean square.
        head: D, if every head has its own angles; tables are then [L, N*D].
        groups, parts: The layout of the result's columns, see columns.py.
        interpret: As for `pallas_call`.
    """
    rows, channels = x.shape
    block = even_block(rows, ROWS if head is None else ROWS_OF_TABLES, sublanes(x.dtype))
    columns = Columns(channels, groups, parts)
    specs = [pl.BlockSpec((block, channels), lambda i: (i, 0)), pl.BlockSpec((1, channels), lambda i: (0, 0))]
    arrays = [x, weight[None].astype(jnp.float32)]
    if tables is not None:
        specs += [pl.BlockSpec((block, tables[0].shape[1]), lambda i: (i, 0))] * 2
        arrays += tables
    results = pl.pallas_call(
        functools.partial(_kernel, eps=eps, columns=columns, rotated=tables is not None, head=head),
        out_shape=columns.shapes(rows, x.dtype),
        grid=(pl.cdiv(rows, block),),
        in_specs=specs,
        out_specs=columns.specs(block),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem_bytes(interpret=interpret)
        ),
        cost_estimate=pass_over(x),
        name="rms_norm" if tables is None else "rms_norm_rope",
        interpret=interpret,
    )(*arrays)
    return columns.unwrap(results)


def rms_norm_rope_reference(
    x: jax.Array,
    weight: jax.Array,
    tables: tuple[jax.Array, jax.Array] | None,
    *,
    eps: float,
    head: int | None = None,
    groups: int = 1,
    parts: tuple[int, ...] = (),
) -> ColumnParts:
    """Compute the same as `rms_norm_rope`, in plain jnp."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps) * weight.astype(jnp.float32)
    if tables is not None:
        cos, sin = (table.reshape(len(table), -1, head or table.shape[-1]) for table in tables)
        heads = normed.reshape(x.shape[0], -1, cos.shape[-1])
        normed = (heads * cos + jnp.roll(heads, cos.shape[-1] // 2, axis=-1) * sin).reshape(x.shape)
    return Columns(x.shape[1], groups, parts).cut(normed.astype(x.dtype))


def _kernel(x_ref, weight_ref, *refs, eps, columns, rotated, head):  # type: ignore[no-untyped-def]
    tables, results = (refs[:2], refs[2:]) if rotated else ((), refs)
    channels, dtype = x_ref.shape[1], x_ref.dtype

    def rows(start: jax.Array, count: int) -> None:
        here = pl.ds(start, count)
        wide = x_ref[here, :].astype(jnp.float32)
        inverse = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
        if not tables:
            (o_ref,) = results
            o_ref[here, :] = (wide * inverse * weight_ref[...]).astype(dtype)
            return
        width = head or tables[0].shape[1]
        block = math.lcm(width, LANES) if head else width  # Narrow heads share a register.
        block = block if all(part % block == 0 for part in columns.widths) else width
        for lane in range(0, channels, block):
            lanes = slice(lane, lane + block)
            cos, sin = (table[here, lanes if head else slice(None)] for table in tables)
            normed = x_ref[here, lanes].astype(jnp.float32) * inverse * weight_ref[:, lanes]
            result = (normed * cos + swap_halves(normed, width) * sin).astype(dtype)
            columns.store(results, here, lane, result)

    by_rows(x_ref.shape[0], ROWS_AT_ONCE, sublanes(x_ref.dtype), rows)
