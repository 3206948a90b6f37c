"""Block-sparse softmax attention for TPU: each block of 128 queries attends to a list of blocks of 64 keys.

The lists are arrays that are passed at run time; their length is compiled in. sparse_kernel.py has the tile program.

Softmax is shifted as in `flash_attention`: "optimistic" shifts by 32 above the largest logit of the first 256 keys, is
checked, and is repeated with "online", the running maximum, where it overflows. (A NaN in K comes out of both blocks of
queries, and of all heads of its tile: 0 * NaN is NaN.)

Letters: B batch, N heads, Lq Lk tokens, D head width.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from wan_tpu_kernels.attempt import Attempt
from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.sparse_kernel import PAIRS, STEP, SparseTile, sparse_tiles
from wan_tpu_kernels.two_blocks import KEYS, QUERIES, TOGETHER


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    *,
    heads: int,
    width: int | None = None,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    scale: float | None = None,
    kv_len: int | jax.Array | None = None,
    least: int | None = None,
    softmax: Literal["auto", "online"] = "auto",
    interpret: Any = False,
) -> jax.Array:
    """Compute softmax(scale Q K^T) V over the listed keys of each block of queries.

    Args:
        q: [B, Lq, N * D], token-major; bfloat16 or float32 (computed in float32). D is a multiple of 128, or divides
            128 if N * D is a multiple of 128.
        k, v: [B, Lk, N * D].
        blocks: [B, N, ceil(Lq / 128), n] int32: which blocks of 64 keys the queries of a block attend to, in rising
            order, each once. Each block must hold a real key, but for entries from `least` on, which stand for no block
            if they are larger. None of this is checked.
        heads: N.
        width: D, if q, k or v hold more heads.
        first_heads: The first head to use of q, k and v; they are read in place.
        scale, kv_len, interpret: As for `flash_attention`.
        least: How many entries of every list stand for a block; all if None.
        softmax: "online" is always right; "auto" is "optimistic", repeated if its check fails. Both are exact.

    Returns:
        [B, Lq, N * D].

    Raises:
        ValueError: Shapes don't fit.
        NoRoom: K and V don't fit the chip's VMEM.
    """
    options = {"heads": heads, "width": width, "first_heads": first_heads, "scale": scale, "kv_len": kv_len}
    attempt = try_sparse_attention(q, k, v, blocks, least=least, interpret=interpret, **options)  # type: ignore[arg-type]
    return attempt.again() if softmax == "online" else attempt.settle()


def try_sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    *,
    heads: int,
    width: int | None = None,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    scale: float | None = None,
    kv_len: int | jax.Array | None = None,
    least: int | None = None,
    interpret: Any = False,
) -> Attempt[jax.Array]:
    """Compute the same as `sparse_attention` by the fast way."""
    batch, rows, channels = q.shape
    width = channels // heads if width is None else width
    first = first_tiles(first_heads, heads, width)
    _check(q, k, v, blocks, heads, width, kv_len)
    steps, count = -(-rows // STEP), blocks.shape[-1]
    tile = SparseTile(
        width=width,
        shared=LANES // width if width < LANES else 1,
        count=count,
        least=count if least is None else least,
        multiplier=(width**-0.5 if scale is None else scale) * math.log2(math.e),
    )
    unused = -(-count // TOGETHER) * TOGETHER - count  # Padding entries, which stand for no block.
    lists = jnp.pad(blocks, ((0, 0), (0, 0), (0, steps * STEP // QUERIES - blocks.shape[2]), (0, unused)))
    lists = lists.reshape(batch * heads * steps, PAIRS, -1)
    most = kv_len if isinstance(kv_len, int) else k.shape[1]
    short = -(-most // KEYS) * KEYS - k.shape[1]
    k, v = (jnp.pad(x, ((0, 0), (0, max(0, short)), (0, 0))) for x in (k, v))
    q = jnp.pad(q, ((0, 0), (0, max(0, STEP - rows)), (0, 0)))
    real = jnp.asarray(most if kv_len is None else kv_len, jnp.int32).reshape(1)

    def run_online() -> jax.Array:
        tile_online = dataclasses.replace(tile, online=True)
        return sparse_tiles(q, k, v, lists, real, tile_online, heads, first, interpret)[0][:, :rows]

    # With one chunk in all, "online" sees the row's maximum at once.
    if tile.chunks == 1:
        return Attempt(run_online(), jnp.asarray(True), run_online)
    out, check = sparse_tiles(q, k, v, lists, real, tile, heads, first, interpret)
    return Attempt(out[:, :rows], jnp.all(jnp.isfinite(check)), run_online)


def sparse_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    *,
    heads: int,
    scale: float | None = None,
    kv_len: int | jax.Array | None = None,
) -> jax.Array:
    """Compute the same as `sparse_attention` in plain jnp, float32, as dense attention with a mask."""
    batch, rows, channels = q.shape
    width, keys = channels // heads, k.shape[1]
    _check(q, k, v, blocks, heads, width, kv_len)
    real = jnp.arange(keys) < (keys if kv_len is None else kv_len)
    k, v = (jnp.where(real[:, None], x, 0) for x in (k, v))  # Other rows may be NaN.
    q4, k4, v4 = (x.astype(jnp.float32).reshape(batch, -1, heads, width) for x in (q, k, v))
    chosen = jnp.any(blocks[..., None] == jnp.arange(-(-keys // KEYS)), axis=-2)  # [B, N, query blocks, key blocks]
    mask = jnp.repeat(jnp.repeat(chosen, QUERIES, axis=2), KEYS, axis=3)[:, :, :rows, :keys] & real
    logits = jnp.einsum("bqnd,bknd->bnqk", q4, k4, precision="highest") * (width**-0.5 if scale is None else scale)
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
    return jnp.einsum("bnqk,bknd->bqnd", weights, v4, precision="highest").reshape(q.shape).astype(v.dtype)


def first_tiles(first_heads: Sequence[int], heads: int, width: int) -> tuple[int, int, int]:
    """Return the tiles of 128 lanes that begin with the first heads of q, k and v.

    Raises:
        ValueError: The heads don't fill tiles, or a first head doesn't begin one.
    """
    shared = LANES // width if width < LANES else 1
    if width % LANES and (LANES % width or heads * width % LANES):
        raise ValueError(f"heads must be a multiple of {LANES} wide, or fill tiles of {LANES} lanes, got {width}")
    if any(first % shared for first in first_heads):
        raise ValueError(f"first heads must begin a tile of {shared} heads, got {[*first_heads]}")
    q, k, v = (first // shared for first in first_heads)
    return q, k, v


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array, heads: int, width: int, kv_len: int | jax.Array | None
) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}, {heads} heads"
    lengths = {x.ndim == 3 and x.shape[:2] for x in (k, v)} | {q.ndim == 3 and (q.shape[0], k.shape[1])}
    if len(lengths) > 1 or any(x.shape[2] % width or x.shape[2] < heads * width for x in (q, k, v)):
        raise ValueError(f"q, k, v must be [B, L, N * D], k and v of one length, got {shapes}")
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"q, k, v must all be bfloat16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}")
    if isinstance(kv_len, int) and not 1 <= kv_len <= k.shape[1]:
        raise ValueError(f"kv_len must be from 1 to {k.shape[1]}, the keys given, got {kv_len}")
    keys = kv_len if isinstance(kv_len, int) else k.shape[1]
    lists, most = (q.shape[0], heads, -(-q.shape[1] // QUERIES)), -(-keys // KEYS)
    if blocks.shape[:-1] != lists or not 1 <= blocks.shape[-1] <= most or blocks.dtype != jnp.int32:
        raise ValueError(f"blocks must be int32 {[*lists, f'1 to {most}']}, got {blocks.dtype} {[*blocks.shape]}")
