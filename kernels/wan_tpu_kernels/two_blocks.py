"""Softmax attention of two blocks of 128 queries at once, though each attends to blocks of 64 keys of its own.

All of K and V of one head lies in VMEM, so that a block of keys is an address and not a transfer: 39 MB for the 75,776
tokens of a video.

A matrix unit of 256 x 256 is too large for 128 queries of 128 channels. So two blocks of queries, A and B, are computed
at once. Q_A and Q_B are the diagonal blocks of one matrix [2 D, 256], and 256 keys of A lie beside 256 keys of B in
[256, 2 D]: the product is S^T of both, side by side. Half of the factors are zero, as in dense attention, where heads
of 128 channels fill half of the unit.

Letter: D columns of a tile.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import MIB
from wan_tpu_kernels.flash_kernel import HEADROOM, SUBLANES, Ref, dot

QUERIES, KEYS = 128, 64  # Rows of a block of queries, and of a block of keys.
BOTH = 2 * QUERIES  # Queries that are computed at once.
TOGETHER = 4  # Blocks of keys in a chunk, which is computed at once: 256 keys, the depth of the matrix unit.
AHEAD = 3  # How many chunks ahead of their weights logits are computed.


class NoRoom(ValueError):
    """K and V of a head don't fit the chip's VMEM; no other choice of tiles would help."""


def plan_vmem(rows: int, width: int, dtype: Any, beside: int, usual: int = 0) -> tuple[int, int]:
    """Return how many copies of a head's K and V a kernel keeps in VMEM, one or two, and the bytes it asks for.

    Args:
        rows: Rows of K and of V.
        width: Their columns.
        dtype: Their type.
        beside: Bytes that the kernel needs for all else.
        usual: Bytes that it asks for instead where there is room.

    Raises:
        NoRoom: There is no room for one copy.
    """
    try:
        room = int(pltpu.get_tpu_info().vmem_capacity_bytes) - beside
    except ValueError:  # There is no TPU; small ones have so much.
        room = 64 * MIB - beside
    needed = 2 * rows * width * jnp.dtype(dtype).itemsize
    if needed > room:
        raise NoRoom(
            f"K and V of {rows} rows are {needed / MIB:.0f} MiB, and this chip's VMEM has room for {room / MIB:.0f}: "
            f"at most {room * rows // needed} rows"
        )
    copies = 2 if 2 * needed + max(0, usual - beside) <= room else 1
    return copies, min(copies * needed + max(beside, usual), room + beside)


def list_scratch(pairs: int, width: int, dtype: Any) -> list[Any]:
    """Return the scratch shapes of the references of `pairs` `TwoBlocks`."""
    return [
        pltpu.VMEM((pairs, BOTH, 2 * width), dtype),
        pltpu.VMEM((pairs, width, BOTH), jnp.float32),
        pltpu.VMEM((pairs, SUBLANES, BOTH), jnp.float32),
        pltpu.VMEM((pairs, SUBLANES, BOTH), jnp.float32),
    ]


@dataclasses.dataclass(frozen=True)
class TwoBlocks:
    """Two blocks of queries, A and B, and their accumulators; columns are those of A, then those of B.

    Attributes:
        online: Whether softmax is "online".
        q2_ref: [256, 2 D], Q_A and Q_B as diagonal blocks.
        acc_ref: [D, 256] float32, O^T.
        sum_ref: [8, 256], the weights' sums, as 8 rows yet to be added up.
        shift_ref: [8, 256], the shift, the same row 8 times.
    """

    online: bool
    q2_ref: Ref
    acc_ref: Ref
    sum_ref: Ref
    shift_ref: Ref

    def start(self, q: jax.Array) -> None:
        """Store the queries [256, D], and clear the accumulators."""
        zeros = jnp.zeros((QUERIES, q.shape[1]), q.dtype)
        self.q2_ref[:QUERIES, :] = jnp.concatenate([q[:QUERIES], zeros], axis=1)
        self.q2_ref[QUERIES:, :] = jnp.concatenate([zeros, q[QUERIES:]], axis=1)
        self.acc_ref[...] = jnp.zeros_like(self.acc_ref)
        self.sum_ref[...] = jnp.zeros_like(self.sum_ref)

    def result(self) -> jax.Array:
        """Return O^T [D, 256], after the last key."""
        return self.acc_ref[...] / jnp.sum(self.sum_ref[...], axis=0, keepdims=True)

    def check(self) -> jax.Array:
        """Return [1, 256], NaN where a row isn't finite: 0 * x is NaN exactly there."""
        return jnp.sum(self.acc_ref[...] * 0.0, axis=0, keepdims=True) + jnp.sum(
            self.sum_ref[...] * 0.0, axis=0, keepdims=True
        )

    def logits(self, keys: Sequence[jax.Array]) -> jax.Array:
        """Return S^T [256, 256] float32, given 256 rows of K for A and for B, [256, D] each."""
        return dot(jnp.concatenate(keys, axis=1), self.q2_ref[...], contract=(1, 1))

    def move_shift(self, largest: jax.Array, first: bool) -> None:
        """Shift by the largest logits [1, 256] of the first chunk, and if "online" of each chunk."""
        shift = largest + (0.0 if self.online else HEADROOM)
        if not first:
            before = self.shift_ref[:1, :]
            shift = jnp.maximum(before, shift)
            smaller = jnp.exp2(before - shift)
            self.acc_ref[...] *= smaller
            self.sum_ref[...] *= smaller
        self.shift_ref[...] = jnp.broadcast_to(shift, self.shift_ref.shape)

    def add(self, block: int, weights: jax.Array, v: jax.Array) -> None:
        """Add 256 rows of V [256, D] to the result of A (0) or B (1), with weights [256, 128]."""
        self.acc_ref[:, columns_of(block)] += dot(v.T, weights.astype(v.dtype), contract=(1, 0))


def columns_of(block: int) -> slice:
    """Return the columns of A (0) or B (1)."""
    return slice(block * QUERIES, (block + 1) * QUERIES)


def gather_rows(ref: Ref, starts: Sequence[Any]) -> jax.Array:
    """Return the blocks of 64 rows of K or V that begin at these multiples of 64, below each other."""
    return jnp.concatenate([ref[pl.ds(pl.multiple_of(start, KEYS), KEYS), :] for start in starts], axis=0)
