"""Cut pictures into strips of columns, one for each device, and fetch the columns beside a strip.

Everything but `cut_picture`, `HaloCut.pad` and the sizes runs inside one `jax.shard_map` over every axis of the mesh. A
picture whose size doesn't divide is padded on the right and at the bottom. The padding stays zero as long as all code
that writes pictures respects `HaloCut.inside`, the picture's own columns and rows.

Shapes: T frames, X columns, Y rows, C channels; W H width and height of the whole picture.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu_kernels.vae.causal_conv import Padding


def cut_picture(mesh: Mesh, height: int, width: int) -> "HaloCut":
    """Return how a picture is cut over the devices of a mesh; height and width are those of a VAE's latents."""
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    return HaloCut(mesh, height, width, row_unit=16 if on_tpu else 1)


def strip_spec(mesh: Mesh) -> P:
    """Return how the columns of pictures [T, X, Y, C] are split over all devices."""
    return P(None, mesh.axis_names)


@dataclass(frozen=True)
class HaloCut:
    """Strips of a picture of one size, and of its enlargements by whole numbers.

    Attributes:
        height, width: Size of the smallest picture.
        row_unit: Rows are padded to a multiple of this: 16 rows of bfloat16 fill a TPU's tile.
    """

    mesh: Mesh
    height: int
    width: int
    row_unit: int

    @property
    def held_rows(self) -> int:
        """Rows of the smallest picture, padding included."""
        return -(-self.height // self.row_unit) * self.row_unit

    @property
    def held_columns(self) -> int:
        """Columns of the smallest picture on one device, padding included."""
        return -(-self.width // self.mesh.size)

    def pad(self, picture: jax.Array) -> jax.Array:
        """Pad a whole picture [T, W, H, C] so that every device has an equal part (outside of shard_map)."""
        scale = picture.shape[1] // self.width
        columns = (self.held_columns * self.mesh.size - self.width) * scale
        rows = (self.held_rows - self.height) * scale
        return jnp.pad(picture, ((0, 0), (0, columns), (0, rows), (0, 0)))

    def inside(self, x: jax.Array) -> tuple[jax.Array | int, jax.Array | int]:
        """Return how many columns and rows of a strip [T, X, Y, C] are the picture's own."""
        scale = x.shape[1] // self.held_columns
        rows = self.height * scale
        if self.held_columns * self.mesh.size == self.width:
            return x.shape[1], rows
        first_column = jax.lax.axis_index(self.mesh.axis_names) * x.shape[1]
        return jnp.clip(self.width * scale - first_column, 0, x.shape[1]), rows

    def hold_rows(self, x: jax.Array) -> jax.Array:
        """Return a strip [T, X, Y, C] with only as many padding rows as fill the last tile at its current size.

        An enlarged strip has many times the padding of the smallest: 34 rows of latents are stored as 48; enlarged by
        eight, these are 384, though the picture's own 272 fill whole tiles.
        """
        rows = self.height * (x.shape[1] // self.held_columns)
        padded = -(-rows // self.row_unit) * self.row_unit
        return x if x.shape[2] == padded else jnp.pad(x[:, :, :rows], ((0, 0), (0, 0), (0, padded - rows), (0, 0)))

    def edges(self, first: jax.Array, last: jax.Array, *, padding: Padding = "zeros") -> tuple[jax.Array, jax.Array]:
        """Send each strip's first and last columns to its neighbours; return the columns before and after it.

        Args:
            first, last: [T, 1, Y, C]; for "reflect" the first and the last two columns, if the strip has two.
            padding: What lies beyond the picture. "reflect" needs a picture of at least two columns.
        """
        before, after = self._from_device(last[:, -1:], 1), self._from_device(first[:, :1], -1)
        if padding == "zeros":
            return before, after
        start, end = first, last
        if padding == "reflect":
            start, end = (first[:, 1:], last[:, :1]) if first.shape[1] > 1 else (after, before)
        index = 0 if self.mesh.size == 1 else jax.lax.axis_index(self.mesh.axis_names)
        at_end = (index + 1) * self.held_columns >= self.width
        return jnp.where(index == 0, start, before), jnp.where(at_end, end, after)

    def extend(self, x: jax.Array, padding: Padding) -> jax.Array:
        """Return a strip [T, X, Y, C] whose padding begins with the values that belong beyond the picture."""
        if padding == "zeros":
            return x
        columns, rows = self.inside(x)
        assert isinstance(rows, int)
        back = 2 if padding == "reflect" else 1  # Columns or rows from the padding back to the one that it repeats.
        if rows < x.shape[2]:
            x = x.at[:, :, rows].set(x[:, :, rows - back])
        if isinstance(columns, int):
            return x
        last = jax.lax.dynamic_slice_in_dim(x, jnp.maximum(columns - back, 0), 1, axis=1)
        if back == 2 and self.width % self.held_columns == 1 and x.shape[1] == self.held_columns > 1:
            last = jnp.where(columns == 1, self._from_device(x[:, -1:], 1), last)
        return jnp.where(jnp.arange(x.shape[1])[:, None, None] == columns, last, x)

    def inside_mask(self, x: jax.Array) -> jax.Array:
        """Return which pixels of a gathered picture [T, W, H, ...] are its own, [W, H]: all of them."""
        return jnp.ones(x.shape[1:3], bool)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the whole picture [T, W, H, ...], without padding, on every device, from strips [T, X, Y, ...]."""
        scale = x.shape[1] // self.held_columns
        if self.mesh.size > 1:
            x = jax.lax.all_gather(x, self.mesh.axis_names, axis=1, tiled=True)
        return x[:, : self.width * scale, : self.height * scale]

    def _from_device(self, edge: jax.Array, offset: int) -> jax.Array:
        """Send to the device `by` positions further; devices that receive nothing get zeros."""
        devices = self.mesh.size
        if devices == 1:
            return jnp.zeros_like(edge)
        pairs = [(i, i + offset) for i in range(devices) if 0 <= i + offset < devices]
        return jax.lax.ppermute(edge, self.mesh.axis_names, pairs)
