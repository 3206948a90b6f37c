"""A causal VAE on overlapping tiles of a picture, computed separately and blended where they meet, as in diffusers.

A device takes whole tiles, one after the other. Tiles at the right and at the bottom are smaller; so that one program
serves all, they are stored in full size, and their own columns and rows are arrays.

Shapes: N tiles of all devices, T frames, X columns and Y rows of a tile, W H width and height of a picture, C channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.families.shared.causal_vae import Cache, CausalChunks
from wan_tpu.ops.halo import HaloCut
from wan_tpu.runtime.bridge import Params
from wan_tpu_kernels.vae.causal_conv import Padding


@dataclass(frozen=True)
class Tile(HaloCut):
    """A picture that one device has all of, and whose own size is known only when the program runs.

    Attributes:
        mesh, height, width, row_unit: As for `HaloCut`; height and width are those of a full tile.
        columns, rows: The tile's own, of the smallest picture.
    """

    columns: jax.Array
    rows: jax.Array

    @property
    def held_columns(self) -> int:
        """All columns, because nothing is cut."""
        return self.width

    def inside(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return how many columns and rows of x [T, X, Y, C] are the tile's own."""
        scale = x.shape[1] // self.width
        return self.columns * scale, self.rows * scale

    def edges(self, first: jax.Array, last: jax.Array, *, padding: Padding = "zeros") -> tuple[jax.Array, jax.Array]:
        """Return the columns beyond both ends, which no other device has."""
        assert padding != "reflect"
        return (first, last) if padding == "edge" else (jnp.zeros_like(first), jnp.zeros_like(last))

    def extend(self, x: jax.Array, padding: Padding) -> jax.Array:
        """Return x [T, X, Y, C] with the tile's last row and column repeated where padding begins."""
        assert padding == "edge"
        columns, rows = self.inside(x)
        last = jax.lax.dynamic_slice_in_dim(x, rows - 1, 1, axis=2)
        x = jnp.where(jnp.arange(x.shape[2])[:, None] == rows, last, x)
        last = jax.lax.dynamic_slice_in_dim(x, columns - 1, 1, axis=1)
        return jnp.where(jnp.arange(x.shape[1])[:, None, None] == columns, last, x)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return x, which is the whole picture, padding included."""
        return x

    def inside_mask(self, x: jax.Array) -> jax.Array:
        """Return which pixels of x [T, X, Y, ...] are the tile's own, [X, Y]."""
        columns, rows = self.inside(x)
        return (jnp.arange(x.shape[1]) < columns)[:, None] & (jnp.arange(x.shape[2]) < rows)


@dataclass(frozen=True, kw_only=True)
class TiledChunks(CausalChunks):
    """One half of a VAE on tiles."""

    tile: int  # The side of a tile, in pixels of the latents.
    overlap: int  # How much of that it shares with its neighbour.

    @property
    def cache_format(self) -> Format:
        """The layout of each entry of the cache: tiles first, divided among the devices."""
        return Format(Layout((0, 1, 2, 3, 4)), NamedSharding(self.mesh, P(self.mesh.axis_names)))

    def _on_strips(self, local: Callable[..., Any], params: Params, x: jax.Array, cache: Cache) -> Any:
        """Run local(tile, params, x, cache) on every tile, and join their outputs to one picture."""
        picture = self.before(x)[0].transpose(1, 3, 2, 0)
        grid = _Grid(picture.shape[1] // self.scale, picture.shape[2] // self.scale, self.tile, self.overlap)
        count = -(-len(grid.starts) // self.mesh.size) * self.mesh.size
        row_unit = 16 if self.mesh.devices.flat[0].platform == "tpu" else 1

        def device(params: Params, tiles: jax.Array, sizes: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            def run_tile(inputs: tuple[jax.Array, jax.Array, Cache]) -> tuple[jax.Array, Cache]:
                pixels, (columns, rows), cache = inputs
                tile = Tile(self.mesh, self.tile, self.tile, row_unit, columns, rows)
                out, entries = local(tile, params, _pad_rows(pixels, tile), cache)
                return out[:, :, : out.shape[1]].transpose(3, 0, 1, 2), entries  # Square again, with channels first.

            out, entries = jax.lax.map(run_tile, (tiles, sizes, cache))
            if self.mesh.size > 1:
                out = jax.lax.all_gather(out, self.mesh.axis_names, axis=0, tiled=True)
            return out, entries

        spec = P(self.mesh.axis_names)
        run = jax.shard_map(
            device, mesh=self.mesh, in_specs=(P(), spec, spec, spec), out_specs=(P(), spec), check_vma=False
        )
        out, entries = run(params, grid.cut(picture, count), grid.sizes(count), cache)
        return self.after(grid.join(out).transpose(0, 1, 3, 2)[None]), entries


def _pad_rows(pixels: jax.Array, tile: Tile) -> jax.Array:
    """Pad the rows of a tile [T, X, Y, C] to whole units."""
    rows = tile.held_rows * (pixels.shape[1] // tile.width) - pixels.shape[2]
    return jnp.pad(pixels, ((0, 0), (0, 0), (0, rows), (0, 0)))


@dataclass(frozen=True)
class _Grid:
    """The positions and sizes of tiles, in pixels of the latents."""

    width: int
    height: int
    tile: int
    overlap: int

    @property
    def starts(self) -> list[tuple[int, int]]:
        """(column, row) of each tile, row after row; a picture that fits into one tile is one."""
        if max(self.width, self.height) <= self.tile:
            return [(0, 0)]
        return [(column, row) for row in self._along(self.height) for column in self._along(self.width)]

    def sizes(self, count: int) -> jax.Array:
        """Return columns and rows of `count` tiles, int32 [N, 2]; those beyond the picture's are full, of zeros."""
        sizes = [(min(self.tile, self.width - x), min(self.tile, self.height - y)) for x, y in self.starts]
        return jnp.asarray([*sizes, *[(self.tile, self.tile)] * (count - len(sizes))], jnp.int32)

    def cut(self, picture: jax.Array, count: int) -> jax.Array:
        """Cut a picture [T, W, H, C] into [N, T, X, Y, C]."""
        scale = picture.shape[1] // self.width
        (right, bottom), side = self.starts[-1], self.tile * scale
        ends = (right * scale + side - picture.shape[1], bottom * scale + side - picture.shape[2])
        whole = jnp.pad(picture, ((0, 0), (0, ends[0]), (0, ends[1]), (0, 0)))
        tiles = [whole[:, x * scale :, y * scale :][:, :side, :side] for x, y in self.starts]
        return jnp.stack([*tiles, *[jnp.zeros_like(tiles[0])] * (count - len(tiles))])

    def join(self, tiles: jax.Array) -> jax.Array:
        """Join tiles [N, C, T, X, Y] to a picture [C, T, W, H], blended in the order of diffusers' tiled_decode."""
        scale = tiles.shape[3] // self.tile
        overlap = self.overlap * scale
        stride = self.tile * scale - (overlap if len(self.starts) > 1 else 0)
        rows: list[list[jax.Array]] = []
        for number, (x, y) in enumerate(self.starts):
            if x == 0:
                rows.append([])
            tile = tiles[number][:, :, : (self.width - x) * scale, : (self.height - y) * scale].astype(jnp.float32)
            if y > 0:
                tile = blend(rows[-2][len(rows[-1])], tile, overlap, axis=3)
            if x > 0:
                tile = blend(rows[-1][-1], tile, overlap, axis=2)
            rows[-1].append(tile)
        strips = [jnp.concatenate([tile[:, :, :stride, :stride] for tile in row], axis=2) for row in rows]
        return jnp.concatenate(strips, axis=3).astype(tiles.dtype)

    def _along(self, length: int) -> range:
        return range(0, length, self.tile - self.overlap)


def blend(before: jax.Array, tile: jax.Array, overlap: int, axis: int) -> jax.Array:
    """Return a tile whose start fades in from the end of the tile before it."""
    overlap = min(before.shape[axis], tile.shape[axis], overlap)
    share = jnp.arange(overlap, dtype=jnp.float32) / overlap
    share = share.reshape([-1 if i == axis else 1 for i in range(tile.ndim)])
    end = jax.lax.slice_in_dim(before, before.shape[axis] - overlap, None, axis=axis)
    start = jax.lax.slice_in_dim(tile, 0, overlap, axis=axis)
    rest = jax.lax.slice_in_dim(tile, overlap, None, axis=axis)
    return jnp.concatenate([end * (1 - share) + start * share, rest], axis=axis)
