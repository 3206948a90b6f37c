"""Attention of one head in the middle of a VAE, and the norm before it.

Shapes: T frames, X columns and Y rows of a device's strip, W H width and height of the whole picture, C channels.
"""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, gamma: jax.Array) -> jax.Array:
    """Divide x [..., C] by its root mean square and multiply it by gamma [C], in float32; the dtype is that of x."""
    wide = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.maximum((wide * wide).sum(-1, keepdims=True), 1e-24))
    return (wide / norm * x.shape[-1] ** 0.5 * gamma).astype(x.dtype)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array | None = None, *, at_once: int
) -> jax.Array:
    """Compute attention with scale 1/sqrt(C) and return [X, Y, C].

    Args:
        query: [X, Y, C], of one device and frame.
        key, value: [W, H, C] or [T, W, H, C], of whole pictures.
        seen: [W, H] or [T, W, H], which keys the queries attend to; all if None.
        at_once: Queries whose scores are computed at once, rounded to whole columns.
    """
    keys, values = key.reshape(-1, key.shape[-1]), value.reshape(-1, value.shape[-1])
    scale = query.shape[-1] ** -0.5

    def column(queries: jax.Array) -> jax.Array:
        scores = jnp.einsum("yc,nc->yn", queries, keys, preferred_element_type=jnp.float32) * scale
        if seen is not None:
            scores = jnp.where(seen.reshape(-1), scores, -jnp.inf)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        attended = jnp.einsum("yn,nc->yc", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return (attended / weights.sum(-1, keepdims=True)).astype(queries.dtype)

    return jax.lax.map(column, query, batch_size=max(1, at_once // query.shape[1]))
