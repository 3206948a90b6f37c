"""What one device attends with: some heads of some queries, and of all keys and values."""

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class LocalHeads:
    """Queries, keys and values of some heads on one device, in arrays that may hold more of them.

    Attributes:
        q: [Lq, at least N * D], times `query_scale`: some of the rows.
        k, v: [L, at least N * D], all rows.
        heads: N.
        width: D.
        kv_len: The number of real rows; the others are padding, which may be NaN.
        platform: "tpu", "gpu" or "cpu".
        first_heads: The first head to use of q, k and v.
        first_query: The index of q's first row in k, a multiple of 128.
        interpret: Runs the kernels on any platform, interpreted.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    heads: int
    width: int
    kv_len: int | jax.Array
    platform: str
    first_heads: tuple[int, int, int] = (0, 0, 0)
    first_query: int | jax.Array = 0
    interpret: Any = False

    def select(self, x: jax.Array, first: int) -> jax.Array:
        """Return the columns of the heads, given the first of them."""
        return x[:, first * self.width : (first + self.heads) * self.width]

    def select_all(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the heads' columns of q, k and v."""
        q, k, v = (self.select(x, first) for x, first in zip((self.q, self.k, self.v), self.first_heads, strict=True))
        return q, k, v
