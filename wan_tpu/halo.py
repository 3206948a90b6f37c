"""Cut pictures into patches that lie over all devices, and give each patch its neighbours' edges.

A TPU wants 128 of something in its lanes. A VAE's channels (3 to 384) leave them half empty, and one video at a time
gives no batch; so each device cuts its part of the picture into patches and takes those for the batch. Convolutions
then run at full lanes, their windows move along dimensions that need no shuffling, and sums over channels are cheap.
The width is cut over devices first, then height and width within a device.

Everything but `patches` and `Patches.pad` runs inside one `jax.shard_map` over every axis of the mesh. A picture that
doesn't divide is padded at the bottom and on the right; what such pixels hold is of no account, since `widen` takes
them for zeros and `gather` leaves them out.

Shapes: N patches on a device, B batch, C channels, T frames, H W height and width (of a patch, or of a picture).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

LANES = 128  # of a TPU's vector registers, all generations


def patch_count(mesh: Mesh) -> int:
    """Return into how many patches a device cuts its part of a picture: as many as a TPU has lanes, elsewhere one."""
    return LANES if mesh.devices.flat[0].platform == "tpu" else 1


def patches(mesh: Mesh, height: int, width: int, count: int) -> "Patches":
    """Return the cut of a picture into `count` patches a device that pads it least.

    height, width  of the smallest picture, a VAE's latents
    """
    cuts = [Patches(mesh, height, width, rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    return min(cuts, key=lambda cut: cut.rows * cut.held_rows * cut.columns * cut.held_columns)


@dataclass(frozen=True)
class Patches:
    """How a picture of one size, and all its enlargements by whole numbers, lie over the devices of a mesh.

    height, width  of the smallest picture
    rows, columns  patches below and beside each other on one device; devices lie beside each other
    """

    mesh: Mesh
    height: int
    width: int
    rows: int
    columns: int

    @property
    def held_rows(self) -> int:
        """Rows of a patch of the smallest picture, padding included."""
        return -(-self.height // self.rows)

    @property
    def held_columns(self) -> int:
        """Columns of a patch of the smallest picture, padding included."""
        return -(-self.width // (self.columns * self.mesh.size))

    def pad(self, picture: jax.Array) -> jax.Array:
        """Pad a whole picture [B, C, T, H, W] (outside of shard_map) so that it can be cut."""
        scale = picture.shape[-1] // self.width
        rows = (self.held_rows * self.rows - self.height) * scale
        columns = (self.held_columns * self.columns * self.mesh.size - self.width) * scale
        return jnp.pad(picture, ((0, 0), (0, 0), (0, 0), (0, rows), (0, columns)))

    def cut(self, part: jax.Array) -> jax.Array:
        """Cut one device's part of a padded picture, [1, C, T, H, W], into patches [N, C, T, H, W]."""
        _, channels, frames, height, width = part.shape
        grid = part.reshape(channels, frames, self.rows, height // self.rows, self.columns, width // self.columns)
        return grid.transpose(2, 4, 0, 1, 3, 5).reshape(-1, channels, frames, *grid.shape[3::2])

    def join(self, x: jax.Array) -> jax.Array:
        """Undo `cut`: patches [N, C, T, H, W] to one device's part [1, C, T, H, W]."""
        _, channels, frames, height, width = x.shape
        grid = x.reshape(self.rows, self.columns, channels, frames, height, width).transpose(2, 3, 0, 4, 1, 5)
        return grid.reshape(1, channels, frames, self.rows * height, self.columns * width)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the whole picture [1, C, T, H, W], without padding, on every device, from patches [N, C, T, H, W]."""
        scale = x.shape[-1] // self.held_columns
        whole = self.join(x)
        if self.mesh.size > 1:
            whole = jax.lax.all_gather(whole, self.mesh.axis_names, axis=4, tiled=True)
        return whole[..., : self.height * scale, : self.width * scale]

    def widen(self, x: jax.Array, rows: tuple[int, int], columns: tuple[int, int]) -> jax.Array:
        """Put the neighbours' nearest pixels around patches [N, C, T, H, W], zeros beyond the picture's edges.

        rows, columns  how many to add before and after
        """
        if not any((*rows, *columns)):
            return x
        x = self._without_padding(x)
        (top, bottom), (left, right) = rows, columns
        height, width = x.shape[-2:]
        # Columns first, so that the rows added next bring the corners along.
        x = _concatenate(self._from_left(x[..., width - left :]), x, self._from_right(x[..., :right]), axis=4)
        return _concatenate(
            self._from_above(x[..., height - top :, :]), x, self._from_below(x[..., :bottom, :]), axis=3
        )

    def _without_padding(self, x: jax.Array) -> jax.Array:
        scale = x.shape[-1] // self.held_columns
        patch = _patch_index(x)
        keep = jnp.full((), True)
        if self.rows * self.held_rows != self.height:
            row = patch // self.columns * x.shape[3] + jnp.arange(x.shape[3])[:, None]
            keep = keep & (row < self.height * scale)
        if self.mesh.size * self.columns * self.held_columns != self.width:
            left = jax.lax.axis_index(self.mesh.axis_names) * self.columns + patch % self.columns
            keep = keep & (left * x.shape[4] + jnp.arange(x.shape[4]) < self.width * scale)
        return x if keep.ndim == 0 else jnp.where(keep, x, jnp.zeros((), x.dtype))

    def _from_left(self, edge: jax.Array) -> jax.Array:
        """Return for every patch the given edge of the patch to its left."""
        far = self._from_device(jnp.roll(edge, 1 - self.columns, axis=0), 1)
        return jnp.where(_patch_index(edge) % self.columns == 0, far, jnp.roll(edge, 1, axis=0))

    def _from_right(self, edge: jax.Array) -> jax.Array:
        far = self._from_device(jnp.roll(edge, self.columns - 1, axis=0), -1)
        last = self.columns - 1
        return jnp.where(_patch_index(edge) % self.columns == last, far, jnp.roll(edge, -1, axis=0))

    def _from_above(self, edge: jax.Array) -> jax.Array:
        beyond = _patch_index(edge) < self.columns
        return jnp.where(beyond, jnp.zeros((), edge.dtype), jnp.roll(edge, self.columns, axis=0))

    def _from_below(self, edge: jax.Array) -> jax.Array:
        beyond = _patch_index(edge) >= (self.rows - 1) * self.columns
        return jnp.where(beyond, jnp.zeros((), edge.dtype), jnp.roll(edge, -self.columns, axis=0))

    def _from_device(self, edge: jax.Array, by: int) -> jax.Array:
        """Send edges to the device `by` places on; those that nobody sends to get zeros."""
        devices = self.mesh.size
        if devices == 1 or 0 in edge.shape:
            return jnp.zeros_like(edge)
        to = [(i, i + by) for i in range(devices) if 0 <= i + by < devices]
        return jax.lax.ppermute(edge, self.mesh.axis_names, to)


def _patch_index(x: jax.Array) -> jax.Array:
    """0 to N - 1 along the first dimension of [N, C, T, H, W]."""
    return jnp.arange(x.shape[0]).reshape(-1, 1, 1, 1, 1)


def _concatenate(before: jax.Array, x: jax.Array, after: jax.Array, *, axis: int) -> jax.Array:
    return jnp.concatenate([part for part in (before, x, after) if part.shape[axis]], axis)
