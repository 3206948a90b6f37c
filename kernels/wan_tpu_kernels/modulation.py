"""Per-channel vectors that differ between the first rows of a sequence and the others.

Wan 2.2 TI2V 5B gives the tokens of the first image the timestep 0 and all others the current timestep: that takes two
modulations, not one for every token.
"""

import jax
import jax.numpy as jnp


def modulation_row(values: jax.Array, start: jax.Array | int, rows: int, first_rows: jax.Array | int) -> jax.Array:
    """Return the modulation of `rows` rows from `start` on: [1, C], or [rows, C] when `values` has two rows.

    Args:
        values: [1 or 2, C]. Of two, the first is for rows before `first_rows`.
        start: Index of the first row.
        rows: Number of rows.
        first_rows: Number of rows of the sequence that take the first of two values.
    """
    values = values.astype(jnp.float32)
    if values.shape[0] == 1:
        return values
    index = start + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return jnp.where(index < first_rows, values[0:1], values[1:2])
