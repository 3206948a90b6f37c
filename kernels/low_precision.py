"""Q and K in 8 bits with one scale a block, for the first matmul of attention."""

import jax
import jax.numpy as jnp


def smooth(k: jax.Array) -> jax.Array:
    """Subtract from K [B, Lk, N * D] its mean over the keys; float32.

    Each query's logits all move by q.mean(K), which softmax does not see. What is left needs fewer bits where channels
    have a bias, as K of trained models has (SageAttention, arXiv:2410.02367, section 4.2).
    """
    k = k.astype(jnp.float32)
    return k - jnp.mean(k, axis=1, keepdims=True)


def quantize(x: jax.Array, heads: int, block: int, dtype: str, terms: int = 1) -> tuple[list[jax.Array], jax.Array]:
    """Divide each head's blocks of `block` tokens by a scale and round to dtype ("int8", "float8_e4m3fn").

    x [B, L, N * D] -> terms [B, L, N * D] each of dtype, and scales [B, N, ceil(L / block)] float32: the sum of the
    terms times the scales is near x, with two terms twice as many bits of it.

    Heads stay side by side in the last axis, and blocks are slices, not a reshape of padded rows: both would make XLA
    copy the whole array.
    """
    length, d = x.shape[1], x.shape[2] // heads
    target = jnp.dtype(dtype)
    whole = jnp.issubdtype(target, jnp.integer)
    largest = float(jnp.iinfo(target).max if whole else jnp.finfo(target).max)
    by_column = [
        jnp.max(jnp.abs(x[:, start : start + block].astype(jnp.float32)), axis=1) for start in range(0, length, block)
    ]
    columns = jnp.stack(by_column, axis=1)  # [B, blocks, N * D]
    scales = jnp.max(columns.reshape(*columns.shape[:2], heads, d), axis=-1) / largest
    scales = jnp.where(scales > 0, scales, 1.0)
    rest = x.astype(jnp.float32) / jnp.repeat(jnp.repeat(scales, d, axis=2), block, axis=1)[:, :length]
    values = []
    for _ in range(terms):
        values.append((jnp.round(rest) if whole else rest).astype(target))
        rest = rest - values[-1].astype(jnp.float32)
    return values, scales.transpose(0, 2, 1)
