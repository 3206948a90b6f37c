"""Exact softmax attention for TPU, without a causal mask: one function, three methods to keep exp2 in range.

Let s_ij = scale log2(e) q_i.k_j, so that the output is sum_j 2^(s_ij - c_i) v_j / sum_j 2^(s_ij - c_i) for any shift
c_i. The usual shift is the row's maximum, which is known only after the last key: hence the running maximum, the
rescaling and a third more instructions. But float32 (and bfloat16, which holds the weights) spans 2^-126 to 2^127, so
the shift only has to be near the maximum.

"bounded": no shift. By Cauchy-Schwarz |s_ij| <= B = scale log2(e) max|q_i| max|k_j|. If B <= 64, every weight lies in
    [2^-64, 2^64]: none is flushed, and the sum is at most Lk 2^64 < 2^95 for any length below 2^31. The output's
    accumulator is at most max|v| times the sum, finite if max|v| <= 2^31. All three maxima are computed from the input
    at run time, in one pass over each; where the proof fails, another method is used.
"optimistic": c_i = 32 + the maximum over the first 256 keys. That is a logit of the row, so its term is 2^-32 and the
    sum is at least 2^-32: a term flushed to zero (below 2^-126) is less than 2^-94 of the sum, and with Lk < 2^31 keys
    the flushed terms together are less than 2^-63 of it. Only overflow can go wrong: some s_ij exceeds c_i + 95 or
    so. It cannot hide: all terms are positive, so an infinite one makes the row's sum infinite, and an accumulator
    that is infinite or NaN beside a finite sum (with values beyond 2^100) is checked as well. The kernel returns one
    number per row, which is NaN if any of these is not finite. If there is one, the call is repeated with "online".
"online": the classical running maximum. Exact for every finite input.

A NaN in the input fails the bound and makes the check NaN: "online" then runs once, and the NaN comes out.

The repeat is the body of a loop that runs zero times or once and whose result replaces the first one, because XLA
would copy the result of a conditional in either case.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from wan_tpu_kernels.blocks import LANES, BlockSizes, plan_blocks
from wan_tpu_kernels.flash_kernel import AttentionTile
from wan_tpu_kernels.flash_operands import (
    LowPrecision,
    Softmax,
    batch_to_heads,
    check_operands,
    count_keys,
    heads_to_batch,
    pad_rows,
)
from wan_tpu_kernels.flash_tiles import flash_tiles
from wan_tpu_kernels.low_precision import MAGIC, round_keys, round_queries

T = TypeVar("T")

BOUND = 64.0  # The largest B of "bounded", in powers of two; see the module's docstring.
LARGEST_VALUE = 2.0**31  # The largest max|v| of "bounded".
# Squares are summed from bfloat16, each off by up to 2^-9; float32 roundings are negligible beside that.
ROUNDING_SLACK = 1.02


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    heads: int | None = None,
    scale: float | None = None,
    kv_len: int | jax.Array | None = None,
    softmax: Softmax = "auto",
    qk: LowPrecision | None = None,
    pv: LowPrecision | None = None,
    block_sizes: BlockSizes | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Compute softmax(scale Q K^T) V.

    Under `jax.vmap` the run-time choices become selects, and every way is computed: pass a batch axis instead.
    Each shape and each static argument is compiled separately.

    Args:
        q: Without `heads`, [N, Lq, D], N any batch of heads. With `heads` N, token-major, [Lq, N * D], optionally with
            a leading batch axis; on TPU nothing is transposed if D is a multiple of 128, or divides 128 and N * D is a
            multiple of 128. bfloat16 or float32: sums are always float32, and float32 input is computed in float32
            throughout.
        k, v: [N, Lk, D], or with `heads` [Lk, N * D], with the batch axis of q.
        heads: N of token-major arrays.
        scale: Factor of the logits, D ** -0.5 by default. With scale = log(2) the kernel need not multiply: fold the
            rest into q while q is still float32 (`wan_tpu.ops.attention.query_scale`).
        kv_len: Number of real keys, all by default; the rest of K and V is never read. A Python number is compiled in;
            an int32 scalar, from 1 to Lk, is known only when the program runs, and can't be combined with `qk`.
        softmax: "bounded" uses that method where its proof holds at run time, else "online". "optimistic" is repeated
            with "online" where it overflowed. "auto" is the fastest: "optimistic", because the proof's passes over Q, K
            and V cost what "bounded" saves. All are exact.
        qk: Computes Q K^T from int8 or float8: Q with a scale per row, K with one per head, after the mean of K is
            subtracted, which doesn't affect softmax. This is an approximation; it is off by default, and can't be
            combined with "bounded".
        pv: Computes the product with V from the same type as well: V with a scale for each channel, after its mean is
            subtracted, and weights relative to the largest one so far, for int8 to that of their chunk. softmax is then
            "auto" or "online".
        block_sizes: Those of `plan_blocks` by default.
        interpret: As for `pallas_call`.

    Returns:
        An array of the shape of q.

    Raises:
        ValueError: Shapes or names don't fit.
    """
    check_operands(q, k, v, heads, kv_len, softmax, qk, pv)
    count, shape = heads or 1, q.shape
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    width = shape[-1] // count
    shared = LANES // width if LANES % width == 0 and shape[-1] % LANES == 0 else 1
    split = count > 1 and width * shared % LANES != 0  # A tile's columns must fill whole lanes.
    if split:
        q, k, v = (heads_to_batch(x, count) for x in (q, k, v))
    scale = width**-0.5 if scale is None else scale
    keys = count_keys(kv_len, k.shape[1])
    call = _Call(1 if split else count, width, shared, scale, *keys, qk, pv, block_sizes, interpret)
    out = call.run(q, k, v, softmax)
    return (batch_to_heads(out, count) if split else out).reshape(shape)


def flash_attention_unchecked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    heads: int,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    width: int,
    scale: float,
    kv_len: int | jax.Array,
    softmax: Literal["optimistic", "online"] = "optimistic",
    qk: LowPrecision | None = None,
    pv: LowPrecision | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute softmax(scale Q K^T) V with one method only, and check the result.

    Args:
        q: [Lq, at least N * D].
        k, v: [Lk, at least N * D].
        heads: N.
        first_heads: The first head to use of q, k and v, which may hold more; they are read in place where heads fill
            registers.
        width: D.
        scale, kv_len, qk, pv, interpret: As for `flash_attention`.
        softmax: The method; "online" is always right, and with `pv` the only one.

    Returns:
        The output [Lq, N * D], and a boolean scalar: False if it is wrong and must be repeated with "online".
    """
    shared = LANES // width if LANES % width == 0 and (heads * width) % LANES == 0 else 1
    if (width * shared) % LANES or any(first % shared for first in first_heads):
        q, k, v = (
            x[:, first * width : (first + heads) * width] for x, first in zip((q, k, v), first_heads, strict=True)
        )
        out = flash_attention(q, k, v, heads=heads, scale=scale, kv_len=kv_len, qk=qk, pv=pv, interpret=interpret)
        return out, jnp.asarray(True)
    call = _Call(heads, width, shared, scale, *count_keys(kv_len, len(k)), qk, pv, None, interpret)
    first_q, first_k, first_v = (first // shared for first in first_heads)
    out, check = call.run_once(q[None], k[None], v[None], softmax, (first_q, first_k, first_v))
    return out[0], jnp.asarray(True) if check is None else jnp.all(jnp.isfinite(check))


def flash_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    heads: int | None = None,
    scale: float | None = None,
    kv_len: int | None = None,
) -> jax.Array:
    """Compute the same as `flash_attention` in plain jnp, float32, with the whole score matrix in memory."""
    check_operands(q, k, v, heads, kv_len, "auto", None)
    count, shape = heads or 1, q.shape
    q3, k3, v3 = (heads_to_batch((x[None] if x.ndim == 2 else x).astype(jnp.float32), count) for x in (q, k, v))
    k3, v3 = k3[:, :kv_len], v3[:, :kv_len]
    scale = (shape[-1] // count) ** -0.5 if scale is None else scale
    logits = jnp.einsum("nqd,nkd->nqk", q3, k3, precision="highest") * scale
    out = jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(logits), v3, precision="highest")
    return batch_to_heads(out, count).reshape(shape).astype(v.dtype)


class _Operands(NamedTuple):
    """What `flash_tiles` multiplies: terms of Q, K, V, `rows_of` and `values_of`, and the output's dtype."""

    terms: list[jax.Array]
    k: jax.Array
    v: jax.Array
    rows_of: jax.Array | None
    values_of: jax.Array | None
    dtype: Any


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static arguments of one call; arrays are q [B, Lq, N * D], k and v [B, Lk, N * D].

    Attributes:
        heads: N.
        width: D.
        shared: Heads in the lanes of one tile.
        scale: Factor of the logits.
        kv_len: Number of real keys; if `count` is an array, their largest number.
        count: Number of real keys [1] where only the program knows it, else None.
        qk, pv, block_sizes, interpret: As for `flash_attention`.
    """

    heads: int
    width: int
    shared: int
    scale: float
    kv_len: int
    count: jax.Array | None
    qk: LowPrecision | None
    pv: LowPrecision | None
    block_sizes: BlockSizes | None
    interpret: Any

    @property
    def lanes(self) -> int:
        """Columns of a tile."""
        return self.width * self.shared

    @property
    def multiplier(self) -> float:
        """The factor of q.k that makes logits powers of two."""
        return self.scale * math.log2(math.e)

    def run_once(
        self, q: jax.Array, k: jax.Array, v: jax.Array, softmax: str, first: tuple[int, int, int]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the result of one method, and its check if it has one; `first` are the first tiles of Q, K and V."""
        plan = functools.partial(plan_blocks, q.shape[1], self.kv_len, dtype=self.qk or q.dtype, shared=self.shared)
        blocks, rows = plan().blocks, q.shape[1]
        if self.pv is not None or self.kv_len <= blocks.online.chunk:
            softmax = "online"
        elif softmax == "online":
            blocks = plan(fallback=True).blocks
        operands, first = self._round_operands(q, k, v, first)
        out, *check = self._run_tiles(operands, blocks, softmax, first)
        return out[:, :rows], check[0] if check else None

    def run(self, q: jax.Array, k: jax.Array, v: jax.Array, softmax: Softmax) -> jax.Array:
        """Return a correct result, repeating with "online" if another method fails."""
        # Sequences in a batch are short, so copying Q, K and V to pad them would take a large part of the time.
        kind, pad = self.qk or q.dtype, q.shape[0] == 1
        plan = functools.partial(plan_blocks, q.shape[1], self.kv_len, dtype=kind, shared=self.shared, pad=pad)
        blocks = self.block_sizes or plan().blocks
        fallback_blocks = self.block_sizes or plan(fallback=True).blocks
        bounded = self._bound_holds(q, k, v) if softmax == "bounded" else None
        rows = q.shape[1]
        operands, _ = self._round_operands(q, k, v, (0, 0, 0))

        def run_way(name: str, blocks: BlockSizes = blocks) -> list[jax.Array]:
            return self._run_tiles(operands, blocks, name)

        def run_online() -> jax.Array:
            return run_way("online", fallback_blocks)[0]

        # With one chunk in all, "online" sees the row's maximum at once, so it is the cheapest as well.
        if softmax == "online" or self.pv is not None or self.kv_len <= blocks.online.chunk:
            out = run_way("online")[0]
        elif bounded is None:
            out, check = run_way("optimistic")
            out = repeat_if(~jnp.all(jnp.isfinite(check)), out, run_online)
        else:
            out = lax.cond(bounded, lambda: run_way("bounded")[0], run_online)
        return out[:, :rows]

    def _run_tiles(
        self, operands: "_Operands", blocks: BlockSizes, softmax: str, first: tuple[int, int, int] = (0, 0, 0)
    ) -> list[jax.Array]:
        is_counted = self.count is not None
        tile = AttentionTile(blocks, softmax, self.kv_len, self.multiplier, self.width, self.shared, is_counted)
        k, v = (pad_rows(x, blocks.block_kv) for x in (operands.k, operands.v))
        terms = [pad_rows(term, blocks.block_q) for term in operands.terms]
        rows_of = operands.rows_of
        if rows_of is not None:
            rows_of = jnp.pad(rows_of, ((0, 0), (0, 0), (0, max(0, blocks.block_q - rows_of.shape[2]))))
        more = {"values_of": operands.values_of, "dtype": operands.dtype}
        return flash_tiles(terms, k, v, rows_of, tile, self.heads, self.interpret, first, self.count, **more)

    def _bound_holds(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Return a boolean scalar: whether all exponents and sums of every head stay in range without a shift."""
        k, v = self._mask_keys(k), self._mask_keys(v)
        largest = abs(self.multiplier) * ROUNDING_SLACK * _largest_norm(q, self.heads) * _largest_norm(k, self.heads)
        return jnp.all(largest <= BOUND) & (jnp.max(jnp.abs(v)) <= LARGEST_VALUE)

    def _mask_keys(self, x: jax.Array) -> jax.Array:
        """Cut off the keys or values [B, Lk, N * D] that aren't real, or replace them by zeros."""
        x = x[:, : self.kv_len]
        return x if self.count is None else jnp.where((jnp.arange(self.kv_len) < self.count)[:, None], x, 0)

    def _round_operands(
        self, q: jax.Array, k: jax.Array, v: jax.Array, first: tuple[int, int, int]
    ) -> tuple["_Operands", tuple[int, int, int]]:
        """Return what is multiplied, and the first tiles of Q, K and V in it."""
        kind, tiles = v.dtype, self.heads // self.shared
        if self.qk is None:
            return _Operands([q], k, v, None, None, kind), first
        dtype, real = jnp.dtype(self.qk), self.kv_len if self.count is None else self.count
        options: dict[str, Any] = {"width": self.width, "shared": self.shared, "interpret": self.interpret}
        k, unit, _ = round_keys(k, real, dtype, tiles=tiles, first=first[1], **options)
        terms, scales = round_queries(q, self.multiplier * unit, dtype, first=first[0], **options)
        if dtype == jnp.int8:
            scales = lax.bitcast_convert_type(MAGIC * scales, jnp.int32)
        if self.pv is None:
            return _Operands(terms, k, v, scales, None, kind), (0, 0, first[2])
        # Each channel has its own scale, as if it were a head.
        options |= {"width": 1, "shared": self.lanes}
        v, *values_of = round_keys(v, real, dtype, tiles=tiles, first=first[2], **options)
        return _Operands(terms, k, v, scales, jnp.stack(values_of, axis=1), kind), (0, 0, 0)


def repeat_if(wrong: jax.Array, result: T, repeat: Callable[[], T]) -> T:
    """Return `result`, or the result of `repeat` if the boolean scalar `wrong` is true."""
    return lax.while_loop(lambda state: state[0], lambda _: (jnp.asarray(False), repeat()), (wrong, result))[1]


def _largest_norm(x: jax.Array, heads: int) -> jax.Array:
    """Return the largest norm of each head's vectors in x [B, L, N * D], as [B, N] float32, to within 1 %.

    The squares are summed by a matmul with ones, because XLA would transpose the whole array to split the last axis.
    """
    square = jnp.square(x.astype(jnp.float32)).astype(jnp.bfloat16)
    ones = jnp.repeat(jnp.eye(heads, dtype=jnp.bfloat16), x.shape[2] // heads, axis=0)  # [N * D, N]
    sums = jnp.einsum("blc,cn->bln", square, ones, preferred_element_type=jnp.float32)
    return jnp.sqrt(jnp.max(sums, axis=1))
