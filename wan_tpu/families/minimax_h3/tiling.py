"""Overlapping tiles of a picture, laid out and blended as MiniMax-H3's VAE does.

All tiles of a picture have one size. What they cover beyond the picture widens their overlaps, so that the last one
ends where the picture does.

Shapes: N tiles, H W height and width of the picture, h w of a tile.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wan_tpu.families.shared.tiles import blend


class Line(NamedTuple):
    """Tiles along one direction.

    Attributes:
        starts: Where each tile begins.
        size: How long each tile is.
        overlaps: How much each tile but the first shares with the previous one.
    """

    starts: tuple[int, ...]
    size: int
    overlaps: tuple[int, ...]

    def enlarge(self, scale: int) -> "Line":
        """Return the same tiles of a picture that is enlarged."""
        return Line(
            tuple(start * scale for start in self.starts),
            self.size * scale,
            tuple(overlap * scale for overlap in self.overlaps),
        )


def lay_line(length: int, size: int, overlap: int) -> Line:
    """Return the smallest number of tiles that cover a length.

    Args:
        length: The length.
        size: The size of a tile; a shorter length is a single tile.
        overlap: The least that neighbours share.
    """
    if length <= size:
        return Line((0,), length, ())
    count = max(math.ceil(length / size), math.ceil((length - overlap) / (size - overlap)))
    more, longer = divmod(size * count - overlap * (count - 1) - length, count - 1)
    overlaps = tuple(overlap + more + (i < longer) for i in range(count - 1))
    starts = tuple(i * size - sum(overlaps[:i]) for i in range(count))
    return Line(starts, size, overlaps)


@dataclass(frozen=True)
class Tiling:
    """The tiles of a picture, row after row.

    Attributes:
        rows, columns: The tiles in each direction.
    """

    rows: Line
    columns: Line

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return len(self.rows.starts) * len(self.columns.starts)

    def enlarge(self, scale: int) -> "Tiling":
        """Return the same tiles of a picture that is enlarged."""
        return Tiling(self.rows.enlarge(scale), self.columns.enlarge(scale))

    def cut(self, picture: jax.Array) -> jax.Array:
        """Cut a picture [..., H, W] into its tiles [N, ..., h, w]."""
        height, width = self.rows.size, self.columns.size
        tiles = [picture[..., y : y + height, x : x + width] for y in self.rows.starts for x in self.columns.starts]
        return jnp.stack(tiles)

    def join(self, tiles: jax.Array) -> jax.Array:
        """Join tiles [N, ..., h, w] to a picture [..., H, W], float32.

        Each tile is blended over its overlap with the tile above, and the result over its overlap with the tile before.
        Where four tiles meet, the diagonal one isn't used.
        """
        per_row = len(self.columns.starts)
        strips = []
        for i in range(len(self.rows.starts)):
            parts = []
            for j in range(per_row):
                tile = tiles[i * per_row + j].astype(jnp.float32)
                if i > 0:
                    above = tiles[(i - 1) * per_row + j].astype(jnp.float32)
                    tile = blend(above, tile, self.rows.overlaps[i - 1], axis=tile.ndim - 2)
                if j > 0:
                    before = tiles[i * per_row + j - 1].astype(jnp.float32)
                    tile = blend(before, tile, self.columns.overlaps[j - 1], axis=tile.ndim - 1)
                height, width = (_get_stride(line, n) for line, n in ((self.rows, i), (self.columns, j)))
                parts.append(tile[..., :height, :width])
            strips.append(jnp.concatenate(parts, axis=-1))
        return jnp.concatenate(strips, axis=-2)


def _get_stride(line: Line, index: int) -> int:
    """Return how much of a tile comes before the next one begins."""
    return line.size - (line.overlaps[index] if index < len(line.overlaps) else 0)
