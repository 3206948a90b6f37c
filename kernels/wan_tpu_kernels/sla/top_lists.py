"""The positions of the largest of many scores, as sorted lists: the blocks that block-sparse attention attends to.

A sort would move all scores many times. Here a binary search over the bits of the n-th largest score counts how many
are at least as large, and another finds the position up to which scores equal to it are taken. Chosen scores become
bits of words, 32 of a column in each. Entry j of a list is a bit of the last word before which there are at most j
bits, and a binary search finds it in the word.

Columns are the 128 lanes, so each of these steps is done for 128 lists at once. Where two lists become one, a word also
has what its right neighbour has chosen.

Letters: N lists of lists, Q lists, K scores for each, W words.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.flash_kernel import SUBLANES, Ref

BITS = 32  # Scores of a column whose choice is a word.
_BLOCK = BITS * SUBLANES
_ENTRIES = 64  # Entries of a list that are found at once.


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
    return _top_lists(scores, most, most, count, False, interpret)[0]


def pair_lists(
    scores: jax.Array, most: int, count: jax.Array | None = None, *, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Return the positions of the largest scores of each column or of its neighbour, in rising order.

    Args:
        scores: [N, K, Q] float32, Q even.
        most: The most positions of a column, from 1 to K.
        count: int32 scalar, how many positions a column has, from 1 to `most`; `most` if None.
        interpret: As for `pallas_call`.

    Returns:
        [N, Q / 2, at most 2 most] int32: a position times four, plus one if it is of the pair's first column, plus two
        if it is of the second; other entries are zero. And the number of entries, int32 [N, Q / 2].
    """
    room = min(2 * most, scores.shape[1])
    lists, numbers = _top_lists(scores, most, room, count, True, interpret)
    return lists[:, ::2], numbers[:, 0, ::2]


def _top_lists(
    scores: jax.Array, most: int, room: int, count: jax.Array | None, paired: bool, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Return lists of `room` entries [N, Q, room] and their lengths [N, 1, Q]; of pairs if `paired`."""
    lists, rows, columns = scores.shape
    if not 1 <= most <= rows:
        raise ValueError(f"lists must be from 1 to {rows} long, the scores of a column, got {most}")
    # The rows added as padding lose against all others, even equal ones, because those come first.
    scores = jnp.pad(scores, ((0, 0), (0, -rows % _BLOCK), (0, 0)), constant_values=-jnp.inf)
    padded, length = scores.shape[1], -(-room // LANES) * LANES
    words = padded // BITS
    positions, numbers = pl.pallas_call(
        functools.partial(_kernel, room=room, none=rows, paired=paired),
        grid=(lists, -(-columns // LANES)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((None, padded, LANES), lambda i, j: (i, 0, j)),
        ],
        out_specs=[
            pl.BlockSpec((None, LANES, length), lambda i, j: (i, j, 0)),
            pl.BlockSpec((None, 1, LANES), lambda i, j: (i, 0, j)),
        ],
        scratch_shapes=[
            *[pltpu.VMEM((words, LANES), jnp.int32) for _ in range(4)],
            pltpu.VMEM((length, LANES), jnp.int32),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((lists, columns, length), jnp.int32),
            jax.ShapeDtypeStruct((lists, 1, columns), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="top_lists",
    )(jnp.asarray(most if count is None else count, jnp.int32).reshape(1), scores)
    return positions[:, :, :room], numbers


def top_lists_reference(scores: jax.Array, most: int, count: jax.Array | None = None) -> jax.Array:
    """Compute the same as `top_lists`, by sorting."""
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    order = jnp.argsort(-scores, axis=1, stable=True)[:, :most]
    taken = jnp.arange(most)[:, None] < (most if count is None else count)
    return jnp.sort(jnp.where(taken, order, scores.shape[1]), axis=1).swapaxes(1, 2).astype(jnp.int32)


def pair_lists_reference(scores: jax.Array, most: int, count: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Compute the same as `pair_lists`, by sorting."""
    rows, room = scores.shape[1], min(2 * most, scores.shape[1])
    lists = top_lists_reference(scores, most, count)
    chosen = jnp.any(lists[..., None] == jnp.arange(rows), axis=-2)  # [N, Q, K]
    of_pair = chosen[:, ::2] + 2 * chosen[:, 1::2]
    position = jnp.where(of_pair > 0, jnp.arange(rows), rows)
    order = jnp.argsort(position, axis=2, stable=True)[..., :room]
    entries = 4 * order + jnp.take_along_axis(of_pair, order, axis=2)
    return jnp.where(entries % 4 > 0, entries, 0).astype(jnp.int32), jnp.sum(of_pair > 0, axis=2).astype(jnp.int32)


def _kernel(
    count_ref: Ref,
    scores_ref: Ref,
    out_ref: Ref,
    number_ref: Ref,
    own_ref: Ref,
    other_ref: Ref,
    either_ref: Ref,
    before_ref: Ref,
    lists_ref: Ref,
    *,
    room: int,
    none: int,
    paired: bool,
) -> None:
    """Run one grid step (i, j): 128 lists."""
    chosen = _choose(count_ref[0].astype(jnp.float32), scores_ref[...])
    bit = lax.broadcasted_iota(jnp.int32, chosen.shape, 0) % BITS
    # Sums of float32 hold 16 bits.
    low, high = (
        jnp.sum(jnp.where(chosen & part, values, 0.0).reshape(-1, BITS, LANES), axis=1).astype(jnp.int32)
        for part, values in (
            (bit < BITS // 2, jnp.left_shift(1, bit).astype(jnp.float32)),
            (bit >= BITS // 2, jnp.left_shift(1, jnp.maximum(bit - BITS // 2, 0)).astype(jnp.float32)),
        )
    )
    own_ref[...] = low | jnp.left_shift(high, BITS // 2)
    # Of a column's right neighbour; only even columns are read.
    other_ref[...] = pltpu.roll(own_ref[...], LANES - 1, 1) if paired else jnp.zeros_like(own_ref)
    either_ref[...] = own_ref[...] | other_ref[...]
    words = own_ref.shape[0]

    def number_words(i: jax.Array, before: jax.Array) -> jax.Array:
        before_ref[pl.ds(i, 1), :] = before
        return before + lax.population_count(either_ref[pl.ds(i, 1), :])

    number = lax.fori_loop(0, words, number_words, jnp.zeros((1, LANES), jnp.int32))
    number_ref[...] = number
    lists_ref[...] = jnp.zeros_like(lists_ref)

    def write_entries(i: jax.Array, _: None) -> None:
        start = pl.multiple_of(i * _ENTRIES, _ENTRIES)
        entry = start + lax.broadcasted_iota(jnp.int32, (_ENTRIES, LANES), 0)

        def find_word(word: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row = pl.ds(word, 1)
            here = before_ref[row, :] <= entry
            values = word, *(ref[row, :] for ref in (before_ref, own_ref, other_ref))
            return tuple(jnp.where(here, value, old) for value, old in zip(values, found, strict=True))

        zeros = jnp.zeros((_ENTRIES, LANES), jnp.int32)
        word, before, own, other = lax.fori_loop(0, words, find_word, (zeros,) * 4)
        either, missing, bit = own | other, entry - before, zeros
        for step in (16, 8, 4, 2, 1):  # The bit before which as many are set as are missing.
            below = lax.population_count(lax.shift_right_logical(either, bit) & ((1 << step) - 1))
            behind = missing >= below
            bit, missing = (
                jnp.where(behind, bit + step, bit),
                jnp.where(behind, missing - below, missing),
            )
        position = word * BITS + bit
        if paired:
            of = (lax.shift_right_logical(own, bit) & 1) + 2 * (lax.shift_right_logical(other, bit) & 1)
            position = 4 * position + of
        lists_ref[pl.ds(start, _ENTRIES), :] = jnp.where(entry < number, position, 0 if paired else none)

    lax.fori_loop(0, -(-room // _ENTRIES), write_entries, None)
    out_ref[...] = lists_ref[...].T


def _choose(count: jax.Array, scores: jax.Array) -> jax.Array:
    """Return which scores are among the `count` largest of their column, [K, 128]."""
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
    return above | (equal & (position <= end))
