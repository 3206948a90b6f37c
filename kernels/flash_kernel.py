"""The tile program of flash attention: what one grid step does with a block of queries and a block of keys.

Everything is kept transposed, S^T = K Q^T [keys, queries] and O^T = V^T P^T [D, queries], so that what softmax needs
for each query is a row vector (no lane reductions, no broadcasts along lanes) and P^T feeds the second matmul as it
is. O^T is transposed once, after the last key.

Letters: B batch, N heads, Lq Lk tokens, D head width.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# What the optimistic kernel adds to a row's first maximum (powers of two): room for later, larger logits. The row's
# sum is then at least 2^-32, so that what float32 and bfloat16 flush (below 2^-126) is below 2^-94 of it.
HEADROOM = 32.0

Ref = Any  # a Pallas reference to VMEM or SMEM
Index = int | jax.Array

SUBLANES = 8  # rows of one float32 vector register


@dataclasses.dataclass(frozen=True)
class Tile:
    """The static side of a kernel: block sizes (rows of Q; rows of K; keys of one compute chunk) and arithmetic."""

    block_q: int
    block_kv: int
    chunk: int
    softmax: str  # "bounded", "optimistic" or "online"
    kv_len: int
    multiplier: float  # of the logits, log2(e) included
    vmem_limit: int | None = None  # bytes

    @property
    def kv_steps(self) -> int:
        """Number of key blocks that hold a real key."""
        return -(-self.kv_len // self.block_kv)

    @property
    def last_keys(self) -> int:
        """Real keys of the last key block."""
        return self.kv_len - (self.kv_steps - 1) * self.block_kv


def flash_tiles(
    q: jax.Array, k: jax.Array, v: jax.Array, scales: jax.Array | None, tile: Tile, heads: int, interpret: Any
) -> list[jax.Array]:
    """Run the kernel over all tiles.

    q [B, Lq, N * D]; k, v [B, Lk, N * D], Lq and Lk at least one block; scales [B * N, query blocks * key blocks]
    float32, which multiply a block's logits, or None. Returns the output [B, Lq, N * D]; with softmax "optimistic"
    also a check [B * N, 1, Lq] float32, zero where a row's sum and output are finite and NaN where they are not.
    """
    batch, q_len, width = q.shape
    d = width // heads
    grid = (batch, heads, -(-q_len // tile.block_q), tile.kv_steps)
    rows = pl.BlockSpec((None, tile.block_q, d), lambda b, h, i, j: (b, i, h))
    keys = pl.BlockSpec((None, tile.block_kv, d), lambda b, h, i, j: (b, j, h))
    flags = pl.BlockSpec((None, 1, tile.block_q), lambda b, h, i, j: (b * heads + h, 0, i))
    in_specs, operands = [rows, keys, keys], [q, k, v]
    if scales is not None:
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
        operands.append(scales)
    wide = k.dtype == jnp.float32
    outputs = 2 if tile.softmax == "optimistic" else 1
    row = pltpu.VMEM((SUBLANES, tile.block_q), jnp.float32)
    scores = batch * heads * q_len * tile.kv_len
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile, scaled=scales is not None),
        grid=grid,
        in_specs=in_specs,
        out_specs=[rows, flags][:outputs],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((batch * heads, 1, q_len), jnp.float32),
        ][:outputs],
        scratch_shapes=[pltpu.VMEM((d, tile.block_q), jnp.float32), row, row],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tile.vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * d,
            transcendentals=scores,
            bytes_accessed=q.nbytes + batch * heads * q_len * d * v.itemsize + grid[2] * (k.nbytes + v.nbytes),
        ),
        interpret=interpret,
        name=f"flash_attention_{tile.softmax}" + ("" if scales is None else "_low") + ("_f32" if wide else ""),
    )(*operands)


def _kernel(q_ref: Ref, k_ref: Ref, v_ref: Ref, *refs: Ref, tile: Tile, scaled: bool) -> None:
    """One grid step (b, h, i, j). Scratch: acc O^T [D, bq], total [8, bq] partial sums, shift [8, bq], all float32."""
    scale_ref = refs[0] if scaled else None
    o_ref, *check_ref, acc_ref, total_ref, shift_ref = refs[scaled:]
    step, last = pl.program_id(3), tile.kv_steps - 1
    factor = tile.multiplier
    if scale_ref is not None:
        head = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
        factor = scale_ref[head, pl.program_id(2) * tile.kv_steps + step]
    logits = functools.partial(_logits, q_ref, k_ref, factor, tile)
    update = _online if tile.softmax == "online" else _fixed

    @pl.when(step == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        total_ref[...] = jnp.zeros_like(total_ref)
        if tile.softmax == "optimistic":
            real = tile.last_keys if tile.kv_steps == 1 else tile.block_kv
            first = jnp.max(logits(0, real if real < tile.chunk else None), axis=0, keepdims=True)
            shift_ref[...] = jnp.broadcast_to(first + HEADROOM, shift_ref.shape)
        elif tile.softmax == "online":
            shift_ref[...] = jnp.full_like(shift_ref, jnp.finfo(jnp.float32).min)

    def chunk(start: Index, real: int | None = None) -> None:
        v = v_ref[pl.ds(start, tile.chunk), :]
        if real is not None:
            v = jnp.where(_is_key(v.shape, start, real), v, jnp.zeros_like(v))
        update(logits(start, real), v, acc_ref, total_ref, shift_ref, tile)

    def whole() -> None:
        for start in range(0, tile.block_kv, tile.chunk):
            chunk(start)

    def ragged() -> None:
        # A loop, not unrolled: this block is one of many, and unrolled it would double the code to compile.
        def body(c: jax.Array, _: None) -> None:
            chunk(pl.multiple_of(c * tile.chunk, tile.chunk), tile.last_keys)

        lax.fori_loop(0, pl.cdiv(tile.last_keys, tile.chunk), body, None)

    if tile.last_keys == tile.block_kv:
        whole()
    elif tile.kv_steps == 1:
        ragged()
    else:
        pl.when(step < last)(whole)
        pl.when(step == last)(ragged)

    @pl.when(step == last)
    def _() -> None:
        total = jnp.sum(total_ref[...], axis=0, keepdims=True)
        o_ref[...] = (acc_ref[...] / total).T.astype(o_ref.dtype)
        for ref in check_ref:  # 0 * x is NaN exactly where x is not finite
            ref[...] = jnp.sum(acc_ref[...] * 0.0, axis=0, keepdims=True) + total * 0.0


def _logits(
    q_ref: Ref, k_ref: Ref, factor: float | jax.Array, tile: Tile, start: Index, real: int | None = None
) -> jax.Array:
    """S^T [chunk, bq] float32 in powers of two; -inf for keys from `real` on."""
    s = _dot(k_ref[pl.ds(start, tile.chunk), :], q_ref[...], contract=(1, 1))
    if not (isinstance(factor, float) and math.isclose(factor, 1.0, rel_tol=1e-6)):
        s = s * factor
    return s if real is None else jnp.where(_is_key(s.shape, start, real), s, -jnp.inf)


def _fixed(s: jax.Array, v: jax.Array, acc_ref: Ref, total_ref: Ref, shift_ref: Ref, tile: Tile) -> None:
    """Add one chunk to sum and output; the shift of a row never changes."""
    p = jnp.exp2(s - shift_ref[:1] if tile.softmax == "optimistic" else s)
    total_ref[...] += _partial_sums(p)
    acc_ref[...] += _dot(v, p.astype(v.dtype), contract=(0, 0))


def _online(s: jax.Array, v: jax.Array, acc_ref: Ref, total_ref: Ref, shift_ref: Ref, tile: Tile) -> None:
    """Add one chunk; the shift is the largest logit so far, sum and output are rescaled when it grows."""
    before = shift_ref[...]
    shift = jnp.maximum(before, jnp.max(s, axis=0, keepdims=True))
    rescale = jnp.exp2(before - shift)
    p = jnp.exp2(s - shift[:1])
    shift_ref[...] = shift
    total_ref[...] = total_ref[...] * rescale + _partial_sums(p)
    acc_ref[...] = acc_ref[...] * rescale[:1] + _dot(v, p.astype(v.dtype), contract=(0, 0))


def _partial_sums(p: jax.Array) -> jax.Array:
    """[keys, bq] -> [8, bq]: whole registers are added; the 8 sublanes only once, at the end."""
    return jnp.sum(p.reshape(-1, SUBLANES, p.shape[1]), axis=0)


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
    return start + lax.broadcasted_iota(jnp.int32, shape, 0) < real
