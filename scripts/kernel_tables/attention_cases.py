"""Attention kernels as `wan_tpu.pricing.bundles` compiles them: ours, jax's and tokamax's, one head of a long sequence.

Each function returns a function and its arguments. Imported in a compiler's child process: jax and kernels only.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from wan_tpu_kernels.blocks import BlockSizes, Schedule
from wan_tpu_kernels.flash_kernel import AttentionTile
from wan_tpu_kernels.flash_tiles import flash_tiles
from wan_tpu_kernels.sparse_kernel import PAIRS, QUERIES, STEP, TOGETHER, SparseTile, sparse_tiles

Case = tuple[Callable[..., Any], tuple[Any, ...]]
D = 128
STEPS = 2  # blocks of queries and of keys: enough for every region of a kernel


def ours(
    block_q: int,
    block_kv: int,
    schedule: dict[str, Any],
    softmax: str,
    vmem_limit: int | None,
    qk: str | None = None,
    shared: int = 1,
    counted: bool = False,
) -> Case:
    """Return flash_tiles at one block size and schedule (a dict of Schedule's fields).

    shared: heads in 128 lanes; counted: whether the number of keys is known only when the kernel runs
    """
    unrolled = Schedule(**schedule)
    tile = AttentionTile(
        BlockSizes(block_q, block_kv, unrolled, unrolled, vmem_limit),
        softmax,
        STEPS * block_kv,
        1.0,
        D // shared,
        shared,
        counted,
    )
    terms = 2 if qk == "float8_e4m3fn" else 1  # as flash_attention gives them
    shapes = (
        [jax.ShapeDtypeStruct((1, STEPS * block_q, D), jnp.dtype(qk or "bfloat16"))] * terms,
        jax.ShapeDtypeStruct((1, STEPS * block_kv, D), jnp.dtype(qk or "bfloat16")),
        jax.ShapeDtypeStruct((1, STEPS * block_kv, D), jnp.bfloat16),
    )
    if counted:
        count = jax.ShapeDtypeStruct((1,), jnp.int32)
        return lambda q, k, v, n: flash_tiles(q, k, v, None, tile, shared, False, count=n), (*shapes, count)
    if qk is None:
        return lambda q, k, v: flash_tiles(q, k, v, None, tile, shared, False), shapes
    rows_of = jax.ShapeDtypeStruct((1, shared, STEPS * block_q), jnp.int32 if qk == "int8" else jnp.float32)
    return lambda q, k, v, rows_of: flash_tiles(q, k, v, rows_of, tile, shared, False), (*shapes, rows_of)


def splash(block_q: int, block_kv: int, chunk: int) -> Case:
    """Return jax's splash attention without a mask."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    q, k = _head(STEPS * block_q), _head(STEPS * block_kv)
    sizes = library.BlockSizes(block_q=block_q, block_kv=block_kv, block_kv_compute=chunk)
    mask = masks.MultiHeadMask([masks.FullMask((STEPS * block_q, STEPS * block_kv))])
    return library.make_splash_mha_single_device(mask, block_sizes=sizes), (q, k, k)


def tokamax(block_q: int, block_kv: int, chunk: int) -> Case:
    """Return tokamax's splash attention without a mask."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as library
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    q, k = _head(STEPS * block_q), _head(STEPS * block_kv)
    config = library.SplashConfig(block_q=block_q, block_kv=block_kv, block_kv_compute=chunk)
    mask = masks.FullMask((STEPS * block_q, STEPS * block_kv))
    return library.make_splash_mha_single_device(mask, config=config), (q, k, k)


def _head(length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length, D), jnp.bfloat16)


def sparse(tokens: int, blocks: int) -> Case:
    """Return sparse self-attention of `tokens`, in whole grid steps, with lists of that many blocks of keys."""
    x = jax.ShapeDtypeStruct((1, tokens, D), jnp.bfloat16)
    padded = -(-blocks // TOGETHER) * TOGETHER
    lists = jax.ShapeDtypeStruct((tokens // STEP, PAIRS, STEP // QUERIES // PAIRS * padded), jnp.int32)
    kv_len = jax.ShapeDtypeStruct((1,), jnp.int32)
    tile = SparseTile(width=D, shared=1, count=blocks, least=blocks, multiplier=1.0)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, lists: jax.Array, kv_len: jax.Array) -> list[jax.Array]:
        return sparse_tiles(q, k, v, lists, kv_len, tile, 1, (0, 0, 0), False)

    return run, (x, x, x, lists, kv_len)
