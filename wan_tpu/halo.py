"""Split the width of pictures over all devices: which columns each one holds, and its neighbours' edges.

Everything here runs inside one `jax.shard_map` over every axis of the mesh. A picture whose width doesn't divide is
padded on the right; what such columns hold is of no account, since `widen` and `gather` leave them out.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Columns:
    """How pictures of one width, and all their enlargements by whole numbers, lie over the devices of a mesh.

    width  columns of the smallest picture
    """

    mesh: Mesh
    width: int

    @property
    def held(self) -> int:
        """Columns of the smallest picture on each device, padding included."""
        return -(-self.width // self.mesh.size)

    def spec(self, rank: int) -> P:
        """Return how an array of `rank` dimensions, the last one its columns, lies over the mesh."""
        return P(*[None] * (rank - 1), self.mesh.axis_names)

    def pad(self, x: jax.Array) -> jax.Array:
        """Pad the columns of a whole array (outside of shard_map) to the same number on every device."""
        missing = (self.held * self.mesh.size - self.width) * (x.shape[-1] // self.width)
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])

    def widen(self, x: jax.Array, left: int, right: int) -> jax.Array:
        """Put the neighbours' nearest columns beside x [..., W], zeros beyond the picture's edges.

        left, right  how many columns, at most W
        """
        if not left and not right:
            return x
        x = self._without_padding(x)
        sides = []
        if left:
            sides.append(self._shift(x[..., -left:], 1))
        sides.append(x)
        if right:
            sides.append(self._shift(x[..., :right], -1))
        return jnp.concatenate(sides, axis=-1)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the whole picture's columns, without padding, on every device."""
        if self.mesh.size == 1:
            return x
        whole = jax.lax.all_gather(x, self.mesh.axis_names, axis=x.ndim - 1, tiled=True)
        return whole[..., : self._valid(x)]

    def _valid(self, x: jax.Array) -> int:
        return self.width * (x.shape[-1] // self.held)

    def _without_padding(self, x: jax.Array) -> jax.Array:
        if self.held * self.mesh.size == self.width:
            return x
        first = jax.lax.axis_index(self.mesh.axis_names) * x.shape[-1]
        return jnp.where(first + jnp.arange(x.shape[-1]) < self._valid(x), x, jnp.zeros((), x.dtype))

    def _shift(self, edge: jax.Array, by: int) -> jax.Array:
        """Send an edge to the device `by` places on; those that nobody sends to get zeros."""
        count = self.mesh.size
        if count == 1:
            return jnp.zeros_like(edge)
        to = [(i, i + by) for i in range(count) if 0 <= i + by < count]
        return jax.lax.ppermute(edge, self.mesh.axis_names, to)
