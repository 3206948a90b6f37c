"""The positions of the largest of many scores, as sorted lists: the blocks that block-sparse attention attends to.

A sort would move all scores many times. Here a binary search over the bits of the n-th largest score counts how many
are at least as large, and another finds the position up to which scores equal to it are taken. A running sum numbers
the chosen scores, and entry j of a list is the number of positions whose running sum is at most j.

Columns are the 128 lanes, so each of these steps is done for 128 lists at once.

Letters: N lists of lists, Q lists, K scores for each.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.flash_kernel import SUBLANES, dot

Ref = Any  # A Pallas reference to VMEM.


def top_lists(scores: jax.Array, most: int, count: jax.Array | None = None, *, interpret: Any = False) -> jax.Array:
    """Return the positions of the largest scores of each column, in rising order.

    Of equal scores the first ones are taken; NaN is as large as inf.

    Args:
        scores: [N, K, Q] float32.
        most: The length of a list, from 1 to K.
        count: int32 scalar, how many positions a list has, from 1 to `most`; `most` if None. Its other entries are K.
        interpret: As for `pallas_call`.

    Returns:
        [N, Q, most] int32.

    Raises:
        ValueError: The length is out of range.
    """
    lists, rows, columns = scores.shape
    if not 1 <= most <= rows:
        raise ValueError(f"lists must be from 1 to {rows} long, the scores of a column, got {most}")
    # The rows added as padding lose against all others, even equal ones, because those come first.
    scores = jnp.pad(scores, ((0, 0), (0, -rows % LANES), (0, 0)), constant_values=-jnp.inf)
    padded, length = scores.shape[1], -(-most // LANES) * LANES
    positions = pl.pallas_call(
        functools.partial(_kernel, most=most, none=rows),
        grid=(lists, -(-columns // LANES)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((None, padded, LANES), lambda i, j: (i, 0, j)),
        ],
        out_specs=pl.BlockSpec((None, LANES, length), lambda i, j: (i, j, 0)),
        scratch_shapes=[pltpu.VMEM((padded, LANES), jnp.float32), pltpu.VMEM((length, LANES), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((lists, columns, length), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="top_lists",
    )(jnp.asarray(most if count is None else count, jnp.int32).reshape(1), scores)
    return positions[:, :, :most]


def top_lists_reference(scores: jax.Array, most: int, count: jax.Array | None = None) -> jax.Array:
    """Compute the same as `top_lists`, by sorting."""
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    order = jnp.argsort(-scores, axis=1, stable=True)[:, :most]
    taken = jnp.arange(most)[:, None] < (most if count is None else count)
    return jnp.sort(jnp.where(taken, order, scores.shape[1]), axis=1).swapaxes(1, 2).astype(jnp.int32)


def _kernel(
    count_ref: Ref, scores_ref: Ref, out_ref: Ref, sums_ref: Ref, lists_ref: Ref, *, most: int, none: int
) -> None:
    """Run one grid step (i, j): 128 lists."""
    count, scores = count_ref[0].astype(jnp.float32), scores_ref[...]
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(scores), jnp.inf, scores), jnp.int32)
    key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # Integers in the order of the scores.
    position = lax.broadcasted_iota(jnp.int32, key.shape, 0)
    row = (1, key.shape[1])

    def count_true(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask.astype(jnp.float32), axis=0, keepdims=True)

    def raise_threshold(i: jax.Array, threshold: jax.Array) -> jax.Array:
        # The search starts from the smallest number; its first bit flips the sign.
        candidate = threshold + jnp.left_shift(1, 31 - i)
        return jnp.where(count_true(key >= candidate) >= count, candidate, threshold)

    smallest = lax.fori_loop(0, 32, raise_threshold, jnp.full(row, jnp.iinfo(jnp.int32).min))
    above, equal = key > smallest, key == smallest
    missing = count - count_true(above)
    position_bits = key.shape[0].bit_length()

    def raise_end(i: jax.Array, end: jax.Array) -> jax.Array:
        candidate = end + jnp.left_shift(1, position_bits - 1 - i)
        return jnp.where(count_true(equal & (position < candidate)) < missing, candidate, end)

    # The last position before which there are too few: the missing one is at this position.
    end = lax.fori_loop(0, position_bits, raise_end, jnp.zeros(row, jnp.int32))
    sums_ref[...] = (above | (equal & (position <= end))).astype(jnp.float32)
    _cumulate(sums_ref)

    lists_ref[...] = jnp.zeros_like(lists_ref)

    def write_entries(i: jax.Array, _: None) -> None:
        start = pl.multiple_of(i * SUBLANES, SUBLANES)
        entry = start.astype(jnp.float32)
        sums = sums_ref[...]
        rows = [count_true(sums <= entry + j) for j in range(SUBLANES)]
        lists_ref[pl.ds(start, SUBLANES), :] = jnp.concatenate(rows, axis=0)

    lax.fori_loop(0, -(-most // SUBLANES), write_entries, None)
    out_ref[...] = jnp.minimum(lists_ref[...].T.astype(jnp.int32), none)


def _cumulate(ref: Ref) -> None:
    """Replace [K, 128] by its running sums over K, 128 rows at a time: products with a lower triangle of ones."""
    shape = (LANES, LANES)
    ones = (lax.broadcasted_iota(jnp.int32, shape, 0) >= lax.broadcasted_iota(jnp.int32, shape, 1)).astype(jnp.bfloat16)

    def body(i: jax.Array, before: jax.Array) -> jax.Array:
        rows = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        sums = dot(ones, ref[rows, :].astype(jnp.bfloat16), contract=(1, 0)) + before
        ref[rows, :] = sums
        return sums[LANES - 1 :, :]

    lax.fori_loop(0, ref.shape[0] // LANES, body, jnp.zeros((1, LANES), jnp.float32))
