"""Check flash attention's arguments, and arrange its arrays as tiles need them."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

Softmax = Literal["auto", "bounded", "optimistic", "online"]
LowPrecision = Literal["int8", "float8_e4m3fn"]

LARGEST_WIDTH = 256  # The widest head with 8-bit logits: 127 * 127 * 256 < 2^22, see `low_precision.MAGIC`.


def check_operands(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    heads: int | None,
    kv_len: int | jax.Array | None,
    softmax: str,
    qk: str | None,
    pv: str | None = None,
) -> None:
    """Raise `ValueError` for arguments of `flash_attention` that don't fit."""
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
    elif kv_len is not None and not 1 <= kv_len <= k.shape[-2]:
        raise ValueError(f"kv_len must be from 1 to {k.shape[-2]}, the keys given, got {kv_len}")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"q, k, v must all be bfloat16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}")
    if qk is not None and q.shape[-1] // (heads or 1) > LARGEST_WIDTH:
        raise ValueError(f"with qk={qk!r} heads must be at most {LARGEST_WIDTH} wide, got {shapes}, {heads or 1} heads")
    if qk is not None and softmax == "bounded":
        raise ValueError(f"with qk={qk!r} softmax must be 'auto', 'optimistic' or 'online', got {softmax!r}")
    if pv is not None and (pv != qk or softmax not in ("auto", "online")):
        raise ValueError(f"pv={pv!r} needs the same qk, and softmax 'auto' or 'online', got {qk!r} and {softmax!r}")
    for name, value, allowed in (("softmax", softmax, get_args(Softmax)), ("qk", qk, (None, *get_args(LowPrecision)))):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def count_keys(kv_len: int | jax.Array | None, length: int) -> tuple[int, jax.Array | None]:
    """Return the largest possible number of keys, and their number [1] if only the program knows it."""
    if isinstance(kv_len, jax.Array):
        return length, kv_len.reshape(1).astype(jnp.int32)
    return kv_len or length, None


def pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """Append zero rows to x [B, L, C] until there is one whole block; the last block of longer arrays may overhang."""
    return jnp.pad(x, ((0, 0), (0, max(0, rows - x.shape[1])), (0, 0)))


def heads_to_batch(x: jax.Array, heads: int) -> jax.Array:
    """Rearrange [B, L, N * D] to [B * N, L, D]."""
    batch, length, width = x.shape
    x = x.reshape(batch, length, heads, width // heads)
    return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, -1)


def batch_to_heads(x: jax.Array, heads: int) -> jax.Array:
    """Rearrange [B * N, L, D] to [B, L, N * D]."""
    count, length, d = x.shape
    x = x.reshape(count // heads, heads, length, d)
    return x.transpose(0, 2, 1, 3).reshape(count // heads, length, heads * d)
