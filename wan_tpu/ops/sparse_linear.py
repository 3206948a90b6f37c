"""Sparse-linear attention (SLA, arXiv 2509.24006) of some heads on one device: few keys exactly, all keys linearly.

Some checkpoints are trained without the linear part, such as LightX2V's adapters for MiniMax-H3.

A block of 128 queries attends to the blocks of 64 keys whose mean key has the largest product with the mean query. (The
paper first subtracts the mean of all keys, which changes all of a query's products by the same amount and so chooses
the same blocks.) Linear attention over all keys, through a trained matrix, makes up for what softmax attention misses.

Shapes: L tokens, N heads, D head width; token-major, [L, N * D].
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.local_heads import LocalHeads
from wan_tpu.switches import uses_kernel
from wan_tpu_kernels.attempt import Attempt
from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.sla.block_means import block_means, block_means_reference
from wan_tpu_kernels.sla.linear_attention import add_linear, add_linear_reference
from wan_tpu_kernels.sla.top_lists import top_lists, top_lists_reference
from wan_tpu_kernels.sparse_attention import first_tiles, sparse_attention_reference, try_sparse_attention
from wan_tpu_kernels.two_blocks import KEYS, QUERIES

QUERY_BLOCK = QUERIES  # Tokens that attend to the same blocks of keys.


@jax.tree_util.register_static
@dataclass(frozen=True)
class Density:
    """The share of the blocks of keys that are kept, as a static argument of a program."""

    value: float


@dataclass(frozen=True)
class SparseLinear:
    """The settings and weights of a layer's sparse-linear attention.

    Attributes:
        density: The share of the blocks of keys that are kept.
        weight, bias: [D, D] and [D], those of the linear part; None if there is none.
        shortest: The least number of real keys, where that number is an argument of the program.
    """

    density: float
    weight: jax.Array | None = None
    bias: jax.Array | None = None
    shortest: int = 1
    kernel: ClassVar = "sparse_attention"

    def count(self, blocks: int) -> int:
        """Return how many of a number of blocks that hold real keys are kept."""
        return max(1, min(blocks, int(self.density * blocks)))


def sparse_linear_attention(local: LocalHeads, layer: SparseLinear) -> Attempt[jax.Array]:
    """Try sparse attention, plus linear attention if the layer has its weights.

    Args:
        local: Which heads of which rows; with a linear part, `kv_len` is a Python number.
        layer: How the layer attends.

    Returns:
        [Lq, N * D], in the dtype of q.
    """
    heads, width, kv_len, interpret = local.heads, local.width, local.kv_len, local.interpret
    kernels = uses_kernel(layer.kernel, local.platform) or bool(interpret)
    if kernels:
        first_tiles(local.first_heads, heads, width)  # This raises for heads that the kernels don't support.
    first_q, first_k, _ = local.first_heads
    sizes: dict[str, Any] = {"heads": heads, "kv_len": kv_len}
    choice: dict[str, Any] = {"first_heads": (first_q, first_k), "kernels": kernels, "interpret": interpret}
    lists = choose_blocks(local.q, local.k, layer, width=width, first_query=local.first_query, **sizes, **choice)
    linear: dict[str, Any] = {"weight": layer.weight, "bias": layer.bias, "scale": 1 / query_scale(width)}
    if kernels:
        options = sizes | {"first_heads": local.first_heads, "interpret": interpret}
        least = None if isinstance(kv_len, int) else layer.count(-(-layer.shortest // KEYS))
        whole: dict[str, Any] = {"width": width, "scale": math.log(2), "least": least}
        q, k, v = local.q, local.k, local.v
        attempt = try_sparse_attention(q[None], k[None], v[None], lists, **whole, **options).then(lambda out: out[0])
        if layer.weight is None:
            return attempt
        return attempt.then(lambda out: add_linear(out, q, k, v, **linear, **options))

    def attend() -> jax.Array:
        q, k, v = local.select_all()
        out = sparse_attention_reference(q[None], k[None], v[None], lists, scale=math.log(2), **sizes)[0]
        return out if layer.weight is None else add_linear_reference(out, q, k, v, **linear, **sizes)

    return Attempt(attend(), jnp.asarray(True), attend)


def choose_blocks(
    q: jax.Array,
    k: jax.Array,
    layer: SparseLinear,
    *,
    heads: int,
    width: int,
    first_heads: tuple[int, int] = (0, 0),
    kv_len: int | jax.Array,
    first_query: int | jax.Array = 0,
    kernels: bool,
    interpret: Any = False,
) -> jax.Array:
    """Return the blocks of keys of each block of queries, as `sparse_attention` takes them, [1, N, Lq / 128, n].

    n is `layer.density` times the number of blocks that hold a real key, rounded down, and at least one. If `kv_len` is
    an array, lists are as long as for all keys of k, and entries behind the n-th stand for no block. q may be scaled by
    any positive number; arguments are those of `LocalHeads`.
    """
    blocks = -(-(kv_len if isinstance(kv_len, int) else len(k)) // KEYS)
    shared = max(1, LANES // width) if kernels else 1
    means = functools.partial(block_means, interpret=interpret) if kernels else block_means_reference
    sizes: dict[str, Any] = {"tiles": heads // shared, "lanes": width * shared}
    first_q, first_k = (first // shared for first in first_heads)
    queries = means(q, QUERIES, real=jnp.clip(kv_len - first_query, 0, len(q)), first=first_q, **sizes)
    keys = means(k, KEYS, real=kv_len, first=first_k, **sizes)
    queries, keys = (x.reshape(*x.shape[:2], shared, width) for x in (queries, keys))
    scores = jnp.einsum("tksd,tqsd->tskq", keys[:, :blocks], queries, precision="highest")
    scores = scores.reshape(heads, *scores.shape[2:])
    count = None
    if not isinstance(kv_len, int):
        real = -(-kv_len // KEYS)
        scores = jnp.where(jnp.arange(blocks)[:, None] < real, scores, -jnp.inf)
        # Numbers rounded down as Python does it, in float64.
        count = jnp.array([layer.count(number + 1) for number in range(blocks)], jnp.int32)[real - 1]
    choose = functools.partial(top_lists, interpret=interpret) if kernels else top_lists_reference
    return choose(scores, layer.count(blocks), count)[None]
