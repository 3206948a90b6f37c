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


def quantize(x: jax.Array, heads: int, block: int, dtype: str, terms: int = 1) -> tuple[jax.Array, jax.Array]:
    """Divide each head's blocks of `block` tokens by a scale and round to dtype ("int8", "float8_e4m3fn").

    x [B, L, N * D] -> values [B, L, N * terms * D] of dtype, scales [B, N, ceil(L / block)] float32. x is near values *
    scales; with two terms, the sum of a head's first and last D columns is, and twice the bits are right.
    """
    batch, length, width = x.shape
    blocks = -(-length // block)
    target = jnp.dtype(dtype)
    whole = jnp.issubdtype(target, jnp.integer)
    largest = float(jnp.iinfo(target).max if whole else jnp.finfo(target).max)
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, blocks * block - length), (0, 0)))
    rest = padded.reshape(batch, blocks, block, heads, width // heads)
    scales = jnp.max(jnp.abs(rest), axis=(2, 4)) / largest  # [B, blocks, N]
    scales = jnp.where(scales > 0, scales, 1.0)
    rest = rest / scales[:, :, None, :, None]
    values = []
    for _ in range(terms):
        values.append((jnp.round(rest) if whole else rest).astype(target))
        rest = rest - values[-1].astype(jnp.float32)
    joined = jnp.concatenate(values, axis=-1).reshape(batch, blocks * block, terms * width)
    return joined[:, :length], scales.transpose(0, 2, 1)
