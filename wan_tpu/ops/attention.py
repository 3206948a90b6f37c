"""Attention behind one function: the platform picks the implementation, shapes and mesh pick the exchange.

Arrays are token-major, [L, N*D]: as projections leave them, and as the TPU kernel reads them without a transpose.
Shapes: L tokens, N heads, D head width, t tokens of one device, G head groups.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kernels.flash_attention import flash_attention

# Query rows whose scores are formed at once on CPU: with 2,000 keys 256 rows of float32 scores are 2 MB, which
# stays in the cache of one core. Measured: 55 ms against 125 ms in one piece (2x4 heads, 2,000 tokens, D=128).
CPU_QUERY_BLOCK = 256


def query_scale(head_width: int) -> float:
    """Return what queries are multiplied with while still float32, so that attention is softmax to the base of two."""
    return head_width**-0.5 * math.log2(math.e)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, heads: int, platform: str, kv_len: int | None = None
) -> jax.Array:
    """Return full attention, sum_j 2^(q.k_j) v_j / sum_j 2^(q.k_j), on one device.

    q [Lq, N*D], times `query_scale`; k, v [Lk, N*D] -> [Lq, N*D], in the dtype of q. Keys from `kv_len` on don't count.
    """
    scale = math.log(2)
    if platform == "tpu":
        return flash_attention(q, k, v, heads=heads, kv_len=kv_len, scale=scale)
    q, k, v = (x.reshape(x.shape[0], heads, -1) for x in (q, k[:kv_len], v[:kv_len]))
    mixed = _gpu(q, k, v, scale) if platform == "gpu" else _blockwise(q, k, v, scale)
    return mixed.reshape(mixed.shape[0], -1)


def head_groups(mesh: Mesh, heads: int) -> int:
    """Return into how many groups heads are split over 'tp' in self-attention: all of 'tp' (see `make_mesh`)."""
    return math.gcd(heads, mesh.shape["tp"])


def exchanged_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, heads: int, kv_len: int, token_axes: tuple[str, ...], platform: str
) -> jax.Array:
    """Attend over tokens that are spread over devices; to be called inside `jax.shard_map`.

    q, k, v     [G, t, N*D/G], q times `query_scale`: this device's tokens, heads in groups, one for each device on 'tp'
                ([t, N*D] where 'tp' has size 1)
    token_axes  mesh axes the tokens lie on, slowest first, 'tp' last
    kv_len      tokens that count, of all devices together
    Returns this device's tokens in the same form.

    All-to-all over 'tp' turns "some tokens of all heads" into "more tokens of some heads"; what other axes hold of
    K and V is gathered (K and V are 1/G of the heads by then). Padding lies behind the last token.
    """
    *others, last = token_axes
    assert last == "tp"
    if q.ndim == 3:
        q, k, v = (_to_tokens(x) for x in (q, k, v))
    if others:
        k, v = (jax.lax.all_gather(x, tuple(others), axis=0, tiled=True) for x in (k, v))
    groups = jax.lax.axis_size("tp")
    mixed = attention(q, k, v, heads=heads // groups, platform=platform, kv_len=kv_len)
    return mixed if groups == 1 else _exchange(mixed.reshape(groups, -1, mixed.shape[1]))


def _exchange(x: jax.Array) -> jax.Array:
    """[G, ...] for each destination -> [G, ...] from each source."""
    return jax.lax.all_to_all(x, "tp", split_axis=0, concat_axis=0, tiled=True)


def _to_tokens(x: jax.Array) -> jax.Array:
    """[G, t, N*D/G] of all groups' heads -> [G*t, N*D/G] of all devices' tokens."""
    return _exchange(x).reshape(-1, x.shape[2])


def _gpu(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    fused = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn" if fused else "xla")


def _blockwise(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """Plain XLA, a block of query rows at a time; rows are padded to whole blocks, keys never are. [L, N, D]."""
    length, heads, width = q.shape
    keys, values = k.transpose(1, 2, 0), v.transpose(1, 0, 2)  # [N, D, Lk], [N, Lk, D]

    def rows(block: jax.Array) -> jax.Array:
        scores = jnp.einsum("nqd,ndk->nqk", block, keys, preferred_element_type=jnp.float32) * scale
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        mixed = jnp.einsum("nqk,nkd->nqd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return (mixed / total).astype(q.dtype)

    queries = q.transpose(1, 0, 2)
    if length <= 2 * CPU_QUERY_BLOCK:
        return rows(queries).transpose(1, 0, 2)
    count = -(-length // CPU_QUERY_BLOCK)
    padded = jnp.pad(queries, ((0, 0), (0, count * CPU_QUERY_BLOCK - length), (0, 0)))
    blocks = padded.reshape(heads, count, CPU_QUERY_BLOCK, width).transpose(1, 0, 2, 3)
    mixed = jax.lax.map(rows, blocks).transpose(1, 0, 2, 3)
    return mixed.reshape(heads, -1, width)[:, :length].transpose(1, 0, 2)
