"""Block-sparse softmax attention for TPU: each block of 128 queries attends to a list of blocks of 64 keys.

The lists are data, given at run time; how long they are is compiled in. K and V of one head lie whole in VMEM, so that
a block of keys is an address and not a transfer: 39 MB for the 75,776 tokens of a video.

A matrix unit of 256 x 256 is too large for 128 queries of 128 channels. So two blocks of queries, A and B, are computed
at once, though they attend to different keys. In one matrix [2 D, 256] Q_A and Q_B stand diagonally, and 256 keys of A
lie beside 256 keys of B in [256, 2 D]: the product is S^T of both, side by side. Half of what is multiplied is zero, as
in dense attention, where heads of 128 channels fill half of the unit.

Softmax is shifted as in `kernels.flash_attention`: "optimistic" by 32 above the largest logit of the first 256 keys,
checked, and repeated with "online", the running maximum, where that overflows. (A NaN in K comes out of both blocks of
queries, and of all heads of its tile: 0 * NaN is NaN.)

Letters: B batch, N heads, Lq Lk tokens, D head width, S heads that share 128 lanes.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.blocks import LANES, MIB
from kernels.flash_attention import repeated_if
from kernels.flash_kernel import HEADROOM, SUBLANES, dot

Ref = Any  # a Pallas reference to VMEM or SMEM

QUERIES, KEYS = 128, 64  # of a block
PAIR = 2 * QUERIES  # queries that are computed at once
TOGETHER = 4  # blocks of keys that are: 256 keys, as deep as the matrix unit
UNROLLED = 48  # times TOGETHER blocks of keys: longer lists are a loop of so many
AHEAD = 3  # by how many times TOGETHER blocks logits are computed before their weights


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    *,
    heads: int,
    scale: float | None = None,
    kv_len: int | None = None,
    softmax: Literal["auto", "online"] = "auto",
    interpret: Any = False,
) -> jax.Array:
    """Compute softmax(scale Q K^T) V over the listed keys of each block of queries.

    q [B, Lq, N * D]; k, v [B, Lk, N * D] -> [B, Lq, N * D], token-major; bfloat16 or float32 (computed in float32).
    blocks [B, N, ceil(Lq / 128), n], int32: which blocks of 64 keys the queries of a block attend to, in rising order,
        each once. Each must hold a real key. What isn't so is not noticed.
    scale, kv_len, interpret: as `kernels.flash_attention.flash_attention`'s; kv_len is a number.
    softmax: "online" is always right, "auto" is "optimistic", repeated where its check fails; both are exact.

    D is a multiple of 128, or divides it where N * D is one. Raises ValueError for shapes that don't fit.
    """
    _check(q, k, v, blocks, heads, kv_len)
    (batch, rows, channels), real = q.shape, kv_len or k.shape[1]
    width, pairs, count = channels // heads, -(-rows // PAIR), blocks.shape[-1]
    tile = _Tile(
        width=width,
        shared=LANES // width if width < LANES else 1,
        kv_len=real,
        count=count,
        multiplier=(width**-0.5 if scale is None else scale) * math.log2(math.e),
    )
    spare = -(-count // TOGETHER) * TOGETHER - count  # entries that stand for no block
    lists = jnp.pad(blocks, ((0, 0), (0, 0), (0, 2 * pairs - blocks.shape[2]), (0, spare)))
    lists = lists.reshape(batch * heads * pairs, 1, -1)
    short = -(-real // KEYS) * KEYS - k.shape[1]
    k, v = (jnp.pad(x, ((0, 0), (0, max(0, short)), (0, 0))) for x in (k, v))
    q = jnp.pad(q, ((0, 0), (0, max(0, PAIR - rows)), (0, 0)))

    def online() -> jax.Array:
        return _tiles(q, k, v, lists, dataclasses.replace(tile, online=True), heads, interpret)[0]

    if softmax == "online" or tile.chunks == 1:  # of which the maximum is the rows' at once
        return online()[:, :rows]
    out, check = _tiles(q, k, v, lists, tile, heads, interpret)
    return repeated_if(~jnp.all(jnp.isfinite(check)), out, online)[:, :rows]


def sparse_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    *,
    heads: int,
    scale: float | None = None,
    kv_len: int | None = None,
) -> jax.Array:
    """Compute the same in plain jnp, float32, as dense attention with a mask; arguments as `sparse_attention`'s."""
    _check(q, k, v, blocks, heads, kv_len)
    batch, rows, channels = q.shape
    width, real = channels // heads, kv_len or k.shape[1]
    q4, k4, v4 = (x.astype(jnp.float32).reshape(batch, -1, heads, width) for x in (q, k[:, :real], v[:, :real]))
    chosen = jnp.any(blocks[..., None] == jnp.arange(-(-real // KEYS)), axis=-2)  # [B, N, query blocks, key blocks]
    mask = jnp.repeat(jnp.repeat(chosen, QUERIES, axis=2), KEYS, axis=3)[:, :, :rows, :real]
    logits = jnp.einsum("bqnd,bknd->bnqk", q4, k4, precision="highest") * (width**-0.5 if scale is None else scale)
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
    return jnp.einsum("bnqk,bknd->bqnd", weights, v4, precision="highest").reshape(q.shape).astype(v.dtype)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The static side of the kernel; count: blocks of keys in a list."""

    width: int  # D
    shared: int  # S
    kv_len: int
    count: int
    multiplier: float  # of q.k, to powers of two
    online: bool = False

    @property
    def lanes(self) -> int:
        return self.width * self.shared

    @property
    def chunks(self) -> int:
        """Times TOGETHER blocks."""
        return -(-self.count // TOGETHER)


def _tiles(
    q: jax.Array, k: jax.Array, v: jax.Array, lists: jax.Array, tile: _Tile, heads: int, interpret: Any
) -> list[jax.Array]:
    """Run the kernel; q [B, at least 256, N * D], lists [B * N * pairs of query blocks, 1, 2 n].

    Returns the output [B, Lq, N * D]; unless online also a check [B * N, 1, Lq] float32, NaN where a row isn't finite.
    """
    (batch, rows, channels), kv_rows, lanes, shared = q.shape, k.shape[1], tile.lanes, tile.shared
    pairs, tiles = -(-rows // PAIR), heads // shared
    needed = 2 * kv_rows * lanes * k.dtype.itemsize  # K and V of a tile
    buffers = 2 if 2 * needed + 16 * MIB < _vmem_bytes() else 1
    whole = functools.partial(pl.BlockSpec, pipeline_mode=pl.Buffered(buffers))
    queries = pl.BlockSpec((None, PAIR, lanes), lambda b, t, i, s: (b, i, t))
    keys = whole((None, kv_rows, lanes), lambda b, t, i, s: (b, 0, t))
    lists_of = pl.BlockSpec(
        (None, 1, lists.shape[2]),
        lambda b, t, i, s: (((b * tiles + t) * shared + s) * pairs + i, 0, 0),
        memory_space=pltpu.SMEM,
    )
    flags = pl.BlockSpec((None, 1, PAIR), lambda b, t, i, s: ((b * tiles + t) * shared + s, 0, i))
    outputs = 1 if tile.online else 2
    scores = batch * heads * pairs * PAIR * tile.count * KEYS
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(batch, tiles, pairs, shared),
        in_specs=[lists_of, queries, keys, keys],
        out_specs=[queries, flags][:outputs],
        scratch_shapes=[
            pltpu.VMEM((PAIR, 2 * lanes), q.dtype),
            pltpu.VMEM((lanes, PAIR), jnp.float32),
            pltpu.VMEM((SUBLANES, PAIR), jnp.float32),
            pltpu.VMEM((SUBLANES, PAIR), jnp.float32),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, rows, channels), v.dtype),
            jax.ShapeDtypeStruct((batch * heads, 1, rows), jnp.float32),
        ][:outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=buffers * needed + 16 * MIB,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * tile.width,
            transcendentals=scores,
            bytes_accessed=2 * (q.size + k.size) * q.dtype.itemsize + lists.size * 4,
        ),
        interpret=interpret,
        name="sparse_attention" + ("_online" if tile.online else ""),
    )(lists, q, k, v)


def _vmem_bytes() -> int:
    """VMEM of a core of this chip; where there is none, of a small one."""
    try:
        return int(pltpu.get_tpu_info().vmem_capacity_bytes)
    except ValueError:
        return 64 * MIB


def _kernel(list_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref, o_ref: Ref, *refs: Ref, tile: _Tile) -> None:
    """One grid step (b, t, i, s): a pair of blocks of queries of one head."""
    check_ref, (q2_ref, acc_ref, sum_ref, shift_ref) = refs[:-4], refs[-4:]
    q = q_ref[...]
    if tile.shared > 1:  # only this head's lanes
        lane = lax.broadcasted_iota(jnp.int32, q.shape, 1)
        own = lax.div(lane, tile.width) == pl.program_id(3)
        q = jnp.where(own, q, jnp.zeros_like(q))
    zeros = jnp.zeros((QUERIES, tile.lanes), q.dtype)
    q2_ref[:QUERIES, :] = jnp.concatenate([q[:QUERIES], zeros], axis=1)
    q2_ref[QUERIES:, :] = jnp.concatenate([zeros, q[QUERIES:]], axis=1)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    pair = _Pair(list_ref, k_ref, v_ref, q2_ref, acc_ref, sum_ref, shift_ref, tile)

    rounds, left = divmod(tile.chunks - 1, UNROLLED)  # the last one is among those left
    if rounds:
        pair.add(range(UNROLLED), first=True)

        def body(number: jax.Array, _: None) -> None:
            pair.add([number * UNROLLED + i for i in range(UNROLLED)])

        lax.fori_loop(1, rounds, body, None)
    pair.add(range(rounds * UNROLLED, rounds * UNROLLED + left + 1), first=not rounds, last=True)

    out = (acc_ref[...] / jnp.sum(sum_ref[...], axis=0, keepdims=True)).T.astype(o_ref.dtype)
    o_ref[...] = out if tile.shared == 1 else jnp.where(own, out, o_ref[...])
    for ref in check_ref:  # 0 * x is NaN exactly where x is not finite
        finite = jnp.sum(acc_ref[...] * 0.0, axis=0, keepdims=True)
        ref[...] = finite + jnp.sum(sum_ref[...] * 0.0, axis=0, keepdims=True)


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Two blocks of queries and what is summed up for them; columns are those of A, then those of B.

    list_ref [1, 2 n]: A's list, then B's; q2_ref [256, 2 S D], Q_A and Q_B diagonally; acc_ref [S D, 256] float32, O^T;
    sum_ref [8, 256] the weights' sums, as 8 rows yet to be added up; shift_ref [8, 256] 8 times the same row.
    """

    list_ref: Ref
    k_ref: Ref
    v_ref: Ref
    q2_ref: Ref
    acc_ref: Ref
    sum_ref: Ref
    shift_ref: Ref
    tile: _Tile

    def add(self, chunks: Sequence[Any], first: bool = False, last: bool = False) -> None:
        """Add TOGETHER blocks of keys of both at a time; first, last: whether the lists begin and end here."""
        logits: list[jax.Array] = []
        for position, chunk in enumerate(chunks):
            for other in range(position + len(logits), min(position + AHEAD + 1, len(chunks))):
                logits.append(self._logits(chunks[other], last and other == len(chunks) - 1))
            ends = last and position == len(chunks) - 1
            self._add(logits.pop(0), chunk, first and position == 0, ends)

    def _add(self, s: jax.Array, chunk: Any, first: bool, last: bool) -> None:
        """Add what has the logits S^T [256, 256]."""
        if first or self.tile.online:
            largest = jnp.max(s, axis=0, keepdims=True)
            before = None if first else self.shift_ref[:1, :]
            shift = largest + (0.0 if self.tile.online else HEADROOM)
            if before is not None:
                shift = jnp.maximum(before, shift)
                smaller = jnp.exp2(before - shift)
                self.acc_ref[...] *= smaller
                self.sum_ref[...] *= smaller
            self.shift_ref[...] = jnp.broadcast_to(shift, self.shift_ref.shape)
        p = jnp.exp2(s - self.shift_ref[:1, :])
        self.sum_ref[...] += jnp.sum(p.reshape(-1, SUBLANES, PAIR), axis=0)
        for of in range(2):
            columns = slice(of * QUERIES, (of + 1) * QUERIES)
            v = self._rows(self.v_ref, chunk, of, last)
            self.acc_ref[:, columns] += dot(v.T, p[:, columns].astype(v.dtype), contract=(1, 0))

    def _logits(self, chunk: Any, last: bool) -> jax.Array:
        """S^T [256, 256] float32 in powers of two, -inf for what is no key."""
        keys = jnp.concatenate([self._rows(self.k_ref, chunk, of, last) for of in range(2)], axis=1)
        s = dot(keys, self.q2_ref[...], contract=(1, 1))
        if not math.isclose(self.tile.multiplier, 1.0, rel_tol=1e-6):
            s = s * self.tile.multiplier
        if not last:
            return s
        real = jnp.concatenate([self._real(chunk, of, (TOGETHER * KEYS, QUERIES)) for of in range(2)], axis=1)
        return jnp.where(real, s, -jnp.inf)

    def _rows(self, ref: Ref, chunk: Any, of: int, last: bool) -> jax.Array:
        """Return the rows [256, S D] of K or V that A (0) or B (1) attends to, zero for what is no key."""
        rows = jnp.concatenate([ref[pl.ds(self._start(chunk, of, i), KEYS), :] for i in range(TOGETHER)], axis=0)
        # What lies behind the last key may be NaN, and 0 * NaN is NaN.
        return jnp.where(self._real(chunk, of, rows.shape), rows, jnp.zeros_like(rows)) if last else rows

    def _start(self, chunk: Any, of: int, i: int) -> Any:
        return pl.multiple_of(self.list_ref[0, (of * self.tile.chunks + chunk) * TOGETHER + i] * KEYS, KEYS)

    def _real(self, chunk: int, of: int, shape: tuple[int, ...]) -> jax.Array:
        """Whether each of 256 rows is a real key, of a block that is listed."""
        return jnp.concatenate(
            [
                lax.broadcasted_iota(jnp.int32, (KEYS, shape[1]), 0)
                < (self.tile.kv_len - self._start(chunk, of, i) if chunk * TOGETHER + i < self.tile.count else 0)
                for i in range(TOGETHER)
            ],
            axis=0,
        )


def _check(q: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array, heads: int, kv_len: int | None) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}, {heads} heads"
    if q.ndim != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2] or q.shape[2] % heads:
        raise ValueError(f"q, k, v must be [B, L, N * D], k and v of one shape, got {shapes}")
    width = q.shape[2] // heads
    if width % LANES and (LANES % width or q.shape[2] % LANES):
        raise ValueError(f"heads must be a multiple of {LANES} wide, or fill tiles of {LANES} lanes, got {shapes}")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"q, k, v must all be bfloat16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}")
    if kv_len is not None and not 1 <= kv_len <= k.shape[1]:
        raise ValueError(f"kv_len must be from 1 to {k.shape[1]}, the keys given, got {kv_len}")
    lists, most = (q.shape[0], heads, -(-q.shape[1] // QUERIES)), -(-(kv_len or k.shape[1]) // KEYS)
    if blocks.shape[:-1] != lists or not 1 <= blocks.shape[-1] <= most or blocks.dtype != jnp.int32:
        raise ValueError(f"blocks must be int32 {[*lists, f'1 to {most}']}, got {blocks.dtype} {[*blocks.shape]}")
