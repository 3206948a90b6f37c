"""The tile program of flash attention: what one grid step does with a block of queries and a block of keys.

Everything is kept transposed, S^T = K Q^T [keys, queries] and O^T = V^T P^T [D, queries], so that each query's softmax
statistics are row vectors (no lane reductions, no broadcasts along lanes) and P^T feeds the second matmul as it is.
O^T is transposed once, after the last key.

A grid step is unrolled into units of `chunk` keys x `columns` queries. The compiler schedules instructions mostly in
program order, so the logits of the unit `ahead` positions later are written before the softmax of the current one:
their matmul then runs while this unit's exponentials do.

Heads narrower than the 128 lanes of a tile share a tile. Q is stored once for each of them, with zeros in the other
heads' lanes, so that K Q^T belongs to that head alone; in V^T each head has its own rows. Nothing is moved, and a
matrix unit that is 256 deep takes no longer for this. (A NaN in K comes out of all heads of its tile: 0 * NaN is NaN.)

Letters: B batch, N heads, Lq Lk tokens, D head width, bq bkv rows of a block, S heads that share a tile's lanes.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from wan_tpu_kernels.blocks import BlockSizes
from wan_tpu_kernels.low_precision import MAGIC

Ref = Any  # A Pallas reference to VMEM, SMEM or HBM.
Index = int | jax.Array

# The optimistic kernel adds this to a row's first maximum, in powers of two, as room for later, larger logits. The
# row's sum is then at least 2^-32, so that what float32 and bfloat16 flush (below 2^-126) is below 2^-94 of it.
HEADROOM = 32.0

FIRST_KEYS = 256  # Keys whose largest logit sets the optimistic shift; they are multiplied twice, so there are few.
FLOAT8_ROOM = 8.0  # The largest weight in float8 is 2^8; the type ends at 448.
SUBLANES = 8  # Rows of one float32 vector register.


@dataclasses.dataclass(frozen=True)
class AttentionTile:
    """The static settings of a kernel.

    Attributes:
        blocks: Block sizes.
        softmax: "bounded", "optimistic" or "online".
        kv_len: Number of real keys; if `counted`, their largest number.
        multiplier: The factor of q.k that makes logits powers of two.
        width: D.
        shared: Heads in a tile's lanes.
        counted: Whether the number of real keys is known only when the kernel runs.
    """

    blocks: BlockSizes
    softmax: str
    kv_len: int
    multiplier: float
    width: int
    shared: int = 1
    counted: bool = False

    @property
    def kv_steps(self) -> int:
        """Number of key blocks that hold a real key."""
        return -(-self.kv_len // self.blocks.block_kv)

    @property
    def last_keys(self) -> int:
        """Real keys of the last key block."""
        return self.kv_len - (self.kv_steps - 1) * self.blocks.block_kv


def run_grid_step(*refs: Ref, tile: AttentionTile, terms: int, scaled: bool, rounded: bool = False) -> None:
    """Run one grid step (b, h, i, j)."""
    counts, refs = refs[: tile.counted], refs[tile.counted :]
    q_refs, (k_ref, v_ref), refs = refs[:terms], refs[terms : terms + 2], refs[terms + 2 :]
    rows_ref = refs[0] if scaled else None
    values_of = refs[scaled] if rounded else None
    outputs = 2 if tile.softmax == "optimistic" else 1
    refs = refs[scaled + rounded :]
    (o_ref, *check_ref), (acc_ref, shift_ref, *apart) = refs[:outputs], refs[outputs:]
    step, last = pl.program_id(3), tile.kv_steps - 1
    d = o_ref.shape[1] // tile.shared

    def head(index: int) -> _Head:
        factor = tile.multiplier if rows_ref is None else rows_ref.at[index : index + 1]
        queries = [apart[0].at[index, term] for term in range(terms)] if apart else q_refs
        return _Head(queries, acc_ref.at[index], shift_ref.at[index], factor, slice(index * d, (index + 1) * d))

    # The number of real keys from this block's first one on; a Python number if only the last block may be incomplete.
    real: Index = counts[0][0] - step * tile.blocks.block_kv if counts else tile.last_keys
    block = _Block([head(index) for index in range(tile.shared)], k_ref, v_ref, tile, real)

    @pl.when(step == 0)
    def _() -> None:
        if apart:
            block.separate(q_refs)
        block.start()

    if counts:

        def add_part() -> None:
            pl.when((real > 0) & (real < tile.blocks.block_kv))(block.add_real)

        def add_counted() -> None:
            pl.when(real >= tile.blocks.block_kv)(block.add_all)
            add_part()

        if tile.last_keys == tile.blocks.block_kv:
            add_counted()
        else:  # The last block is always incomplete.
            pl.when(step < last)(add_counted)
            pl.when(step == last)(add_part)
    elif tile.last_keys == tile.blocks.block_kv:
        block.add_all()
    elif tile.kv_steps == 1:
        block.add_real()
    else:
        pl.when(step < last)(block.add_all)
        pl.when(step == last)(block.add_real)

    @pl.when(step == last)
    def _() -> None:
        results = [head.result() for head in block.heads]
        out = jnp.concatenate(results, axis=0).T
        if values_of is not None:
            out = out * values_of[:1] + values_of[1:]
        o_ref[...] = out.astype(o_ref.dtype)
        for ref in check_ref:  # 0 * x is NaN exactly where x is not finite.
            ref[...] = sum(jnp.sum(head.acc_ref[...] * 0.0, axis=0, keepdims=True) for head in block.heads)


@dataclasses.dataclass(frozen=True)
class _Head:
    """One head of a block of queries.

    Attributes:
        q_refs: Terms of Q [bq, S * D], zero in the lanes of other heads.
        acc_ref: [D + 8, bq] float32: O^T, and below it the sum of the weights, as 8 rows yet to be added up.
        shift_ref: [8, bq] float32: the shift that is subtracted from the logits, the same row 8 times.
        factor: A number, or [1, bq]: `rows_of` of `flash_tiles.flash_tiles`.
        lanes: This head's lanes of a tile.
    """

    q_refs: Sequence[Ref]
    acc_ref: Ref
    shift_ref: Ref
    factor: Any
    lanes: slice

    @property
    def width(self) -> int:
        """D."""
        return self.lanes.stop - self.lanes.start

    def result(self) -> jax.Array:
        """Return O^T [D, bq], after the last key."""
        total = jnp.sum(self.acc_ref[self.width :, :], axis=0, keepdims=True)
        return self.acc_ref[: self.width, :] / total


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of queries, by heads, and a block of keys [bkv, S * D], the first `real` of which are real."""

    heads: Sequence[_Head]
    k_ref: Ref
    v_ref: Ref
    tile: AttentionTile
    real: Index

    def separate(self, q_refs: Sequence[Ref]) -> None:
        """Write each head's queries, with zeros in the lanes of the others."""
        for term, ref in enumerate(q_refs):
            q = ref[...]
            lane = lax.broadcasted_iota(jnp.int32, q.shape, 1)
            for head in self.heads:
                in_head = (lane >= head.lanes.start) & (lane < head.lanes.stop)
                head.q_refs[term][...] = jnp.where(in_head, q, jnp.zeros_like(q))

    def start(self) -> None:
        """Initialise the accumulators and shifts, before the first key."""
        for head in self.heads:
            head.acc_ref[...] = jnp.zeros_like(head.acc_ref)
            if self.tile.softmax == "online":
                head.shift_ref[...] = jnp.full_like(head.shift_ref, jnp.finfo(jnp.float32).min)
            elif self.tile.softmax == "optimistic":
                count = min(FIRST_KEYS, self._schedule.chunk)
                real = None if self.tile.kv_len >= count and not self.tile.counted else self.real
                for columns in self._columns():
                    largest = jnp.max(self._logits(head, 0, columns, real, count), axis=0, keepdims=True)
                    head.shift_ref[:, columns] = jnp.broadcast_to(largest + HEADROOM, (SUBLANES, largest.shape[1]))

    def add_all(self) -> None:
        """Add a block all of whose keys are real."""
        self._add(range(0, self.tile.blocks.block_kv, self._schedule.chunk))

    def add_real(self) -> None:
        """Add the last block, only some of whose keys are real."""
        chunk, real = self._schedule.chunk, self.real
        if isinstance(real, int) and real <= chunk:
            return self._add([0], real)

        # This loop isn't unrolled: the block is one of many, and unrolling it would double the code to compile.
        def body(i: jax.Array, _: None) -> None:
            self._add([pl.multiple_of(i * chunk, chunk)], real)

        return lax.fori_loop(0, pl.cdiv(real, chunk), body, None)

    def _add(self, starts: Iterable[Index], real: Index | None = None) -> None:
        """Add the chunks of keys that begin at `starts`; with `real`, keys from there on are ignored."""
        chunks = [(start, self._values(start, real)) for start in starts]
        units = [
            (head, start, values[index], columns)
            for start, values in chunks
            for index, head in enumerate(self.heads)
            for columns in self._columns()
        ]
        logits: list[jax.Array] = []
        for position, (head, _, values, columns) in enumerate(units):
            for later, start, _, its_columns in units[position + len(logits) : position + self._schedule.ahead + 1]:
                logits.append(self._logits(later, start, its_columns, real))
            self._add_unit(head, logits.pop(0), values, columns)

    def _add_unit(self, head: _Head, s: jax.Array, v: jax.Array, columns: Any) -> None:
        """Add S^T [chunk, columns] with V^T [D or D + 8, chunk] to a head's sum and output."""
        if self.tile.softmax == "online":
            before, own = head.shift_ref[:, columns], jnp.max(s, axis=0, keepdims=True)
            if v.dtype.itemsize == 1:
                own = _find_shift(own, head.factor[:, columns], v.dtype)
            shift = jnp.maximum(before, own)
            head.shift_ref[:, columns] = shift
            head.acc_ref[:, columns] *= jnp.exp2(before - shift)[:1]
            # Beside a larger maximum, more weights of int8 would be zero. Floats keep their precision.
            p = jnp.exp2(s - (own if v.dtype == jnp.int8 else shift[:1]))
        elif self.tile.softmax == "optimistic":
            p = jnp.exp2(s - head.shift_ref[:1, columns])
        else:
            p = jnp.exp2(s)
        gain = jnp.exp2(own - shift[:1]) if v.dtype == jnp.int8 else None
        if not self._sums_on_mxu:
            head.acc_ref[head.width :, columns] += _rescale(jnp.sum(p.reshape(-1, SUBLANES, p.shape[1]), axis=0), gain)
        head.acc_ref[: v.shape[0], columns] += _rescale(dot(v, _round_weights(p, v.dtype), contract=(1, 0)), gain)

    def _logits(
        self, head: _Head, start: Index, columns: Any, real: Index | None, count: int | None = None
    ) -> jax.Array:
        """Return S^T [count or chunk, columns] float32 in powers of two; -inf for keys from `real` on."""
        k, q = self.k_ref[pl.ds(start, count or self._schedule.chunk), :], [ref[columns, :] for ref in head.q_refs]
        # Two terms are one product over 2 D. The MXU is 256 deep since v6e, so at D = 128 the second is nearly free.
        s = dot(jnp.concatenate([k] * len(q), axis=1), jnp.concatenate(q, axis=1), contract=(1, 1))
        if s.dtype == jnp.int32:
            s = lax.bitcast_convert_type(s + head.factor[:, columns], jnp.float32)
        elif not isinstance(head.factor, float):
            s = s * head.factor[:, columns]
        elif not math.isclose(head.factor, 1.0, rel_tol=1e-6):
            s = s * head.factor
        return s if real is None else jnp.where(_is_key(s.shape, start, real), s, -jnp.inf)

    def _values(self, start: Index, real: Index | None) -> list[jax.Array]:
        """Return V^T [D, chunk] of each head; with sums on the MXU [D + 8, chunk], a row of ones and 7 of zeros below.

        The zeros fill the register.
        """
        v = self.v_ref[pl.ds(start, self._schedule.chunk), :]
        if real is not None:  # Values beyond the array's end may be NaN, and 0 * NaN is NaN.
            v = jnp.where(_is_key(v.shape, start, real), v, jnp.zeros_like(v))
        values = [v.T[head.lanes] for head in self.heads]
        if not self._sums_on_mxu:
            return values
        first = lax.broadcasted_iota(jnp.int32, (SUBLANES, v.shape[0]), 0) == 0
        return [jnp.concatenate([x, first.astype(jnp.float32).astype(x.dtype)], axis=0) for x in values]

    @property
    def _schedule(self) -> Any:
        return self.tile.blocks.online if self.tile.softmax == "online" else self.tile.blocks.fixed

    @property
    def _sums_on_mxu(self) -> bool:
        """Whether the second product adds up the weights; never rounded to int8, which makes small ones zero."""
        return self._schedule.mxu_sums and self.v_ref.dtype != jnp.int8

    def _columns(self) -> list[Any]:
        step = self._schedule.columns or self.tile.blocks.block_q
        return [pl.ds(start, step) for start in range(0, self.tile.blocks.block_q, step)]


def _find_shift(largest: jax.Array, factor: jax.Array, dtype: Any) -> jax.Array:
    """Return the shift [1, columns] by which the largest logits get the largest weight of an 8-bit type, or less.

    A larger weight would overflow. int8's logits are whole multiples of a row's scale, and shifts are rounded to that.
    """
    if dtype == jnp.int8:
        scale = lax.bitcast_convert_type(factor, jnp.float32) / MAGIC
        return largest - (math.log2(127) - scale / 2)
    shift = largest - FLOAT8_ROOM
    return jnp.where(largest - shift > FLOAT8_ROOM, largest, shift)


def _rescale(sums: jax.Array, gain: jax.Array | None) -> jax.Array:
    """Multiply sums over a chunk of keys by a factor [1, columns], if there is one."""
    return sums if gain is None else sums.astype(jnp.float32) * gain


def _round_weights(p: jax.Array, dtype: Any) -> jax.Array:
    """Round weights to the type of V; for int8 they are from 0 to 127."""
    if dtype != jnp.int8:
        return p.astype(dtype)
    # From 128 to 255, bfloat16 has whole numbers only, and its last byte is what exceeds 128.
    shifted = p.astype(jnp.bfloat16) + jnp.bfloat16(128)
    return lax.bitcast_convert_type(shifted, jnp.int16).astype(jnp.int8)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Contract one axis of each array, with exact products and float32 (for int8, int32) sums."""
    whole = jnp.issubdtype(a.dtype, jnp.integer)
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if whole else jnp.float32,
    )


def _is_key(shape: tuple[int, ...], start: Index, real: Index) -> jax.Array:
    """Return whether each row of an array of keys, whose first row is key `start`, is a real key."""
    return start + lax.broadcasted_iota(jnp.int32, shape, 0) < real
