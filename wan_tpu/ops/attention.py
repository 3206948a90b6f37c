"""Attention on one device behind one function that picks the implementation by platform.

Arrays are token-major, [L, N*D]: as projections leave them, and as the TPU kernel reads them without a transpose.
Shapes: L tokens, N heads, D head width.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from wan_tpu.switches import uses_kernel
from wan_tpu_kernels.flash_attention import flash_attention, flash_attention_unchecked
from wan_tpu_kernels.flash_operands import LowPrecision
from wan_tpu_kernels.low_precision import (
    largest_value,
    round_keys_reference,
    round_queries_reference,
    to_nearest,
)

# Query rows whose scores are formed at once on CPU: with 2,000 keys, 256 rows of float32 scores are 2 MB, which stay in
# the cache of one core. Measured: 55 ms, against 125 ms in one piece (2x4 heads, 2,000 tokens, D=128).
CPU_QUERY_BLOCK = 256


def query_scale(head_width: int) -> float:
    """Return the factor by which float32 queries are multiplied, so that attention is a softmax to base two."""
    return head_width**-0.5 * math.log2(math.e)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, heads: int, platform: str, kv_len: int | jax.Array | None = None
) -> jax.Array:
    """Compute full attention, sum_j 2^(q.k_j) v_j / sum_j 2^(q.k_j), on one device.

    Args:
        q: [Lq, N*D], times `query_scale`; or [B, Lq, N*D], a batch that is computed separately.
        k, v: [Lk, N*D], or [B, Lk, N*D].
        heads: N.
        platform: "tpu", "gpu" or "cpu".
        kv_len: Keys from here on are ignored.

    Returns:
        An array of the shape of q, in its dtype.
    """
    scale = math.log(2)
    if uses_kernel("attention", platform):
        return flash_attention(q, k, v, heads=heads, kv_len=kv_len, scale=scale)
    if q.ndim == 3:
        return jax.lax.map(lambda x: attention(*x, heads=heads, platform=platform, kv_len=kv_len), (q, k, v))
    # If the number of keys is an array, it is known only when the program runs, and one program serves any number.
    count = kv_len if isinstance(kv_len, jax.Array) else None
    if count is None:
        k, v = k[:kv_len], v[:kv_len]
    q, k, v = (x.reshape(x.shape[0], heads, -1) for x in (q, k, v))
    if platform == "gpu" and count is None:
        attended = _attend_on_gpu(q, k, v, scale)
    else:
        attended = _attend_blockwise(q, k, v, scale, count)
    return attended.reshape(attended.shape[0], -1)


def attention_part(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    heads: int,
    first_heads: tuple[int, int, int],
    width: int,
    kv_len: int | jax.Array,
    platform: str,
    softmax: Literal["optimistic", "online"] = "optimistic",
    qk: LowPrecision | None = None,
    pv: LowPrecision | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of some heads, and check the result.

    Args:
        q: [Lq, at least N*D], times `query_scale`.
        k, v: [Lk, at least N*D].
        heads: N.
        first_heads: The first head to use of q, k and v.
        width: D.
        kv_len: Keys from here on are ignored.
        platform: "tpu", "gpu" or "cpu".
        softmax: The way to compute it; "online" is always right.
        qk: An 8-bit type to compute logits in.
        pv: The same type, if weights and values are multiplied in it, too. Without the kernel, weights are relative to
            the largest one of all keys.

    Returns:
        The output [Lq, N*D], and a boolean scalar: False if it is wrong and must be repeated with "online".
    """
    if uses_kernel("attention", platform):
        options = {"heads": heads, "first_heads": first_heads, "width": width, "scale": math.log(2), "kv_len": kv_len}
        return flash_attention_unchecked(q, k, v, softmax=softmax, qk=qk, pv=pv, **options)  # type: ignore[arg-type]
    q, k, v = (x[:, n * width : (n + heads) * width] for x, n in zip((q, k, v), first_heads, strict=True))
    if qk is not None:
        if isinstance(kv_len, int):
            k, v = k[:kv_len], v[:kv_len]
        else:
            v = jnp.where((jnp.arange(len(v)) < kv_len)[:, None], v, 0)
        q, k = _round_to_8_bits(q, k, heads, kv_len, qk)
        if pv is not None:
            return _attend_in_8_bits(q, k, v, heads, kv_len, pv), jnp.asarray(True)
    return attention(q, k, v, heads=heads, platform=platform, kv_len=kv_len), jnp.asarray(True)


def _round_to_8_bits(
    q: jax.Array, k: jax.Array, heads: int, kv_len: int | jax.Array, dtype: str
) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys as 8 bits represent them, without the mean key, which doesn't affect softmax."""
    keys, unit, _ = round_keys_reference(k[None], kv_len, jnp.dtype(dtype), heads=heads)
    terms, scales = round_queries_reference(q[None], unit, jnp.dtype(dtype), heads=heads)
    whole = jnp.stack([term[0].astype(jnp.float32) for term in terms]).sum(axis=0)
    rows = jnp.repeat(scales[0].T, q.shape[1] // heads, axis=1)  # [Lq, N * D]
    return whole * rows, keys[0].astype(jnp.float32)


def _attend_in_8_bits(
    q: jax.Array, k: jax.Array, v: jax.Array, heads: int, kv_len: int | jax.Array, dtype: str
) -> jax.Array:
    """Compute attention with rounded queries and keys, rounding weights and values [L, N*D] as well."""
    values, scales, mean = round_keys_reference(v[None], kv_len, jnp.dtype(dtype), heads=v.shape[1])
    rounded = values[0].astype(jnp.float32) * scales + mean
    q, k, rounded = (x.reshape(x.shape[0], heads, -1) for x in (q, k, rounded))
    count = kv_len if isinstance(kv_len, jax.Array) else None
    attended = _attend_blockwise(q, k, rounded, math.log(2), count, weights_dtype=jnp.dtype(dtype))
    return attended.reshape(attended.shape[0], -1).astype(v.dtype)


def _attend_on_gpu(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    fused = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn" if fused else "xla")


def _attend_blockwise(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    kv_len: jax.Array | None = None,
    weights_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Compute attention over [L, N, D] in plain XLA, a block of query rows at a time.

    Rows are padded to whole blocks; keys never are. With `weights_dtype`, weights are rounded to that type.
    """
    length, heads, width = q.shape
    keys, values = k.transpose(1, 2, 0), v.transpose(1, 0, 2)  # [N, D, Lk], [N, Lk, D]

    def rows(block: jax.Array) -> jax.Array:
        scores = jnp.einsum("nqd,ndk->nqk", block, keys, preferred_element_type=jnp.float32) * scale
        if kv_len is not None:
            scores = jnp.where(jnp.arange(len(k)) < kv_len, scores, -jnp.inf)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)  # Of weights that aren't rounded: 8 bits make small ones zero.
        if weights_dtype is not None:
            largest = largest_value(weights_dtype)
            weights = to_nearest(weights * largest, weights_dtype).astype(jnp.float32) / largest
        attended = jnp.einsum("nqk,nkd->nqd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return (attended / total).astype(q.dtype)

    queries = q.transpose(1, 0, 2)
    if length <= 2 * CPU_QUERY_BLOCK:
        return rows(queries).transpose(1, 0, 2)
    count = -(-length // CPU_QUERY_BLOCK)
    padded = jnp.pad(queries, ((0, 0), (0, count * CPU_QUERY_BLOCK - length), (0, 0)))
    blocks = padded.reshape(heads, count, CPU_QUERY_BLOCK, width).transpose(1, 0, 2, 3)
    attended = jax.lax.map(rows, blocks).transpose(1, 0, 2, 3)
    return attended.reshape(heads, -1, width)[:, :length].transpose(1, 0, 2)
