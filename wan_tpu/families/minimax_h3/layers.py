"""Attention of long texts, whose logits for all queries at once would take gigabytes; the gates of sparse attention."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from wan_tpu.runtime.bridge import Params

GATE = "attn.to_gate_compress"  # FastVideo's matrix in each block, which diffusers' module doesn't have.
_BLOCK = "transformer_blocks.template."

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


def without_gates(params: Params) -> Params:
    """Return the weights that diffusers' module has."""
    return {name: value for name, value in params.items() if GATE not in name}


def select_gates(params: Params) -> Params:
    """Return the gates, which are stacked over the blocks, by their names in one."""
    return {name.removeprefix(_BLOCK): value for name, value in params.items() if GATE in name}
