"""Collectives that XLA overlaps with other work, to be called inside `jax.shard_map`."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp

from wan_tpu.switches import is_synchronous

# Bytes of a column in a register tile (16 rows of bfloat16). Whole tiles need no change of layout.
TILE_BYTES = 32

T = TypeVar("T")
R = TypeVar("R")


def gather_rows(
    x: jax.Array, axes: tuple[str, ...], platform: str, *, layer: jax.Array | int | None = None
) -> jax.Array:
    """Return the rows of all devices along `axes`, [n*L, C], from each device's [L, C].

    On a TPU an all-gather blocks the core (libtpu 0.0.51; only a SparseCore could take it over), while a ragged
    all-to-all is sent in the background: every device sends all its rows to every other, straight to their
    destination. An all-gather is used on other platforms, for rows that don't fill tiles, and if nothing is to be
    overlapped.

    Args:
        x: [L, C], or with `layer` the rows of several layers, [D, L, C].
        platform: "tpu", "gpu" or "cpu".
        layer: Which layer's rows are sent. A ragged all-to-all reads them in place; a slice would be a copy.
    """
    count = math.prod(jax.lax.axis_size(axis) for axis in axes)
    length, columns = x.shape[-2:]
    rows = TILE_BYTES // x.dtype.itemsize
    if count == 1 or platform != "tpu" or length % rows or is_synchronous():
        x = x if layer is None else jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
        return x if count == 1 else jax.lax.all_gather(x, axes, axis=0, tiled=True)
    blocks = x.reshape(-1, rows, columns)
    size = length // rows
    sizes = jnp.full(count, size, jnp.int32)
    place = jnp.full(count, jax.lax.axis_index(axes) * size, jnp.int32)
    room = jax.lax.empty((count * size, rows, columns), x.dtype)
    start = jnp.full(count, (0 if layer is None else layer) * size, jnp.int32)
    whole = jax.lax.ragged_all_to_all(blocks, room, start, sizes, place, sizes, axis_name=axes)
    return whole.reshape(-1, columns)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class SplitWeight:
    """One layer's matrix within the array of all layers, of which each device has some rows.

    It is gathered on request. To the compiler, what is sent is the array of all layers, which is available from the
    start, so it would start sending as early as possible, ahead of everything else: `gather_during` determines when.
    """

    stack: jax.Array  # This device's rows of all layers, [D, L, C].
    layer: jax.Array  # Int32 [].
    axes: tuple[str, ...]
    platform: str  # As for `gather_rows`.

    def gather(self, layer: jax.Array) -> jax.Array:
        """Return the whole matrix; `layer` is this one's index, possibly passed through a barrier."""
        return gather_rows(self.stack, self.axes, self.platform, layer=layer)


def gather_during(
    weights: Mapping[str, SplitWeight], inputs: T, compute: Callable[[T], R]
) -> tuple[R, dict[str, jax.Array]]:
    """Return the result computed from the inputs, and matrices that are gathered exactly while it is computed."""
    if not weights:
        return compute(inputs), {}
    layers = {name: weight.layer for name, weight in weights.items()}
    layers, inputs = jax.lax.optimization_barrier((layers, inputs))
    gathered = {name: weight.gather(layers[name]) for name, weight in weights.items()}
    result: tuple[R, dict[str, jax.Array]] = jax.lax.optimization_barrier((compute(inputs), gathered))
    return result
