"""The text as MiniMax-H3's transformer needs it: embedded, and refined by two separate layers, once per request.

Padding takes no part in it, and the number of real rows is an array: one program serves texts of every length.

Shapes: R rows of text, C channels, N heads, D head width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.families.minimax_h3.layers import attend_in_parts
from wan_tpu.runtime.bridge import Params, call, to_jax, to_torch


def refine_text(module: torch.nn.Module, params: Params, mesh: Mesh, text: jax.Array, real: jax.Array) -> jax.Array:
    """Return the text's rows in the order of the transformer's sequence, [R, C].

    Args:
        module: The transformer.
        params: Its weights.
        mesh: The devices.
        text: The text encoder's output, [R, text channels].
        real: bool [R], which rows aren't padding.
    """

    def method(module: Any, text: torch.Tensor) -> torch.Tensor:
        hidden = module.context_embedder(text)
        for block in module.token_refiner.refiner_blocks:
            hidden = hidden + to_torch(_attend(block.attn, block.norm1(hidden), real))
            hidden = hidden + block.ff(block.norm2(hidden))
        return module.token_refiner.final_norm(hidden)

    needed = {name: value for name, value in params.items() if name.startswith(("context_embedder.", "token_refiner."))}
    unchanged = {name: value for name, value in params.items() if name not in needed}
    refined: jax.Array = call(module, needed | unchanged, method, text)
    return jax.lax.with_sharding_constraint(refined, jax.sharding.NamedSharding(mesh, P()))


def _attend(attention: Any, rows: torch.Tensor, real: jax.Array) -> jax.Array:
    """Return attention's output for all rows, [R, C]; no row attends to padding."""
    query, key, value = (
        projection(rows).unflatten(-1, (attention.heads, -1))
        for projection in (attention.to_q, attention.to_k, attention.to_v)
    )
    query, key = attention.norm_q(query), attention.norm_k(key)
    key, value = to_jax(key), to_jax(value)

    def attend(query: jax.Array, _: jax.Array) -> jax.Array:
        mask = jnp.broadcast_to(real, (1, 1, len(query), len(key)))
        attended: jax.Array = jax.nn.dot_product_attention(query[None], key[None], value[None], mask=mask)[0]
        return attended

    attended = attend_in_parts(attend, to_jax(query))
    return to_jax(attention.to_out[0](to_torch(attended.reshape(len(real), -1))))
