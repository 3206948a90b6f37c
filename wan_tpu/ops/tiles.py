"""The tiles of video sparse attention: 64 neighbouring rows of a sequence that choose keys, and are chosen, together.

The video's are boxes of 4 x 4 x 4 tokens, and smaller ones at its far edges. Segments that aren't video (text, sound,
keyframes) are cut every 64 rows. In the sequence the video comes first, box by box, whole ones before others, so that
whole tiles begin at multiples of 64 and nothing is padded; the segment whose length only the program knows is last.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

SIDE = 4  # Tokens of a box along each axis.
ROWS = SIDE**3  # Rows of a whole tile.


@dataclass(frozen=True)
class Tiles:
    """The tiles of one sequence.

    Attributes:
        grid: Tokens of the video in time, height and width.
        segments: Rows of the other segments in their order; padding follows the real rows of the last one.
    """

    grid: tuple[int, int, int]
    segments: tuple[int, ...]

    @functools.cached_property
    def order(self) -> np.ndarray:
        """The video's token, counted by time, height and width, in each of its rows; int [rows of the video]."""
        return np.concatenate(self._boxes)

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each tile, int [tiles], those of padding included."""
        cuts = [min(ROWS, rows - start) for rows in self.segments for start in range(0, rows, ROWS)]
        return np.array([*map(len, self._boxes), *cuts])

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The first row of each tile, int [tiles]."""
        return np.cumsum(self.sizes) - self.sizes

    @functools.cached_property
    def of_rows(self) -> np.ndarray:
        """The tile of each row, int32 [rows]."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes).astype(np.int32)

    @property
    def video(self) -> int:
        """The number of the video's tiles, which come first."""
        return len(self._boxes)

    @functools.cached_property
    def whole(self) -> int:
        """The number of the video's tiles that have 64 rows, which come first of all."""
        return sum(len(box) == ROWS for box in self._boxes)

    @property
    def video_rows(self) -> int:
        """The rows of the video."""
        return math.prod(self.grid)

    @property
    def rows(self) -> int:
        """All rows, padding included."""
        return self.video_rows + sum(self.segments)

    def list_windows(self, rows: int, devices: int) -> tuple[np.ndarray, int]:
        """Return the first tile of each device's rows, int32 [devices], and the most tiles that any of them has."""
        starts = np.arange(devices) * rows
        firsts, lasts = (self.of_rows[np.minimum(row, self.rows - 1)] for row in (starts, starts + rows - 1))
        return firsts, int((lasts - firsts).max()) + 1

    def kept(self, sparsity: float) -> int:
        """Return how many of the video's tiles a tile keeps, as FastVideo computes it."""
        return max(1, min(math.ceil((1.0 - sparsity) * self.video), self.video))

    @functools.cached_property
    def _boxes(self) -> list[np.ndarray]:
        tokens = np.arange(self.video_rows).reshape(self.grid)
        parts = [[slice(start, start + SIDE) for start in range(0, size, SIDE)] for size in self.grid]
        boxes = [tokens[place].ravel() for place in itertools.product(*parts)]
        return sorted(boxes, key=len, reverse=True)
