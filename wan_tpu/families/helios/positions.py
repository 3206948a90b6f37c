"""The angles of a Helios transformer's tokens, on the host: an argument of its programs.

A chunk follows its history on a time axis that starts again with every chunk, so its tables never change. Tokens of the
mid and long history stand for several positions: their cosines and sines are the means of those positions'.

Shapes: T H W frames, rows and columns, L tokens, D head width.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wan_tpu.families.helios.published import HISTORY

POOLED = {"long": 4, "mid": 2}  # How many positions along each axis one token represents.


def rotary_tables(
    config: Mapping[str, Any], grid: Sequence[int], history_size: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines, float32 [L, D] each, for pairs (i, i + D/2): [cos, cos] and [-sin, sin].

    The tokens are those of the chunk, and of the long, mid and short history.

    Args:
        grid: (T, H, W) of the chunk's tokens, at the size at which it is denoised.
        history_size: (H, W) of the short history's tokens, those of a finished chunk.
    """
    return _rotary_tables(tuple(config["rope_dim"]), config["rope_theta"], tuple(grid), tuple(history_size))


@functools.lru_cache(maxsize=12)
def _rotary_tables(
    widths: tuple[int, ...], theta: float, grid: tuple[int, ...], history_size: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables, which take a core up to 0.02 s; all requests of a size have the same."""
    ends = np.cumsum((1, *HISTORY, grid[0]))
    long, mid, last, chunk = (np.arange(ends[i], ends[i + 1]) for i in range(4))
    tables = [
        _angles(widths, theta, chunk, grid[1:]),
        _pool(_angles(widths, theta, long, history_size), POOLED["long"]),
        _pool(_angles(widths, theta, mid, history_size), POOLED["mid"]),
        _angles(widths, theta, np.append(0, last), history_size),
    ]
    cos, sin = np.concatenate([table.reshape(-1, *table.shape[3:]) for table in tables]).swapaxes(0, 1)
    results = np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
    for result in results:
        result.flags.writeable = False
    return results


def _angles(widths: Sequence[int], theta: float, frames: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return cosines and sines of each pair, float32 [T, H, W, 2, D/2]."""
    grid = np.meshgrid(frames, *(np.arange(n) for n in size), indexing="ij")
    angles = []
    for positions, width in zip(grid, widths, strict=True):
        exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        frequencies = np.float32(1) / np.float32(theta) ** exponents
        angles.append(positions[..., None].astype(np.float32) * frequencies)
    joined = np.concatenate(angles, axis=-1)
    return np.stack([np.cos(joined), np.sin(joined)], axis=3)


def _pool(table: np.ndarray, count: int) -> np.ndarray:
    """Return the means of cubes of positions; the last position is repeated to fill the last cubes."""
    padding = [(0, -n % count) for n in table.shape[:3]]
    table = np.pad(table, (*padding, (0, 0), (0, 0)), mode="edge")
    frames, height, width = (n // count for n in table.shape[:3])
    cubes = table.reshape(frames, count, height, count, width, count, *table.shape[3:])
    pooled: np.ndarray = cubes.mean(axis=(1, 3, 5), dtype=np.float32)
    return pooled
