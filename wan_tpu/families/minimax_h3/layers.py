"""Attention of long texts, whose logits for all queries at once would take gigabytes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_WHOLE = 3072  # Rows whose logits are computed at once: 56 heads have 2 GB of them in float32.
_PART = 1024


def attend_in_parts(attend: Callable[[jax.Array, jax.Array], jax.Array], query: jax.Array) -> jax.Array:
    """Return an attention's output for all queries [R, N, D], computed part by part if there are many.

    Args:
        attend: Returns the output for some of the queries, given these and their indices.
        query: All queries.
    """
    rows = len(query)
    if rows <= _WHOLE:
        return attend(query, jnp.arange(rows))
    count = -(-rows // _PART)
    padded = jnp.pad(query, ((0, count * _PART - rows), (0, 0), (0, 0)))
    parts = padded.reshape(count, _PART, *query.shape[1:]), jnp.arange(count * _PART).reshape(count, _PART)
    output = jax.lax.map(lambda part: attend(*part), parts)
    return output.reshape(count * _PART, *output.shape[2:])[:rows]
