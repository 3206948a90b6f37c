"""Per-channel vectors that differ between segments of a sequence's rows.

Wan 2.2 TI2V 5B gives the tokens of the first image the timestep 0 and all others the current timestep; MiniMax-H3 has
modulations of their own for video, keyframes, sound and text. That takes a few vectors, not one for every token.
"""

from typing import Any

import jax
import jax.numpy as jnp


def segment_ends(values: jax.Array, first_rows: jax.Array | int) -> jax.Array:
    """Return `first_rows` as an int32 array [S], of which a modulation by `values` [1 or S + 1, C] uses the ends.

    Args:
        values: [M, C].
        first_rows: The ends (exclusive) of the first M - 1 segments of rows, in order: [M - 1], or a number for two
            segments. Without a choice between values, it isn't used.
    """
    ends = jnp.asarray(first_rows, jnp.int32).reshape(-1)
    assert len(values) in (1, len(ends) + 1), f"{len(values)} modulations for {len(ends) + 1} segments"
    return ends


def modulation_row(values: jax.Array, start: jax.Array | int, rows: int, ends: Any) -> jax.Array:
    """Return the modulation of `rows` rows from `start` on: [1, C], or [rows, C] when `values` has several rows.

    Args:
        values: [M, C], one row for each segment.
        start: Index of the first row.
        rows: Number of rows.
        ends: What `segment_ends` returns, or a reference to it in a kernel.
    """
    values = values.astype(jnp.float32)
    last = len(values) - 1
    chosen = values[last:]
    if last == 0:
        return chosen
    index = start + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    for segment in range(last - 1, -1, -1):
        chosen = jnp.where(index < ends[segment], values[segment : segment + 1], chosen)
    return chosen
