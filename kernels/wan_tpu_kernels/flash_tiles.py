"""Call the tile program of flash attention: which blocks a grid step gets, and what the call costs.

Letters: B batch, N heads, Lq Lk tokens, D head width, S heads that share a tile's lanes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.flash_kernel import SUBLANES, AttentionTile, Ref, run_grid_step


def flash_tiles(
    q: Sequence[jax.Array],
    k: jax.Array,
    v: jax.Array,
    rows_of: jax.Array | None,
    tile: AttentionTile,
    heads: int,
    interpret: Any,
    first: tuple[int, int, int] = (0, 0, 0),
    count: jax.Array | None = None,
    values_of: jax.Array | None = None,
    dtype: Any = None,
) -> list[jax.Array]:
    """Run the kernel over all tiles.

    Args:
        q: One or two terms whose sum is Q, [B, Lq, N * D] each. Lq and Lk are at least one block.
        k, v: [B, Lk, N * D].
        rows_of: Each query's factor of 8-bit logits, [B * N / S, S, Lq], else None. float32 multiplies the logits, in
            place of the multiplier. int32 is added to the logits, which are whole numbers, and makes them float32: it
            holds the bits of `low_precision.MAGIC` times their scale, a power of two. Softmax isn't affected by what
            that adds to all logits of a query.
        tile: The static settings.
        heads: N. Q, K and V may hold more.
        interpret: As for `pallas_call`.
        first: The first tile to use of Q, K and V.
        count: The number of real keys of a counted tile, int32 [1]; blocks behind them are neither fetched nor
            computed.
        values_of: Scale and mean of each channel of V in 8 bits, [B, 2, N * D] float32.
        dtype: The output's; by default that of V.

    Returns:
        The output [B, Lq, N * D]; with softmax "optimistic" also a check [B * N / S, 1, Lq] float32, zero where the
        sums and outputs of a row are finite and NaN where they are not.
    """
    (batch, q_len, _), tiles, blocks = q[0].shape, heads // tile.shared, tile.blocks
    d, lanes, width = tile.width, tile.width * tile.shared, tile.width * heads
    grid = (batch, tiles, -(-q_len // blocks.block_q), tile.kv_steps)

    def key_block(j: jax.Array, counts: Sequence[Ref]) -> jax.Array:
        """Return the block of keys at step j; beyond the last real block, that one again, which is already in VMEM."""
        return jnp.minimum(j, lax.div(counts[0][0] - 1, blocks.block_kv)) if counts else j

    queries = pl.BlockSpec((None, blocks.block_q, lanes), lambda b, h, i, j, *_: (b, i, first[0] + h))
    rows = pl.BlockSpec((None, blocks.block_q, lanes), lambda b, h, i, j, *_: (b, i, h))
    keys = pl.BlockSpec((None, blocks.block_kv, lanes), lambda b, h, i, j, *n: (b, key_block(j, n), first[1] + h))
    values = pl.BlockSpec((None, blocks.block_kv, lanes), lambda b, h, i, j, *n: (b, key_block(j, n), first[2] + h))
    flags = pl.BlockSpec((None, 1, blocks.block_q), lambda b, h, i, j, *_: (b * tiles + h, 0, i))
    own_rows = pl.BlockSpec((None, tile.shared, blocks.block_q), lambda b, h, i, j, *_: (b * tiles + h, 0, i))
    table = [] if rows_of is None else [own_rows]
    if values_of is not None:
        table.append(pl.BlockSpec((None, 2, lanes), lambda b, h, i, j, *_: (b, 0, h)))
    outputs = 2 if tile.softmax == "optimistic" else 1
    kind = q[0].dtype
    return pl.pallas_call(
        functools.partial(
            run_grid_step, tile=tile, terms=len(q), scaled=rows_of is not None, rounded=values_of is not None
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=int(tile.counted),
            grid=grid,
            in_specs=[*[queries for _ in q], keys, values, *table],
            out_specs=[rows, flags][:outputs],
            scratch_shapes=[
                pltpu.VMEM((tile.shared, d + SUBLANES, blocks.block_q), jnp.float32),
                pltpu.VMEM((tile.shared, SUBLANES, blocks.block_q), jnp.float32),
                *([pltpu.VMEM((tile.shared, len(q), blocks.block_q, lanes), kind)] if tile.shared > 1 else []),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, q_len, width), dtype or v.dtype),
            jax.ShapeDtypeStruct((batch * tiles, 1, q_len), jnp.float32),
        ][:outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=blocks.vmem_limit,
        ),
        cost_estimate=_cost(q, k, tile, heads),
        interpret=interpret,
        name=f"flash_attention_{tile.softmax}"
        + ("" if kind == jnp.bfloat16 else f"_{kind.name}")
        + ("" if values_of is None else "_both"),
    )(*([] if count is None else [count]), *q, k, v, *(x for x in (rows_of, values_of) if x is not None))


def _cost(q: Sequence[jax.Array], k: jax.Array, tile: AttentionTile, heads: int) -> pl.CostEstimate:
    """Return the call's cost for XLA's scheduler: K and V are read once per block of queries."""
    (batch, q_len, _), width = q[0].shape, heads * tile.width
    scores = batch * heads * q_len * tile.kv_len
    return pl.CostEstimate(
        flops=4 * scores * (width // heads),
        transcendentals=scores,
        bytes_accessed=sum(batch * q_len * width * term.dtype.itemsize for term in (*q, q[0]))
        + -(-q_len // tile.blocks.block_q) * 2 * batch * k.shape[1] * width * k.dtype.itemsize,
    )
