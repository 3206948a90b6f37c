"""Block-sparse softmax attention for TPU: each block of 128 queries attends to a list of blocks of 64 keys.

The lists are data, given at run time; how long they are is compiled in. K and V of one head lie whole in VMEM, so that
a block of keys is an address and not a transfer: 39 MB for the 75,776 tokens of a video.

A matrix unit of 256 x 256 is too large for 128 queries of 128 channels. So two blocks of queries, A and B, are computed
at once, though they attend to different keys. In one matrix [2 D, 256] Q_A and Q_B stand diagonally, and 256 keys of A
lie beside 256 keys of B in [256, 2 D]: the product is S^T of both, side by side. Half of what is multiplied is zero, as
in dense attention, where heads of 128 channels fill half of the unit. A grid step computes two such pairs in turn, so
that the second begins while the first ends.

Softmax is shifted as in `flash_attention`: "optimistic" by 32 above the largest logit of the first 256 keys,
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

from wan_tpu_kernels.blocks import LANES, MIB
from wan_tpu_kernels.flash_attention import repeated_if
from wan_tpu_kernels.flash_kernel import HEADROOM, SUBLANES, dot

Ref = Any  # a Pallas reference to VMEM or SMEM

QUERIES, KEYS = 128, 64  # of a block
PAIR = 2 * QUERIES  # queries that are computed at once
PAIRS = 2  # of a grid step: by the compiler 3 to 5 % faster than one
STEP = PAIRS * PAIR
TOGETHER = 4  # blocks of keys that are computed at once, a chunk: 256 keys, as deep as the matrix unit
UNROLLED = 48  # chunks: longer lists are a loop of so many
AHEAD = 3  # chunks by which logits are computed before their weights


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    *,
    heads: int,
    width: int | None = None,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    scale: float | None = None,
    kv_len: int | None = None,
    softmax: Literal["auto", "online"] = "auto",
    interpret: Any = False,
) -> jax.Array:
    """Compute softmax(scale Q K^T) V over the listed keys of each block of queries.

    q [B, Lq, N * D]; k, v [B, Lk, N * D] -> [B, Lq, N * D], token-major; bfloat16 or float32 (computed in float32).
        Each may hold more heads of `width` D: of those the ones from its number in `first_heads` on are used, in place.
    blocks [B, N, ceil(Lq / 128), n], int32: which blocks of 64 keys the queries of a block attend to, in rising order,
        each once. Each must hold a real key. What isn't so is not noticed.
    scale, kv_len, interpret: as `flash_attention.flash_attention`'s; kv_len is a number.
    softmax: "online" is always right, "auto" is "optimistic", repeated where its check fails; both are exact.

    D is a multiple of 128, or divides it where N * D is one. Raises ValueError for shapes that don't fit.
    """
    (batch, rows, channels), real = q.shape, kv_len or k.shape[1]
    width = channels // heads if width is None else width
    first = first_tiles(first_heads, heads, width)
    _check(q, k, v, blocks, heads, width, kv_len)
    steps, count = -(-rows // STEP), blocks.shape[-1]
    tile = _Tile(
        width=width,
        shared=LANES // width if width < LANES else 1,
        kv_len=real,
        count=count,
        multiplier=(width**-0.5 if scale is None else scale) * math.log2(math.e),
    )
    spare = -(-count // TOGETHER) * TOGETHER - count  # entries that stand for no block
    lists = jnp.pad(blocks, ((0, 0), (0, 0), (0, steps * STEP // QUERIES - blocks.shape[2]), (0, spare)))
    lists = lists.reshape(batch * heads * steps, PAIRS, -1)
    short = -(-real // KEYS) * KEYS - k.shape[1]
    k, v = (jnp.pad(x, ((0, 0), (0, max(0, short)), (0, 0))) for x in (k, v))
    q = jnp.pad(q, ((0, 0), (0, max(0, STEP - rows)), (0, 0)))

    def online() -> jax.Array:
        return _tiles(q, k, v, lists, dataclasses.replace(tile, online=True), heads, first, interpret)[0]

    if softmax == "online" or tile.chunks == 1:  # of which the maximum is the rows' at once
        return online()[:, :rows]
    out, check = _tiles(q, k, v, lists, tile, heads, first, interpret)
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
    batch, rows, channels = q.shape
    width, real = channels // heads, kv_len or k.shape[1]
    _check(q, k, v, blocks, heads, width, kv_len)
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


def first_tiles(first_heads: Sequence[int], heads: int, width: int) -> tuple[int, int, int]:
    """Return the tiles of 128 lanes that arrays' first heads begin; raises ValueError where there is none."""
    shared = LANES // width if width < LANES else 1
    if width % LANES and (LANES % width or heads * width % LANES):
        raise ValueError(f"heads must be a multiple of {LANES} wide, or fill tiles of {LANES} lanes, got {width}")
    if any(first % shared for first in first_heads):
        raise ValueError(f"first heads must begin a tile of {shared} heads, got {[*first_heads]}")
    q, k, v = (first // shared for first in first_heads)
    return q, k, v


def _tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: jax.Array,
    tile: _Tile,
    heads: int,
    first: tuple[int, int, int],
    interpret: Any,
) -> list[jax.Array]:
    """Run the kernel; q [B, at least 512, N * D], lists [B * N * steps, 2, 2 n]: of each pair A's, then B's.

    first  tiles of q, k and v that come before those that are used

    Returns the output [B, Lq, N * D]; unless online also a check [B * N, 1, Lq] float32, NaN where a row isn't finite.
    """
    (batch, rows, _), kv_rows, lanes, shared = q.shape, k.shape[1], tile.lanes, tile.shared
    steps, tiles = -(-rows // STEP), heads // shared
    needed = 2 * kv_rows * lanes * k.dtype.itemsize  # K and V of a tile
    buffers = 2 if 2 * needed + 16 * MIB < _vmem_bytes() else 1
    if needed + 16 * MIB > _vmem_bytes():
        raise ValueError(
            f"K and V of {kv_rows} tokens are {needed / MIB:.0f} MiB, and this chip's VMEM is "
            f"{_vmem_bytes() / MIB:.0f} MiB: at most {(_vmem_bytes() - 16 * MIB) // (needed // kv_rows)} tokens"
        )
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
        in_specs=[lists_of, queries, keys, values],
        out_specs=[results, flags][:outputs],
        scratch_shapes=[
            pltpu.VMEM((PAIRS, PAIR, 2 * lanes), q.dtype),
            pltpu.VMEM((PAIRS, lanes, PAIR), jnp.float32),
            pltpu.VMEM((PAIRS, SUBLANES, PAIR), jnp.float32),
            pltpu.VMEM((PAIRS, SUBLANES, PAIR), jnp.float32),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, rows, heads * tile.width), v.dtype),
            jax.ShapeDtypeStruct((batch * heads, 1, rows), jnp.float32),
        ][:outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=buffers * needed + 16 * MIB,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * tile.width,
            transcendentals=scores,
            bytes_accessed=2 * batch * (rows + kv_rows) * heads * tile.width * q.dtype.itemsize + lists.size * 4,
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
    """One grid step (b, t, i, s): four blocks of queries of one head."""
    check_ref, (q2_ref, acc_ref, sum_ref, shift_ref) = refs[:-4], refs[-4:]
    pairs = [
        _Pair(list_ref.at[i], k_ref, v_ref, q2_ref.at[i], acc_ref.at[i], sum_ref.at[i], shift_ref.at[i], tile)
        for i in range(PAIRS)
    ]
    own = lax.div(lax.broadcasted_iota(jnp.int32, (PAIR, tile.lanes), 1), tile.width) == pl.program_id(3)
    rows = [slice(number * PAIR, (number + 1) * PAIR) for number in range(PAIRS)]
    for pair, here in zip(pairs, rows, strict=True):
        q = q_ref[here, :]
        pair.start(q if tile.shared == 1 else jnp.where(own, q, jnp.zeros_like(q)))

    groups = [range(start, min(start + UNROLLED, tile.chunks)) for start in range(0, tile.chunks, UNROLLED)]
    if len(groups) > 1:
        _add(pairs, groups[0], first=True)

        def body(group: jax.Array, _: None) -> None:
            _add(pairs, [group * UNROLLED + i for i in range(UNROLLED)])

        lax.fori_loop(1, len(groups) - 1, body, None)
    _add(pairs, groups[-1], first=len(groups) == 1, last=True)

    for pair, here in zip(pairs, rows, strict=True):
        out = pair.result().T.astype(o_ref.dtype)
        o_ref[here, :] = out if tile.shared == 1 else jnp.where(own, out, o_ref[here, :])
        for ref in check_ref:
            ref[:, here] = pair.check()


def _add(pairs: Sequence["_Pair"], chunks: Sequence[Any], first: bool = False, last: bool = False) -> None:
    """Add the same chunks of each pair's lists; first, last: whether the lists begin and end with them."""
    units = [(pair, position) for pair in pairs for position in range(len(chunks))]
    ends = [last and position == len(chunks) - 1 for _, position in units]
    logits: list[jax.Array] = []
    for number, (pair, position) in enumerate(units):
        for other in range(number + len(logits), min(number + AHEAD + 1, len(units))):
            logits.append(units[other][0].logits(chunks[units[other][1]], ends[other]))
        pair.add(logits.pop(0), chunks[position], first and position == 0, ends[number])


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Two blocks of queries and what is summed up for them; columns are those of A, then those of B.

    list_ref [2 n]: A's list, then B's; q2_ref [256, 2 S D], Q_A and Q_B diagonally; acc_ref [S D, 256] float32, O^T;
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

    def start(self, q: jax.Array) -> None:
        """Before the first key; q [256, S D], zero in the lanes of other heads."""
        zeros = jnp.zeros((QUERIES, self.tile.lanes), q.dtype)
        self.q2_ref[:QUERIES, :] = jnp.concatenate([q[:QUERIES], zeros], axis=1)
        self.q2_ref[QUERIES:, :] = jnp.concatenate([zeros, q[QUERIES:]], axis=1)
        self.acc_ref[...] = jnp.zeros_like(self.acc_ref)
        self.sum_ref[...] = jnp.zeros_like(self.sum_ref)

    def result(self) -> jax.Array:
        """O^T [S D, 256], after the last key."""
        return self.acc_ref[...] / jnp.sum(self.sum_ref[...], axis=0, keepdims=True)

    def check(self) -> jax.Array:
        """Return [1, 256], NaN where a row isn't finite: 0 * x is NaN exactly there."""
        return jnp.sum(self.acc_ref[...] * 0.0, axis=0, keepdims=True) + jnp.sum(
            self.sum_ref[...] * 0.0, axis=0, keepdims=True
        )

    def add(self, s: jax.Array, chunk: Any, first: bool, last: bool) -> None:
        """Add a chunk, which has the logits S^T [256, 256]."""
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

    def logits(self, chunk: Any, last: bool) -> jax.Array:
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
        return pl.multiple_of(self.list_ref[(of * self.tile.chunks + chunk) * TOGETHER + i] * KEYS, KEYS)

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


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array, heads: int, width: int, kv_len: int | None
) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}, {heads} heads"
    lengths = {x.ndim == 3 and x.shape[:2] for x in (k, v)} | {q.ndim == 3 and (q.shape[0], k.shape[1])}
    if len(lengths) > 1 or any(x.shape[2] % width or x.shape[2] < heads * width for x in (q, k, v)):
        raise ValueError(f"q, k, v must be [B, L, N * D], k and v of one length, got {shapes}")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"q, k, v must all be bfloat16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}")
    if kv_len is not None and not 1 <= kv_len <= k.shape[1]:
        raise ValueError(f"kv_len must be from 1 to {k.shape[1]}, the keys given, got {kv_len}")
    lists, most = (q.shape[0], heads, -(-q.shape[1] // QUERIES)), -(-(kv_len or k.shape[1]) // KEYS)
    if blocks.shape[:-1] != lists or not 1 <= blocks.shape[-1] <= most or blocks.dtype != jnp.int32:
        raise ValueError(f"blocks must be int32 {[*lists, f'1 to {most}']}, got {blocks.dtype} {[*blocks.shape]}")
