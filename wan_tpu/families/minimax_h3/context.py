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

from wan_tpu.families.minimax_h3.layers import attend_in_parts, without_gates
from wan_tpu.ops.sparse_linear import SparseLinear, choose_blocks
from wan_tpu.runtime.bridge import Params, call, to_jax, to_torch
from wan_tpu_kernels.two_blocks import KEYS, QUERIES


def refine_text(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    text: jax.Array,
    count: jax.Array,
    density: float | None = None,
) -> jax.Array:
    """Return the text's rows as the transformer reads them, [R, C].

    Args:
        module: The transformer.
        params: Its weights.
        mesh: The devices.
        text: The text encoder's output, [R, text channels]; padding is last.
        count: The number of real rows.
        density: The share of the blocks of keys that sparse attention keeps; None for attention to all keys.
    """

    def method(module: Any, text: torch.Tensor) -> torch.Tensor:
        hidden = module.context_embedder(text)
        for block in module.token_refiner.refiner_blocks:
            hidden = hidden + to_torch(_attend(block.attn, block.norm1(hidden), count, density))
            hidden = hidden + block.ff(block.norm2(hidden))
        return module.token_refiner.final_norm(hidden)

    needed = {name: value for name, value in params.items() if name.startswith(("context_embedder.", "token_refiner."))}
    unchanged = {name: value for name, value in without_gates(params).items() if name not in needed}
    refined: jax.Array = call(module, needed | unchanged, method, text)
    return jax.lax.with_sharding_constraint(refined, jax.sharding.NamedSharding(mesh, P()))


def _attend(attention: Any, rows: torch.Tensor, count: jax.Array, density: float | None) -> jax.Array:
    """Return attention's output for all rows, [R, C]; no row attends to padding."""
    query, key, value = (
        projection(rows).unflatten(-1, (attention.heads, -1))
        for projection in (attention.to_q, attention.to_k, attention.to_v)
    )
    query, key = to_jax(attention.norm_q(query)), to_jax(attention.norm_k(key))
    value, real = to_jax(value), jnp.arange(len(rows)) < count
    chosen = None if density is None else _choose_keys(query, key, count, density)

    def attend(query: jax.Array, indices: jax.Array) -> jax.Array:
        mask = real if chosen is None else chosen[:, indices // QUERIES] & real
        mask = jnp.broadcast_to(mask, (1, 1 if chosen is None else len(chosen), len(query), len(key)))
        attended: jax.Array = jax.nn.dot_product_attention(query[None], key[None], value[None], mask=mask)[0]
        return attended

    attended = attend_in_parts(attend, query)
    return to_jax(attention.to_out[0](to_torch(attended.reshape(len(rows), -1))))


def _choose_keys(query: jax.Array, key: jax.Array, count: jax.Array, density: float) -> jax.Array:
    """Return which keys each block of queries attends to, bool [N, blocks, R]."""
    rows, heads, width = query.shape
    q, k = (x.reshape(rows, -1) for x in (query, key))
    lists = choose_blocks(q, k, SparseLinear(density), heads=heads, width=width, kv_len=count, kernels=False)[0]
    chosen = jnp.any(lists[..., None] == jnp.arange(-(-rows // KEYS)), axis=-2)
    return jnp.repeat(chosen, KEYS, axis=-1)[..., :rows]
