"""Sparse-linear attention (SLA, arXiv 2509.24006) of some heads on one device: few keys exactly, all keys linearly.

Which keys a block of 128 queries attends to is told by means: the blocks of 64 keys whose mean key has the largest
product with the mean query. (The paper subtracts the mean of all keys first, which adds the same to all of a query's
products and chooses the same blocks.) What softmax attention over those misses, linear attention over all keys makes
up for, through a matrix that was trained for it.

Shapes: L tokens, N heads, D head width; token-major, [L, N * D].
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels.linear_attention import add_linear, add_linear_reference
from kernels.sparse_attention import KEYS, QUERIES, sparse_attention, sparse_attention_reference
from kernels.top_lists import top_lists, top_lists_reference
from wan_tpu.ops.attention import query_scale


@dataclass(frozen=True)
class SparseLinear:
    """How a layer attends: the share of blocks of keys that are kept; weight [D, D], bias [D] of the linear part."""

    kept: float
    weight: jax.Array
    bias: jax.Array


def sparse_linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    how: SparseLinear,
    *,
    heads: int,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    kv_len: int,
    platform: str,
    interpret: Any = False,
) -> jax.Array:
    """Return sparse attention plus linear attention.

    q [L, at least N * D], times `query_scale`; k, v [L, at least N * D] -> [L, N * D], in the dtype of q. Tokens from
    `kv_len` on don't count. first_heads are those of q, k and v from which on they count. interpret: the kernels, on
    any platform, as pallas_call's.
    """
    kernels, width = platform == "tpu" or bool(interpret), len(how.bias)
    own_q, own_k, own_v = (x[:, n * width : (n + heads) * width] for x, n in zip((q, k, v), first_heads, strict=True))
    lists = chosen_blocks(own_q, own_k, how.kept, heads=heads, kv_len=kv_len, kernels=kernels, interpret=interpret)
    if not kernels:
        scale = 1 / query_scale(width)
        out = sparse_attention_reference(
            own_q[None], own_k[None], own_v[None], lists, heads=heads, scale=math.log(2), kv_len=kv_len
        )[0]
        more = how.weight, how.bias
        return add_linear_reference(out, own_q, own_k, own_v, *more, heads=heads, scale=scale, kv_len=kv_len)
    given: dict[str, Any] = {"heads": heads, "first_heads": first_heads, "kv_len": kv_len, "interpret": interpret}
    out = sparse_attention(q[None], k[None], v[None], lists, width=width, scale=math.log(2), **given)[0]
    return add_linear(out, q, k, v, how.weight, how.bias, scale=1 / query_scale(width), **given)


def chosen_blocks(
    q: jax.Array, k: jax.Array, kept: float, *, heads: int, kv_len: int, kernels: bool, interpret: Any = False
) -> jax.Array:
    """Return the blocks of keys of each block of queries, as `sparse_attention` takes them, [1, N, Lq / 128, n].

    n is the whole part of `kept` of all blocks that hold a key that counts, one at least. q may be scaled by any number
    above zero.
    """
    blocks = -(-kv_len // KEYS)
    count = min(blocks, max(1, int(kept * blocks)))
    queries, keys = (_means(x, size, kv_len, heads) for x, size in ((q, QUERIES), (k, KEYS)))
    scores = jnp.einsum("knd,qnd->nkq", keys[:blocks], queries, precision="highest")
    return (top_lists(scores, count, interpret=interpret) if kernels else top_lists_reference(scores, count))[None]


def _means(x: jax.Array, size: int, real: int, heads: int) -> jax.Array:
    """Return the mean of each `size` rows of x [L, N * D], of those before `real`: [ceil(L / size), N, D], float32."""
    blocks = -(-len(x) // size)
    counted = jnp.clip(real - jnp.arange(blocks) * size, 1, size)
    x = jnp.where((jnp.arange(len(x)) < real)[:, None], x, jnp.zeros_like(x)) if real < len(x) else x
    x = jnp.pad(x, ((0, blocks * size - len(x)), (0, 0))).reshape(blocks, size, -1)
    return (x.sum(axis=1, dtype=jnp.float32) / counted[:, None]).reshape(blocks, heads, -1)
