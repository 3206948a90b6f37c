"""Per-channel vectors that differ between the first rows of a sequence and the others.

Wan 2.2 TI2V 5B gives the tokens of the image it was handed the timestep 0 and all others the current one: two
modulations, not one for every token.
"""

import jax
import jax.numpy as jnp


def modulation_row(values: jax.Array, start: jax.Array | int, rows: int, first_rows: jax.Array | int) -> jax.Array:
    """Return what `rows` rows from `start` on are modulated with: [1, C], or [rows, C] when `values` has two rows.

    values  [1 or 2, C]: of two, the first is for rows before `first_rows`
    """
    values = values.astype(jnp.float32)
    if values.shape[0] == 1:
        return values
    index = start + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return jnp.where(index < first_rows, values[0:1], values[1:2])
