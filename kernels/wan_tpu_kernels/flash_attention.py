"""Exact softmax attention for TPU, without a causal mask: one function, three ways to keep exp2 in range.

Let s_ij = scale log2(e) q_i.k_j, so that the output is sum_j 2^(s_ij - c_i) v_j / sum_j 2^(s_ij - c_i) for any shift
c_i. The usual shift is the row's maximum, which is known only after the last key: hence the running maximum, the
rescaling and a third more instructions. But float32 (and bfloat16, which holds the weights) spans 2^-126 to 2^127: a
shift only has to be near the maximum.

"bounded": no shift. By Cauchy-Schwarz |s_ij| <= B = scale log2(e) max|q_i| max|k_j|. If B <= 64, every weight lies in
    [2^-64, 2^64]: none is flushed, and the sum is at most Lk 2^64 < 2^95 for any length below 2^31. The output's
    accumulator is at most max|v| times the sum, finite if max|v| <= 2^31. All three maxima are taken of the input at
    run time, by one pass over each; where the proof fails, another way is taken.
"optimistic": c_i = 32 + the maximum over the first 256 keys. That is a logit of the row, so its term is 2^-32 and the
    sum is at least 2^-32: a term flushed to zero (below 2^-126) is less than 2^-94 of the sum, and with Lk < 2^31 keys
    the flushed terms together are less than 2^-63 of it. Only overflow can go wrong: some s_ij exceeds c_i + 95 or
    so. It cannot hide: all terms are positive, so an infinite one makes the row's sum infinite, and an accumulator
    that is infinite or NaN beside a finite sum (of values beyond 2^100) is looked at as well. The kernel returns one
    number a row that is NaN if any of these is not finite; if there is one, the call is repeated with "online".
"online": the classical running maximum. Exact for every finite input.

A NaN in the input fails the bound and makes the check NaN: "online" then runs once, and the NaN comes out.

A repeat is the body of a loop that runs no time or once, whose result takes the place of the first one: what a
conditional gives in either case XLA would copy.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import lax

from wan_tpu_kernels.blocks import LANES, BlockSizes, plan_blocks
from wan_tpu_kernels.flash_kernel import Tile, flash_tiles
from wan_tpu_kernels.low_precision import MAGIC, round_keys, round_queries

Softmax = Literal["auto", "bounded", "optimistic", "online"]
LowPrecision = Literal["int8", "float8_e4m3fn"]
T = TypeVar("T")

BOUND = 64.0  # powers of two, see the module's docstring
LARGEST_VALUE = 2.0**31
LARGEST_WIDTH = 256  # of heads with 8-bit logits: 127 * 127 * 256 < 2^22, see `low_precision.MAGIC`
ROUNDING_SLACK = 1.02  # squares are summed from bfloat16, 2^-9 off each; float32 roundings are nothing beside it


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
    block_sizes: BlockSizes | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Compute softmax(scale Q K^T) V.

    Without `heads`: q [N, Lq, D]; k, v [N, Lk, D] -> [N, Lq, D], N any batch of heads. With `heads` N, token-major:
    q [Lq, N * D]; k, v [Lk, N * D] -> [Lq, N * D], optionally under one leading batch axis; on TPU no transpose is
    made if D is a multiple of 128, or divides it and N * D is one. bfloat16 or float32; sums are always float32, and
    float32 input is computed in float32 throughout.

    scale: of the logits; None is D ** -0.5. With scale = log(2) the kernel need not multiply: fold the rest into q
        where q is still float32 (`folded_scale`).
    kv_len: number of real keys; the rest of K and V is never looked at. None: all. A number is compiled in; an int32
        scalar is known only when the program runs, from 1 to the keys given, and not to be had with `qk`.
    softmax: "bounded" where its proof holds at run time, else "online"; "optimistic", repeated with "online" where it
        overflowed; "online"; "auto", the fastest: "optimistic" (the proof's passes over Q, K and V cost what "bounded"
        saves). All are exact.
    qk: compute Q K^T from int8 or float8: Q with a scale for each row, K with one a head, the mean of K subtracted
        first, which softmax does not see. An approximation; off by default, and not to be had with "bounded".
    block_sizes: None takes `plan_blocks`. interpret: as pallas_call's.

    Under `jax.vmap` the run-time choices become selects, and every way is computed: give the batch axis instead.
    Recompiles for each shape and each static argument. Raises ValueError for shapes or names that don't fit.
    """
    _check(q, k, v, heads, kv_len, softmax, qk)
    count, shape = heads or 1, q.shape
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    width = shape[-1] // count
    shared = LANES // width if LANES % width == 0 and shape[-1] % LANES == 0 else 1
    split = count > 1 and width * shared % LANES != 0  # columns of a tile must be whole lanes
    if split:
        q, k, v = (_heads_to_batch(x, count) for x in (q, k, v))
    scale = width**-0.5 if scale is None else scale
    call = _Call(1 if split else count, width, shared, scale, *_keys(kv_len, k.shape[1]), qk, block_sizes, interpret)
    out = call.run(q, k, v, softmax)
    return (_batch_to_heads(out, count) if split else out).reshape(shape)


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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute softmax(scale Q K^T) V in one way, and say whether it is right: that of a false one isn't.

    q [Lq, at least N * D]; k, v [Lk, at least N * D] -> [Lq, N * D], and a boolean scalar. Each may hold more heads, of
    width D: of those the ones from its number in `first_heads` on are used, in place where registers are whole.
    What is false is to be asked for again with "online", which is always right.
    """
    shared = LANES // width if LANES % width == 0 and (heads * width) % LANES == 0 else 1
    if (width * shared) % LANES or any(first % shared for first in first_heads):
        q, k, v = (
            x[:, first * width : (first + heads) * width] for x, first in zip((q, k, v), first_heads, strict=True)
        )
        out = flash_attention(q, k, v, heads=heads, scale=scale, kv_len=kv_len, qk=qk, interpret=interpret)
        return out, jnp.asarray(True)
    call = _Call(heads, width, shared, scale, *_keys(kv_len, len(k)), qk, None, interpret)
    first_q, first_k, first_v = (first // shared for first in first_heads)
    out, check = call.once(q[None], k[None], v[None], softmax, (first_q, first_k, first_v))
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
    """Compute the same in plain jnp, float32, with the whole score matrix in memory; arguments as flash_attention's."""
    _check(q, k, v, heads, kv_len, "auto", None)
    count, shape = heads or 1, q.shape
    q3, k3, v3 = (_heads_to_batch((x[None] if x.ndim == 2 else x).astype(jnp.float32), count) for x in (q, k, v))
    k3, v3 = k3[:, :kv_len], v3[:, :kv_len]
    scale = (shape[-1] // count) ** -0.5 if scale is None else scale
    logits = jnp.einsum("nqd,nkd->nqk", q3, k3, precision="highest") * scale
    out = jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(logits), v3, precision="highest")
    return _batch_to_heads(out, count).reshape(shape).astype(v.dtype)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static arguments of one call; arrays are q [B, Lq, N * D], k and v [B, Lk, N * D]."""

    heads: int
    width: int  # D
    shared: int  # heads in the lanes of one tile
    scale: float
    kv_len: int  # the most there can be, if they are counted
    count: jax.Array | None
    qk: LowPrecision | None
    block_sizes: BlockSizes | None
    interpret: Any

    @property
    def lanes(self) -> int:
        """Columns of a tile."""
        return self.width * self.shared

    @property
    def multiplier(self) -> float:
        """Of q.k, to powers of two."""
        return self.scale * math.log2(math.e)

    def once(
        self, q: jax.Array, k: jax.Array, v: jax.Array, softmax: str, first: tuple[int, int, int]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return what one way gives, with its check if it has one; first: tiles of Q, K and V."""
        plan = functools.partial(plan_blocks, q.shape[1], self.kv_len, dtype=self.qk or q.dtype, shared=self.shared)
        blocks, rows = plan().blocks, q.shape[1]
        if self.kv_len <= blocks.online.chunk:
            softmax = "online"
        elif softmax == "online":
            blocks = plan(fallback=True).blocks
        terms, k, rows_of, first = self._rounded(q, k, first)
        out, *check = self._tiles(terms, k, v, rows_of, blocks, softmax, first)
        return out[:, :rows], check[0] if check else None

    def run(self, q: jax.Array, k: jax.Array, v: jax.Array, softmax: Softmax) -> jax.Array:
        given = functools.partial(plan_blocks, q.shape[1], self.kv_len, dtype=self.qk or q.dtype, shared=self.shared)
        blocks = self.block_sizes or given().blocks
        spare = self.block_sizes or given(fallback=True).blocks
        bounded = self._bound_holds(q, k, v) if softmax == "bounded" else None
        rows = q.shape[1]
        terms, k, rows_of, _ = self._rounded(q, k, (0, 0, 0))

        def way(name: str, blocks: BlockSizes = blocks) -> list[jax.Array]:
            return self._tiles(terms, k, v, rows_of, blocks, name)

        def online() -> jax.Array:
            return way("online", spare)[0]

        def optimistic() -> jax.Array:
            out, check = way("optimistic")
            return repeated_if(~jnp.all(jnp.isfinite(check)), out, online)

        # With one chunk in all, "online" sees the row's maximum at once: it is the cheapest as well.
        if softmax == "online" or self.kv_len <= blocks.online.chunk:
            out = way("online")[0]
        elif bounded is None:
            out = optimistic()
        else:
            out = lax.cond(bounded, lambda: way("bounded")[0], online)
        return out[:, :rows]

    def _tiles(
        self,
        terms: list[jax.Array],
        k: jax.Array,
        v: jax.Array,
        rows_of: jax.Array | None,
        blocks: BlockSizes,
        softmax: str,
        first: tuple[int, int, int] = (0, 0, 0),
    ) -> list[jax.Array]:
        counted = self.count is not None
        tile = Tile(blocks, softmax, self.kv_len, self.multiplier, self.width, self.shared, counted)
        k, v = (_at_least(x, blocks.block_kv) for x in (k, v))
        terms = [_at_least(term, blocks.block_q) for term in terms]
        if rows_of is not None:
            rows_of = jnp.pad(rows_of, ((0, 0), (0, 0), (0, max(0, blocks.block_q - rows_of.shape[2]))))
        return flash_tiles(terms, k, v, rows_of, tile, self.heads, self.interpret, first, self.count)

    def _bound_holds(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Whether all exponents and sums of every head stay in range without a shift; a boolean scalar."""
        k, v = self._real(k), self._real(v)
        largest = abs(self.multiplier) * ROUNDING_SLACK * _largest_norm(q, self.heads) * _largest_norm(k, self.heads)
        return jnp.all(largest <= BOUND) & (jnp.max(jnp.abs(v)) <= LARGEST_VALUE)

    def _real(self, x: jax.Array) -> jax.Array:
        """Return keys or values [B, Lk, N * D] without those that don't count, or with zeros in their place."""
        x = x[:, : self.kv_len]
        return x if self.count is None else jnp.where((jnp.arange(self.kv_len) < self.count)[:, None], x, 0)

    def _rounded(
        self, q: jax.Array, k: jax.Array, first: tuple[int, int, int]
    ) -> tuple[list[jax.Array], jax.Array, jax.Array | None, tuple[int, int, int]]:
        """Return Q's terms and K as they are multiplied, `rows_of` of `flash_tiles`, and the first tiles of Q, K, V."""
        if self.qk is None:
            return [q], k, None, first
        dtype = jnp.dtype(self.qk)
        which: dict[str, Any] = {"width": self.width, "shared": self.shared, "interpret": self.interpret}
        k, unit = round_keys(k, self.kv_len, dtype, tiles=self.heads // self.shared, first=first[1], **which)
        terms, scales = round_queries(q, self.multiplier * unit, dtype, first=first[0], **which)
        if dtype == jnp.int8:
            scales = lax.bitcast_convert_type(MAGIC * scales, jnp.int32)
        return terms, k, scales, (0, 0, first[2])


def _keys(kv_len: int | jax.Array | None, given: int) -> tuple[int, jax.Array | None]:
    """Return the most keys that there can be, and their number [1] if only the program knows it."""
    if isinstance(kv_len, jax.Array):
        return given, kv_len.reshape(1).astype(jnp.int32)
    return kv_len or given, None


def repeated_if(wrong: jax.Array, found: T, again: Callable[[], T]) -> T:
    """Return `found`, or where it is wrong (a boolean scalar) what `again` gives in its place."""
    return lax.while_loop(lambda state: state[0], lambda _: (jnp.asarray(False), again()), (wrong, found))[1]


def _largest_norm(x: jax.Array, heads: int) -> jax.Array:
    """x [B, L, N * D] -> [B, N] float32, to 1 %.

    The squares are summed by a matmul with ones: to split the last axis XLA would transpose the whole array.
    """
    square = jnp.square(x.astype(jnp.float32)).astype(jnp.bfloat16)
    ones = jnp.repeat(jnp.eye(heads, dtype=jnp.bfloat16), x.shape[2] // heads, axis=0)  # [N * D, N]
    sums = jnp.einsum("blc,cn->bln", square, ones, preferred_element_type=jnp.float32)
    return jnp.sqrt(jnp.max(sums, axis=1))


def _at_least(x: jax.Array, rows: int) -> jax.Array:
    """Append zero rows to x [B, L, C] until there is one whole block; longer arrays may overhang, unread."""
    return jnp.pad(x, ((0, 0), (0, max(0, rows - x.shape[1])), (0, 0)))


def _heads_to_batch(x: jax.Array, heads: int) -> jax.Array:
    """[B, L, N * D] -> [B * N, L, D]."""
    batch, length, width = x.shape
    x = x.reshape(batch, length, heads, width // heads)
    return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, -1)


def _batch_to_heads(x: jax.Array, heads: int) -> jax.Array:
    """[B * N, L, D] -> [B, L, N * D]."""
    count, length, d = x.shape
    x = x.reshape(count // heads, heads, length, d)
    return x.transpose(0, 2, 1, 3).reshape(count // heads, length, heads * d)


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    heads: int | None,
    kv_len: int | jax.Array | None,
    softmax: str,
    qk: str | None,
) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    dims = (3,) if heads is None else (2, 3)
    if q.ndim not in dims or k.shape != v.shape or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        layout = "[N, L, D]" if heads is None else "[L, N * D] or [B, L, N * D]"
        raise ValueError(f"q, k, v must be {layout}, k and v of one shape, got {shapes}")
    if heads is not None and (heads < 1 or q.shape[-1] % heads):
        raise ValueError(f"heads must divide the last axis, got {heads} heads and {shapes}")
    if isinstance(kv_len, jax.Array):
        if kv_len.size != 1 or not jnp.issubdtype(kv_len.dtype, jnp.integer):
            raise ValueError(f"kv_len must be one whole number, got {kv_len.dtype} {kv_len.shape}")
        if qk is not None:
            raise ValueError(f"with qk={qk!r} kv_len must be a number that is known when the program is compiled")
    elif kv_len is not None and not 1 <= kv_len <= k.shape[-2]:
        raise ValueError(f"kv_len must be from 1 to {k.shape[-2]}, the keys given, got {kv_len}")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"q, k, v must all be bfloat16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}")
    if qk is not None and q.shape[-1] // (heads or 1) > LARGEST_WIDTH:
        raise ValueError(f"with qk={qk!r} heads must be at most {LARGEST_WIDTH} wide, got {shapes}, {heads or 1} heads")
    if qk is not None and softmax == "bounded":
        raise ValueError(f"with qk={qk!r} softmax must be 'auto', 'optimistic' or 'online', got {softmax!r}")
    for name, value, allowed in (("softmax", softmax, get_args(Softmax)), ("qk", qk, (None, *get_args(LowPrecision)))):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
