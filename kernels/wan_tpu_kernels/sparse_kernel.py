"""The tile program of block-sparse attention: what one grid step does with four blocks of queries.

Two of them are computed at once (two_blocks.py). A grid step computes two such pairs in turn, so that the second begins
while the first ends.

Letters: B batch, N heads, Lq Lk tokens, D head width, S heads that share 128 lanes, n blocks of keys in a list.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import MIB
from wan_tpu_kernels.flash_kernel import SUBLANES, Ref
from wan_tpu_kernels.two_blocks import (
    AHEAD,
    BOTH,
    KEYS,
    QUERIES,
    TOGETHER,
    TwoBlocks,
    columns_of,
    gather_rows,
    list_scratch,
    plan_vmem,
)

PAIRS = 2  # Pairs of blocks per grid step: 3 to 5 % faster than one, according to the compiler.
STEP = PAIRS * BOTH  # Queries of a grid step.
UNROLLED = 48  # Chunks that are unrolled; longer lists loop over groups of this many.
BESIDE, USUAL = 8 * MIB, 16 * MIB  # VMEM beside K and V: the least, which 362 frames of MiniMax-H3 leave on v7x.


@dataclasses.dataclass(frozen=True)
class SparseTile:
    """The static settings of the kernel.

    Attributes:
        width: D.
        shared: S.
        count: Blocks of keys in a list.
        least: How many entries of every list stand for a block; later ones may stand for none.
        multiplier: The factor of q.k that makes logits powers of two.
        online: Whether softmax is "online".
    """

    width: int
    shared: int
    count: int
    least: int
    multiplier: float
    online: bool = False

    @property
    def lanes(self) -> int:
        """Columns of a tile."""
        return self.width * self.shared

    @property
    def chunks(self) -> int:
        """Number of chunks of `TOGETHER` blocks in a list."""
        return -(-self.count // TOGETHER)

    @property
    def first_masked(self) -> int:
        """The first chunk in which a row of K may be no key."""
        return (self.least - 1) // TOGETHER

    @property
    def groups(self) -> list[range]:
        """Chunks that are unrolled together; masked ones are in the last group."""
        groups = [range(start, min(start + UNROLLED, self.chunks)) for start in range(0, self.chunks, UNROLLED)]
        while groups[-1].start > self.first_masked:
            last = groups.pop()
            groups[-1] = range(groups[-1].start, last.stop)
        return groups


def sparse_tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: jax.Array,
    kv_len: jax.Array,
    tile: SparseTile,
    heads: int,
    first: tuple[int, int, int],
    interpret: Any,
) -> list[jax.Array]:
    """Run the kernel over all tiles.

    Args:
        q: [B, at least 512, N * D].
        k, v: [B, Lk, N * D].
        lists: [B * N * steps, 2, 2 n]: of each pair A's list, then B's.
        kv_len: int32 [1], the number of real keys.
        tile: The static settings.
        heads: N.
        first: The first tile to use of q, k and v.
        interpret: As for `pallas_call`.

    Returns:
        The output [B, Lq, N * D]; unless online also a check [B * N, 1, Lq] float32, NaN where a row isn't finite.
    """
    (batch, rows, _), kv_rows, lanes, shared = q.shape, k.shape[1], tile.lanes, tile.shared
    steps, tiles = -(-rows // STEP), heads // shared
    buffers, vmem_bytes = plan_vmem(kv_rows, lanes, k.dtype, BESIDE, USUAL)
    whole = functools.partial(pl.BlockSpec, pipeline_mode=pl.Buffered(buffers))
    queries = pl.BlockSpec((None, STEP, lanes), lambda b, t, i, s: (b, i, first[0] + t))
    keys = whole((None, kv_rows, lanes), lambda b, t, i, s: (b, 0, first[1] + t))
    values = whole((None, kv_rows, lanes), lambda b, t, i, s: (b, 0, first[2] + t))
    results = pl.BlockSpec((None, STEP, lanes), lambda b, t, i, s: (b, i, t))
    lists_of = pl.BlockSpec(
        (None, PAIRS, lists.shape[2]),
        lambda b, t, i, s: (((b * tiles + t) * shared + s) * steps + i, 0, 0),
        memory_space=pltpu.SMEM,
    )
    flags = pl.BlockSpec((None, 1, STEP), lambda b, t, i, s: ((b * tiles + t) * shared + s, 0, i))
    outputs = 1 if tile.online else 2
    scores = batch * heads * steps * STEP * tile.count * KEYS
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(batch, tiles, steps, shared),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), lists_of, queries, keys, values],
        out_specs=[results, flags][:outputs],
        scratch_shapes=list_scratch(PAIRS, lanes, q.dtype),
        out_shape=[
            jax.ShapeDtypeStruct((batch, rows, heads * tile.width), v.dtype),
            jax.ShapeDtypeStruct((batch * heads, 1, rows), jnp.float32),
        ][:outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * tile.width,
            transcendentals=scores,
            bytes_accessed=2 * batch * (rows + kv_rows) * heads * tile.width * q.dtype.itemsize + lists.size * 4,
        ),
        interpret=interpret,
        name="sparse_attention" + ("_online" if tile.online else ""),
    )(kv_len, lists, q, k, v)


def _kernel(
    kv_len_ref: Ref, list_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref, o_ref: Ref, *refs: Ref, tile: SparseTile
) -> None:
    """Run one grid step (b, t, i, s): four blocks of queries of one head."""
    check_ref, scratch = refs[:-4], refs[-4:]
    both = [TwoBlocks(tile.online, *(ref.at[i] for ref in scratch)) for i in range(PAIRS)]
    pairs = [_Pair(kv_len_ref, list_ref.at[i], k_ref, v_ref, both[i], tile) for i in range(PAIRS)]
    in_head = lax.div(lax.broadcasted_iota(jnp.int32, (BOTH, tile.lanes), 1), tile.width) == pl.program_id(3)
    rows = [slice(number * BOTH, (number + 1) * BOTH) for number in range(PAIRS)]
    for pair, here in zip(pairs, rows, strict=True):
        q = q_ref[here, :]
        pair.both.start(q if tile.shared == 1 else jnp.where(in_head, q, jnp.zeros_like(q)))

    groups = tile.groups
    if len(groups) > 1:
        _add(pairs, groups[0], first=True)

        def body(group: jax.Array, _: None) -> None:
            _add(pairs, [group * UNROLLED + i for i in range(UNROLLED)])

        lax.fori_loop(1, len(groups) - 1, body, None)
    _add(pairs, groups[-1], first=len(groups) == 1, last=True)

    for pair, here in zip(pairs, rows, strict=True):
        out = pair.both.result().T.astype(o_ref.dtype)
        o_ref[here, :] = out if tile.shared == 1 else jnp.where(in_head, out, o_ref[here, :])
        for ref in check_ref:
            ref[:, here] = pair.both.check()


def _add(pairs: Sequence["_Pair"], chunks: Sequence[Any], first: bool = False, last: bool = False) -> None:
    """Add the same chunks of each pair's lists; `first` and `last` say whether the lists begin and end with them."""
    units = [(pair, position) for pair in pairs for position in range(len(chunks))]
    masked = [last and chunks[position] >= pair.tile.first_masked for pair, position in units]
    logits: list[jax.Array] = []
    for number, (pair, position) in enumerate(units):
        for other in range(number + len(logits), min(number + AHEAD + 1, len(units))):
            logits.append(units[other][0].logits(chunks[units[other][1]], masked[other]))
        pair.add(logits.pop(0), chunks[position], first and position == 0, masked[number])


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Two blocks of queries, A and B, and their lists.

    Attributes:
        kv_len_ref: [1], the number of real keys.
        list_ref: [2 n], A's list, then B's.
        k_ref, v_ref: All of K and V of the tile.
        both: The queries.
        tile: The static settings.
    """

    kv_len_ref: Ref
    list_ref: Ref
    k_ref: Ref
    v_ref: Ref
    both: TwoBlocks
    tile: SparseTile

    def add(self, s: jax.Array, chunk: Any, first: bool, masked: bool) -> None:
        """Add a chunk whose logits are S^T [256, 256]."""
        both = self.both
        if first or self.tile.online:
            both.move_shift(jnp.max(s, axis=0, keepdims=True), first)
        p = jnp.exp2(s - both.shift_ref[:1, :])
        both.sum_ref[...] += jnp.sum(p.reshape(-1, SUBLANES, BOTH), axis=0)
        for block in range(2):
            both.add(block, p[:, columns_of(block)], self._rows(self.v_ref, chunk, block, masked))

    def logits(self, chunk: Any, masked: bool) -> jax.Array:
        """Return S^T [256, 256] float32 in powers of two, -inf where there is no real key."""
        s = self.both.logits([self._rows(self.k_ref, chunk, block, masked) for block in range(2)])
        if not math.isclose(self.tile.multiplier, 1.0, rel_tol=1e-6):
            s = s * self.tile.multiplier
        if not masked:
            return s
        shape = TOGETHER * KEYS, QUERIES
        real = jnp.concatenate([self._is_key(chunk, block, shape) for block in range(2)], axis=1)
        return jnp.where(real, s, -jnp.inf)

    def _rows(self, ref: Ref, chunk: Any, block: int, masked: bool) -> jax.Array:
        """Return the rows [256, S D] of K or V that A (0) or B (1) attends to, zero where there is no real key."""
        starts = [self._start(chunk, block, i) for i in range(TOGETHER)]
        if masked:  # What stands for no block is read from the last one.
            starts = [jnp.minimum(start, ref.shape[0] // KEYS * KEYS - KEYS) for start in starts]
        rows = gather_rows(ref, starts)
        # Rows after the last key may be NaN, and 0 * NaN is NaN.
        return jnp.where(self._is_key(chunk, block, rows.shape), rows, jnp.zeros_like(rows)) if masked else rows

    def _start(self, chunk: Any, block: int, i: int) -> Any:
        return self.list_ref[(block * self.tile.chunks + chunk) * TOGETHER + i] * KEYS

    def _is_key(self, chunk: int, block: int, shape: tuple[int, ...]) -> jax.Array:
        """Return whether each of 256 rows is a real key, of a block that is listed."""
        return jnp.concatenate(
            [
                lax.broadcasted_iota(jnp.int32, (KEYS, shape[1]), 0)
                < (self.kv_len_ref[0] - self._start(chunk, block, i) if chunk * TOGETHER + i < self.tile.count else 0)
                for i in range(TOGETHER)
            ],
            axis=0,
        )
