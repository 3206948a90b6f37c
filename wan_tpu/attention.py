"""Attention behind one function: the platform of the mesh picks the implementation, models never do.

Shapes: B batch, N heads, L tokens, D head width.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

# Query rows whose scores are formed at once on CPU: with 2,000 keys 256 rows of float32 scores are 2 MB, which
# stays in the cache of one core. Measured: 55 ms against 125 ms in one piece (2x4 heads, 2,000 tokens, D=128).
CPU_QUERY_BLOCK = 256

# Queries and keys of one tile of the TPU kernel. The first was compiled for v6e at 75,600 tokens and fits its VMEM
# (32 MiB for a kernel); v5p has half of that.
V6E_TILE, OTHER_TILE = (3328, 2816), (1024, 1024)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mesh: Mesh) -> jax.Array:
    """Full softmax attention with scale 1/sqrt(D).

    q [B, Lq, N, D]; k, v [B, Lk, N, D] -> [B, Lq, N, D], in the dtype of q. B is sharded over 'dp', N over
    'tp', Lq over 'sp'; K and V are gathered over 'sp'.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "tpu":
        return _tpu(q, k, v, mesh)
    if platform == "gpu":
        return _gpu(q, k, v)
    return _blockwise(q, k, v)


def _gpu(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    fused = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn" if fused else "xla")


def _blockwise(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Plain XLA, a block of query rows at a time; rows are padded to whole blocks, keys never are."""
    batch, length, heads, width = q.shape
    scale = width**-0.5
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)  # [B, N, D, Lk], [B, N, Lk, D]

    def rows(block: jax.Array) -> jax.Array:
        scores = jnp.einsum("bnqd,bndk->bnqk", block, keys, preferred_element_type=jnp.float32) * scale
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        mixed = jnp.einsum("bnqk,bnkd->bnqd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return (mixed / total).astype(q.dtype)

    queries = q.transpose(0, 2, 1, 3)
    if length <= 2 * CPU_QUERY_BLOCK:
        return rows(queries).transpose(0, 2, 1, 3)
    count = -(-length // CPU_QUERY_BLOCK)
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, count * CPU_QUERY_BLOCK - length), (0, 0)))
    blocks = padded.reshape(batch, heads, count, CPU_QUERY_BLOCK, width).transpose(2, 0, 1, 3, 4)
    mixed = jax.lax.map(rows, blocks).transpose(1, 2, 0, 3, 4)
    return mixed.reshape(batch, heads, -1, width)[:, :, :length].transpose(0, 2, 1, 3)


def _tpu(q: jax.Array, k: jax.Array, v: jax.Array, mesh: Mesh) -> jax.Array:
    """JAX's splash attention, in shard_map: XLA can't partition a Pallas call by itself."""
    tile = V6E_TILE if mesh.devices.flat[0].device_kind == "TPU v6 lite" else OTHER_TILE
    batch = "dp" if q.shape[0] % mesh.shape["dp"] == 0 else None
    rows, keys = P(batch, "tp", "sp", None), P(batch, "tp", None, None)

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return _splash(q * q.shape[-1] ** -0.5, k, v, tile)

    run = jax.shard_map(local, mesh=mesh, in_specs=(rows, keys, keys), out_specs=rows, check_vma=False)
    return run(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, tile: tuple[int, int]) -> jax.Array:
    """q, k, v [B, N, L, D], any L: both lengths are padded to blocks, padded keys masked by segment id."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (_, heads, query_length, _), key_length = q.shape, k.shape[2]
    q, block_q = _pad_to_block(q, tile[0])
    k, block_kv = _pad_to_block(k, tile[1])
    v, _ = _pad_to_block(v, tile[1])
    mask = masks.MultiHeadMask([masks.FullMask((q.shape[2], k.shape[2])) for _ in range(heads)])
    compute = 256 if block_kv % 256 == 0 else 128  # keys at once: more need more VMEM than there is
    kernel = splash.make_splash_mha_single_device(
        mask, block_sizes=splash.BlockSizes(block_q=block_q, block_kv=block_kv, block_kv_compute=compute)
    )
    segments = splash.SegmentIds(
        q=jnp.zeros(q.shape[2], jnp.int32),
        kv=(jnp.arange(k.shape[2]) >= key_length).astype(jnp.int32),
    )
    run = jax.vmap(functools.partial(kernel, segment_ids=segments))
    return run(q, k, v)[:, :, :query_length]


def _pad_to_block(x: jax.Array, largest: int) -> tuple[jax.Array, int]:
    """Pad axis 2 of x to whole blocks of a multiple of 128 rows, at most `largest`; return x and the block."""
    length = x.shape[2]
    block = min(largest, -(-length // 128) * 128)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -length % block), (0, 0))), block
