"""The tile program of flash attention: what one grid step does with a block of queries and a block of keys.

Everything is kept transposed, S^T = K Q^T [keys, queries] and O^T = V^T P^T [D, queries], so that what softmax needs
for each query is a row vector (no lane reductions, no broadcasts along lanes) and P^T feeds the second matmul as it
is. O^T is transposed once, after the last key.

A grid step is unrolled into units of `chunk` keys x `columns` queries. The compiler schedules instructions mostly in
program order; so the logits of the unit `ahead` positions later are written before the softmax of the present one:
their matmul then runs while this unit's exponentials do.

Letters: B batch, N heads, Lq Lk tokens, D head width, bq bkv rows of a block.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.blocks import BlockSizes

Ref = Any  # a Pallas reference to VMEM or SMEM
Index = int | jax.Array

# What the optimistic kernel adds to a row's first maximum (powers of two): room for later, larger logits. The row's
# sum is then at least 2^-32, so that what float32 and bfloat16 flush (below 2^-126) is below 2^-94 of it.
HEADROOM = 32.0

FIRST_KEYS = 256  # whose largest logit is the optimistic shift; they are multiplied twice, so not many
SUBLANES = 8  # rows of one float32 vector register


@dataclasses.dataclass(frozen=True)
class Tile:
    """The static side of a kernel."""

    blocks: BlockSizes
    softmax: str  # "bounded", "optimistic" or "online"
    kv_len: int
    multiplier: float  # of q.k, to powers of two

    @property
    def kv_steps(self) -> int:
        """Number of key blocks that hold a real key."""
        return -(-self.kv_len // self.blocks.block_kv)

    @property
    def last_keys(self) -> int:
        """Real keys of the last key block."""
        return self.kv_len - (self.kv_steps - 1) * self.blocks.block_kv


def flash_tiles(
    q: jax.Array, k: jax.Array, v: jax.Array, scales: jax.Array | None, tile: Tile, heads: int, interpret: Any
) -> list[jax.Array]:
    """Run the kernel over all tiles.

    q [B, Lq, N * D], or [B, Lq, N * 2D] as two terms a head; k, v [B, Lk, N * D]; Lq and Lk at least one block; scales
    [B * N, query blocks * key blocks] float32, which multiply a block's logits (in place of the multiplier), or None.
    Returns the output [B, Lq, N * D]; with softmax "optimistic" also a check [B * N, 1, Lq] float32, zero where a
    row's sum and output are finite and NaN
    where they are not.
    """
    batch, q_len, _ = q.shape
    d, q_width, blocks = v.shape[2] // heads, q.shape[2] // heads, tile.blocks
    grid = (batch, heads, -(-q_len // blocks.block_q), tile.kv_steps)
    rows = pl.BlockSpec((None, blocks.block_q, d), lambda b, h, i, j: (b, i, h))
    queries = pl.BlockSpec((None, blocks.block_q, q_width), lambda b, h, i, j: (b, i, h))
    keys = pl.BlockSpec((None, blocks.block_kv, d), lambda b, h, i, j: (b, j, h))
    flags = pl.BlockSpec((None, 1, blocks.block_q), lambda b, h, i, j: (b * heads + h, 0, i))
    table = [] if scales is None else [pl.BlockSpec(memory_space=pltpu.SMEM)]
    outputs = 2 if tile.softmax == "optimistic" else 1
    scores = batch * heads * q_len * tile.kv_len
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile, scaled=scales is not None),
        grid=grid,
        in_specs=[queries, keys, keys, *table],
        out_specs=[rows, flags][:outputs],
        out_shape=[
            jax.ShapeDtypeStruct((batch, q_len, heads * d), v.dtype),
            jax.ShapeDtypeStruct((batch * heads, 1, q_len), jnp.float32),
        ][:outputs],
        scratch_shapes=[
            pltpu.VMEM((d + SUBLANES, blocks.block_q), jnp.float32),
            pltpu.VMEM((SUBLANES, blocks.block_q), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=blocks.vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * d,
            transcendentals=scores,
            bytes_accessed=q.nbytes + batch * q_len * heads * d * v.dtype.itemsize + grid[2] * (k.nbytes + v.nbytes),
        ),
        interpret=interpret,
        name=f"flash_attention_{tile.softmax}" + ("" if q.dtype == jnp.bfloat16 else f"_{q.dtype.name}"),
    )(q, k, v, *([] if scales is None else [scales]))


def _kernel(q_ref: Ref, k_ref: Ref, v_ref: Ref, *refs: Ref, tile: Tile, scaled: bool) -> None:
    """One grid step (b, h, i, j)."""
    scale_ref = refs[0] if scaled else None
    o_ref, *check_ref, acc_ref, shift_ref = refs[scaled:]
    step, last = pl.program_id(3), tile.kv_steps - 1
    factor: float | jax.Array = tile.multiplier
    if scale_ref is not None:
        head = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
        factor = scale_ref[head, pl.program_id(2) * tile.kv_steps + step]
    block = _Block(q_ref, k_ref, v_ref, acc_ref, shift_ref, factor, tile)

    pl.when(step == 0)(block.start)
    if tile.last_keys == tile.blocks.block_kv:
        block.add_all()
    elif tile.kv_steps == 1:
        block.add_real()
    else:
        pl.when(step < last)(block.add_all)
        pl.when(step == last)(block.add_real)

    @pl.when(step == last)
    def _() -> None:
        d = o_ref.shape[1]
        total = jnp.sum(acc_ref[d:, :], axis=0, keepdims=True)
        o_ref[...] = (acc_ref[:d, :] / total).T.astype(o_ref.dtype)
        for ref in check_ref:  # 0 * x is NaN exactly where x is not finite
            ref[...] = jnp.sum(acc_ref[...] * 0.0, axis=0, keepdims=True)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of queries and one of keys: q_ref [bq, D or 2D]; k_ref, v_ref [bkv, D].

    acc_ref [D + 8, bq] float32 holds O^T and below it the sum of the weights, as 8 rows yet to be added up; shift_ref
    [8, bq] float32 what is subtracted from the logits, 8 times the same row.
    """

    q_ref: Ref
    k_ref: Ref
    v_ref: Ref
    acc_ref: Ref
    shift_ref: Ref
    factor: float | jax.Array
    tile: Tile

    def start(self) -> None:
        """Before the first key."""
        self.acc_ref[...] = jnp.zeros_like(self.acc_ref)
        if self.tile.softmax == "online":
            self.shift_ref[...] = jnp.full_like(self.shift_ref, jnp.finfo(jnp.float32).min)
        elif self.tile.softmax == "optimistic":
            count = min(FIRST_KEYS, self._schedule.chunk)
            real = None if self.tile.kv_len >= count else self.tile.kv_len
            for columns in self._columns():
                largest = jnp.max(self._logits(0, columns, real, count), axis=0, keepdims=True)
                self.shift_ref[:, columns] = jnp.broadcast_to(largest + HEADROOM, (SUBLANES, largest.shape[1]))

    def add_all(self) -> None:
        """Add a block of nothing but real keys."""
        self._add(range(0, self.tile.blocks.block_kv, self._schedule.chunk))

    def add_real(self) -> None:
        """Add the last block, of which only some keys are real."""
        chunk, real = self._schedule.chunk, self.tile.last_keys
        if real <= chunk:
            return self._add([0], real)

        # A loop, not unrolled: this block is one of many, and unrolled it would double the code to compile.
        def body(i: jax.Array, _: None) -> None:
            self._add([pl.multiple_of(i * chunk, chunk)], real)

        return lax.fori_loop(0, pl.cdiv(real, chunk), body, None)

    def _add(self, starts: Iterable[Index], real: int | None = None) -> None:
        """Add the chunks of keys that begin at `starts`; with `real`, keys from there on do not count."""
        units = [(start, columns) for start in starts for columns in self._columns()]
        values = {id(start): self._values(start, real) for start, _ in units}
        logits = [self._logits(start, columns, real) for start, columns in units[: self._schedule.ahead]]
        for position, (start, columns) in enumerate(units):
            later = position + self._schedule.ahead
            if later < len(units):
                logits.append(self._logits(units[later][0], units[later][1], real))
            self._add_unit(logits.pop(0), values[id(start)], columns)

    def _add_unit(self, s: jax.Array, v: jax.Array, columns: Any) -> None:
        """Add S^T [chunk, columns] with V^T [D or D + 8, chunk] to sum and output."""
        if self.tile.softmax == "online":
            before = self.shift_ref[:, columns]
            shift = jnp.maximum(before, jnp.max(s, axis=0, keepdims=True))
            self.shift_ref[:, columns] = shift
            self.acc_ref[:, columns] *= jnp.exp2(before - shift)[:1]
            p = jnp.exp2(s - shift[:1])
        elif self.tile.softmax == "optimistic":
            p = jnp.exp2(s - self.shift_ref[:1, columns])
        else:
            p = jnp.exp2(s)
        if not self._schedule.mxu_sums:
            d = self.v_ref.shape[1]
            self.acc_ref[d:, columns] += jnp.sum(p.reshape(-1, SUBLANES, p.shape[1]), axis=0)
        self.acc_ref[: v.shape[0], columns] += _dot(v, p.astype(v.dtype), contract=(1, 0))

    def _logits(self, start: Index, columns: Any, real: int | None, count: int | None = None) -> jax.Array:
        """S^T [count or chunk, columns] float32 in powers of two; -inf for keys from `real` on."""
        k, q = self.k_ref[pl.ds(start, count or self._schedule.chunk), :], self.q_ref[columns, :]
        if q.shape[1] > k.shape[1]:  # Q in two terms; up to the MXU's depth (256 since v6e) the second is free
            k = jnp.concatenate([k, k], axis=1)
        s = _dot(k, q, contract=(1, 1))
        if not (isinstance(self.factor, float) and math.isclose(self.factor, 1.0, rel_tol=1e-6)):
            s = s * self.factor
        return s if real is None else jnp.where(_is_key(s.shape, start, real), s, -jnp.inf)

    def _values(self, start: Index, real: int | None) -> jax.Array:
        """V^T [D, chunk]; with sums on the MXU [D + 8, chunk]: a row of ones, and zeros to fill the register."""
        v = self.v_ref[pl.ds(start, self._schedule.chunk), :]
        if real is not None:  # what lies beyond an array's end may be NaN, and 0 * NaN is NaN
            v = jnp.where(_is_key(v.shape, start, real), v, jnp.zeros_like(v))
        if not self._schedule.mxu_sums:
            return v.T
        first = lax.broadcasted_iota(jnp.int32, (SUBLANES, v.shape[0]), 0) == 0
        return jnp.concatenate([v.T, first.astype(jnp.float32).astype(v.dtype)], axis=0)

    @property
    def _schedule(self) -> Any:
        return self.tile.blocks.online if self.tile.softmax == "online" else self.tile.blocks.fixed

    def _columns(self) -> list[Any]:
        step = self._schedule.columns or self.tile.blocks.block_q
        return [pl.ds(start, step) for start in range(0, self.tile.blocks.block_q, step)]


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Contract one axis of each; exact products, float32 (int8: int32, then float32) sums."""
    whole = jnp.issubdtype(a.dtype, jnp.integer)
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if whole else jnp.float32,
    ).astype(jnp.float32)


def _is_key(shape: tuple[int, ...], start: Index, real: int) -> jax.Array:
    """Whether the rows of an array of keys, the first of them key `start`, are real."""
    return start + lax.broadcasted_iota(jnp.int32, shape, 0) < real
