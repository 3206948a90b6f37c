"""Collectives that XLA overlaps with other work, to be called inside `jax.shard_map`."""

import math

import jax
import jax.numpy as jnp

from wan_tpu.switches import is_synchronous

# Bytes of a column in a register tile (16 rows of bfloat16). Whole tiles need no change of layout.
TILE_BYTES = 32


def gather_rows(x: jax.Array, axes: tuple[str, ...], platform: str) -> jax.Array:
    """Return the rows of all devices along `axes`, [n*L, C], from each device's [L, C].

    On TPU v6e an all-gather blocks the core (up to libtpu 0.0.51; only its SparseCore could take it over), while a
    ragged all-to-all is sent in the background: every device sends all its rows to every other, straight to their
    destination. On other platforms, for rows that don't fill tiles, and where nothing is to be overlapped, an
    all-gather is used.
    """
    count = math.prod(jax.lax.axis_size(axis) for axis in axes)
    if count == 1:
        return x
    rows = TILE_BYTES // x.dtype.itemsize
    if platform != "tpu" or x.shape[0] % rows or is_synchronous():
        return jax.lax.all_gather(x, axes, axis=0, tiled=True)
    blocks = x.reshape(-1, rows, x.shape[1])
    size = blocks.shape[0]
    sizes = jnp.full(count, size, jnp.int32)
    place = jnp.full(count, jax.lax.axis_index(axes) * size, jnp.int32)
    room = jax.lax.empty((count * size, *blocks.shape[1:]), x.dtype)
    start = jnp.zeros(count, jnp.int32)
    whole = jax.lax.ragged_all_to_all(blocks, room, start, sizes, place, sizes, axis_name=axes)
    return whole.reshape(-1, x.shape[1])
