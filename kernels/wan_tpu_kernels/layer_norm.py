"""Layer or RMS normalisation with scale and shift in one pass over HBM.

XLA takes two passes (statistics, then the result) and writes float32 in between.
Shapes: L rows (tokens), C channels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.low_precision import LANES, Rounded, round_rows_reference, to_8_bits
from wan_tpu_kernels.modulation import modulation_row, number_patterns, read_modulation, row_patterns
from wan_tpu_kernels.tiles import by_rows, even_block, pass_over, sublanes, vmem_bytes

ROWS = 512  # Rows of a tile: 5 MB at 5120 channels, long enough a transfer to hide its start.
ROWS_AT_ONCE = 64  # Rows of one iteration of the inner loop, enough to hide the latency of sums over lanes.


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    *,
    eps: float,
    first_rows: jax.Array | int = 0,
    rows: int | None = None,
    rounded: Any = None,
    centred: bool = True,
    dtype: Any = None,
    interpret: bool = False,
) -> jax.Array | Rounded:
    """Compute (x - mean) / sqrt(variance + eps) * scale + shift, in float32; the result has the dtype of x by default.

    Args:
        x: [L, C].
        scale, shift: [M, C], one row for each segment of the rows of x.
        eps: Added to the variance.
        first_rows: Ends (exclusive) of the first M - 1 segments of rows, [M - 1], or a number for two segments.
        rows: How many of the first rows are normalised; all of x if None.
        rounded: An 8-bit type, to return `Rounded` rows of it.
        centred: False leaves the mean in: x / sqrt(mean square + eps) * scale + shift.
        dtype: The result's.
        interpret: As for `pallas_call`.
    """
    rows, channels = rows or x.shape[0], x.shape[1]
    dtype = rounded or dtype or x.dtype
    block = even_block(rows, ROWS, sublanes(dtype))
    steps = pl.cdiv(rows, block)
    tile = pl.BlockSpec((block, channels), lambda i: (i, 0))
    patterns = [row_patterns(vector, first_rows) for vector in (scale, shift)]
    whole = pl.BlockSpec(patterns[0].shape, lambda i: (0, 0))
    out = [jax.ShapeDtypeStruct((rows, channels), dtype)]
    out_specs = [tile]
    if rounded is not None:
        out.append(jax.ShapeDtypeStruct((rows, LANES), jnp.float32))
        out_specs.append(pl.BlockSpec((block, LANES), lambda i: (i, 0)))
    results = pl.pallas_call(
        functools.partial(_kernel, eps=eps, centred=centred),
        out_shape=out,
        grid=(steps,),
        in_specs=[tile, whole, whole, pl.BlockSpec(memory_space=pltpu.SMEM)],
        out_specs=out_specs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem_bytes(interpret=interpret)
        ),
        cost_estimate=pass_over(x),
        name=("layer_norm" if centred else "rms_norm_shift") + ("" if rounded is None else "_rounded"),
        interpret=interpret,
    )(x, *patterns, number_patterns(scale, first_rows, steps * block))
    return results[0] if rounded is None else Rounded(*results)


def layer_norm_reference(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    *,
    eps: float,
    first_rows: jax.Array | int = 0,
    rows: int | None = None,
    rounded: Any = None,
    centred: bool = True,
    dtype: Any = None,
) -> jax.Array | Rounded:
    """Compute the same as `layer_norm`, in plain jnp."""
    x = x[:rows]
    rows = x.shape[0]
    normed = _normalise(x.astype(jnp.float32), eps, centred)
    scaled = normed * modulation_row(scale, 0, rows, first_rows) + modulation_row(shift, 0, rows, first_rows)
    return scaled.astype(dtype or x.dtype) if rounded is None else round_rows_reference(scaled, rounded)


def _normalise(x: jax.Array, eps: float, centred: bool) -> jax.Array:
    x = x - x.mean(-1, keepdims=True) if centred else x
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)


def _kernel(x_ref, scale_ref, shift_ref, numbers_ref, o_ref, *scales, eps, centred):  # type: ignore[no-untyped-def]
    first = pl.program_id(0) * x_ref.shape[0]

    def rows(start: jax.Array, count: int) -> None:
        here = pl.ds(start, count)
        normed = _normalise(x_ref[here, :].astype(jnp.float32), eps, centred)
        scale = read_modulation(scale_ref, numbers_ref, first + start, count)
        shift = read_modulation(shift_ref, numbers_ref, first + start, count)
        scaled = normed * scale + shift
        if scales:
            values, size = to_8_bits(scaled, o_ref.dtype)
            scales[0][here, :] = jnp.broadcast_to(size, (count, LANES))
        else:
            values = scaled.astype(o_ref.dtype)
        o_ref[here, :] = values

    by_rows(x_ref.shape[0], ROWS_AT_ONCE, sublanes(o_ref.dtype), rows)
