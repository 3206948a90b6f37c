"""Means of blocks of rows, by which each block of queries chooses the blocks of keys it attends to.

XLA would first write all rows in float32. Shapes: L rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.flash_kernel import Ref

ROWS = 2048  # Rows of a grid step.


def block_means(
    x: jax.Array,
    size: int,
    *,
    real: int | jax.Array,
    tiles: int,
    lanes: int,
    first: int = 0,
    interpret: Any = False,
) -> jax.Array:
    """Compute the mean of every `size` rows, in each tile of columns.

    Args:
        x: [L, at least (first + tiles) * lanes].
        size: Rows of a block, a divisor of `ROWS`.
        real: Rows from here on are ignored; the mean of no rows is zero.
        tiles: Number of tiles.
        lanes: Columns of a tile.
        first: The first tile, read in place.
        interpret: As for `pallas_call`.

    Returns:
        [tiles, ceil(L / size), lanes] float32.
    """
    rows, blocks = x.shape[0], -(-x.shape[0] // size)
    x = jnp.pad(x, ((0, max(0, ROWS - rows)), (0, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, size=size),
        grid=(tiles, -(-rows // ROWS)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec((ROWS, lanes), lambda t, i: (i, first + t))],
        out_specs=pl.BlockSpec((None, ROWS // size, lanes), lambda t, i: (t, i, 0)),
        out_shape=jax.ShapeDtypeStruct((tiles, max(blocks, ROWS // size), lanes), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=rows * tiles * lanes, transcendentals=0, bytes_accessed=rows * tiles * lanes * x.dtype.itemsize
        ),
        interpret=interpret,
        name="block_means",
    )(jnp.asarray(real, jnp.int32).reshape(1), x)[:, :blocks]


def block_means_reference(
    x: jax.Array, size: int, *, real: int | jax.Array, tiles: int, lanes: int, first: int = 0
) -> jax.Array:
    """Compute the same as `block_means`, in plain jnp."""
    blocks = -(-len(x) // size)
    x = x[:, first * lanes : (first + tiles) * lanes].astype(jnp.float32)
    x = jnp.where((jnp.arange(len(x)) < real)[:, None], x, 0)
    sums = jnp.pad(x, ((0, blocks * size - len(x)), (0, 0))).reshape(blocks, size, tiles, lanes).sum(axis=1)
    return (sums / _count_real(real, jnp.arange(blocks), size)[:, None, None]).swapaxes(0, 1)


def _kernel(real_ref: Ref, x_ref: Ref, out_ref: Ref, *, size: int) -> None:
    """Run one grid step (t, i)."""
    real, blocks = real_ref[0], ROWS // size
    start, first_block = pl.program_id(1) * ROWS, pl.program_id(1) * blocks

    def sums(x: jax.Array) -> jax.Array:
        return jnp.sum(x.reshape(blocks, size, x.shape[1]), axis=1)

    @pl.when(start + ROWS <= real)
    def _() -> None:
        out_ref[...] = sums(x_ref[...].astype(jnp.float32)) / size

    @pl.when(start + ROWS > real)
    def _() -> None:
        x = x_ref[...].astype(jnp.float32)
        totals = sums(jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) + start < real, x, 0.0))
        block = lax.broadcasted_iota(jnp.int32, totals.shape, 0) + first_block
        out_ref[...] = totals / _count_real(real, block, size)


def _count_real(real: int | jax.Array, block: jax.Array, size: int) -> jax.Array:
    """Return how many rows of a block are real, at least one."""
    return jnp.clip(real - block * size, 1, size).astype(jnp.float32)
