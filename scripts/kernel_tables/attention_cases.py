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
from wan_tpu_kernels.sparse_kernel import PAIRS, STEP, SparseTile, sparse_tiles
from wan_tpu_kernels.two_blocks import QUERIES, TOGETHER
from wan_tpu_kernels.vsa.tile_attention import PAIR, ROWS, Part, tile_attention

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
    pv: str | None = None,
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
        jax.ShapeDtypeStruct((1, STEPS * block_kv, D), jnp.dtype(pv or "bfloat16")),
    )
    rows_type = jnp.int32 if qk == "int8" else jnp.float32
    more = (
        None if qk is None else jax.ShapeDtypeStruct((1, shared, STEPS * block_q), rows_type),
        None if pv is None else jax.ShapeDtypeStruct((1, 2, D), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32) if counted else None,
    )

    def run(q: Any, k: jax.Array, v: jax.Array, rows_of: Any, values_of: Any, count: Any) -> list[jax.Array]:
        options = {"count": count, "values_of": values_of, "dtype": jnp.bfloat16}
        return flash_tiles(q, k, v, rows_of, tile, shared, False, **options)

    return run, (*shapes, *more)


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


def tiles(tokens: int, entries: int) -> Case:
    """Return attention of tiles of 64 of `tokens`, in whole grid steps, two of which have that many in their list."""
    x = jax.ShapeDtypeStruct((tokens, D), jnp.bfloat16)
    lists, lengths, sizes = (
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((1, tokens // PAIR, entries), (1, tokens // PAIR), (tokens // ROWS,))
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        queries, keys, values = ([Part(part, tokens)] for part in (q, k, v))
        return tile_attention(queries, keys, values, *rest, heads=1, width=D)

    return run, (x, x, x, lists, lengths, sizes)
