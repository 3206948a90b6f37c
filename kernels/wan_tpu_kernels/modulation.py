"""Per-channel vectors that differ between segments of a sequence's rows.

Wan 2.2 TI2V 5B gives the tokens of the first image the timestep 0 and all others the current timestep; MiniMax-H3 has
modulations of its own for video, keyframes, sound and text. This needs only a few vectors, not one for every token.

Choosing between vectors row by row would take the vector unit one select per segment and register. Nearly all registers
have rows of one segment only, so a kernel loads what the eight rows of a register need from a few patterns instead: one
for each segment and one for each end of a segment.

Shapes: L rows (tokens), C channels, M modulations.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

PATTERN = 8  # Rows of a pattern: those of a float32 register.


def modulation_row(values: jax.Array, start: jax.Array | int, rows: int, first_rows: jax.Array | int) -> jax.Array:
    """Return the modulation of `rows` rows from `start` on: [1, C], or [rows, C] when `values` has several rows.

    Args:
        values: [M, C], one row for each segment.
        start: Index of the first row.
        rows: Number of rows.
        first_rows: The ends (exclusive) of the first M - 1 segments of rows, in order: [M - 1], or a number for two
            segments. It is ignored for a single modulation.
    """
    index = start + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return _choose(values, _count_ends(_segment_ends(values, first_rows), index))


def row_patterns(values: jax.Array, first_rows: jax.Array | int) -> jax.Array:
    """Return the patterns of eight rows that occur: [1, C] for a single modulation, otherwise [8 (2M - 1), C].

    Args:
        values: [M, C].
        first_rows: As for `modulation_row`.
    """
    if len(values) == 1:
        return values.astype(jnp.float32)
    ends, count = _segment_ends(values, first_rows), len(values)
    row = jax.lax.broadcasted_iota(jnp.int32, (PATTERN * (2 * count - 1), 1), 0)
    pattern, within = row // PATTERN, row % PATTERN
    start = sum(jnp.where(pattern == count + n, ends[n] // PATTERN * PATTERN, 0) for n in range(count - 1))
    return _choose(values, jnp.where(pattern < count, pattern, _count_ends(ends, start + within)))


def number_patterns(values: jax.Array, first_rows: jax.Array | int, rows: int) -> jax.Array:
    """Return where in `row_patterns` the pattern of each eight rows begins, int32 [ceil(rows / 8)].

    Args:
        values: [M, C].
        first_rows: As for `modulation_row`.
        rows: Number of rows.
    """
    if len(values) == 1:
        return jnp.zeros(1, jnp.int32)
    ends = _segment_ends(values, first_rows)
    first = jnp.arange(0, rows, PATTERN, dtype=jnp.int32)
    segment, last = _count_ends(ends, first), _count_ends(ends, first + PATTERN - 1)
    return PATTERN * jnp.where(segment == last, segment, len(values) + segment)


def read_modulation(
    patterns_ref: Any, numbers_ref: Any, start: Any, rows: int, columns: Any = slice(None)
) -> jax.Array:
    """Return in a kernel what `modulation_row` returns for some columns.

    Args:
        patterns_ref: What `row_patterns` returns.
        numbers_ref: What `number_patterns` returns, in SMEM.
        start: Index of the first row, a multiple of eight.
        rows: Number of rows.
        columns: An index of columns.
    """
    if patterns_ref.shape[0] == 1:
        return patterns_ref[:, columns]
    eights = [
        patterns_ref[pl.ds(pl.multiple_of(numbers_ref[start // PATTERN + index], PATTERN), PATTERN), columns]
        for index in range(pl.cdiv(rows, PATTERN))
    ]
    return jnp.concatenate(eights)[:rows]


def _choose(values: jax.Array, segment: jax.Array) -> jax.Array:
    """Return the modulations [L, C] of rows by their segments [L, 1]; [1, C] if there is only one modulation."""
    values = values.astype(jnp.float32)
    rows = values[:1]
    for number in range(1, len(values)):
        rows = jnp.where(segment == number, values[number : number + 1], rows)
    return rows


def _count_ends(ends: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the number of segments that end before each row. XLA makes one loop of it, which a sum would not be."""
    return sum(((ends[end] <= rows).astype(jnp.int32) for end in range(len(ends))), jnp.zeros_like(rows))


def _segment_ends(values: jax.Array, first_rows: jax.Array | int) -> jax.Array:
    """Return the ends of all segments but the last, int32 [M - 1]."""
    ends = jnp.asarray(first_rows, jnp.int32).reshape(-1)
    assert len(values) in (1, len(ends) + 1), f"{len(values)} modulations for {len(ends) + 1} segments"
    return ends[: len(values) - 1]
