"""The positions of a CogVideoX video's tokens: angles of rotary embeddings, and sines. On the host, for each axis.

The reference is diffusers 0.42: `_prepare_rotary_positional_embeddings` of the pipelines, and models/embeddings.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_THETA = 10_000.0


def rope_angles(config: Mapping[str, Any], grid: Sequence[int]) -> list[np.ndarray]:
    """Return the angles along each axis of a grid of tokens [T, H, W]: float32 [T, D/8], [H, 3D/16], [W, 3D/16]."""
    width = config["attention_head_dim"]
    places = [np.arange(size, dtype=np.float64) for size in grid]
    if config.get("patch_size_t") is None:  # 1.0 scales the grid to the one that it was trained with.
        trained = [config[f"sample_{side}"] // config["patch_size"] for side in ("height", "width")]
        places[1:] = _fit_grid(grid[1:], trained)
    sizes = (width // 4, width // 8 * 3, width // 8 * 3)
    return [
        np.outer(place, _THETA ** -(np.arange(0, size, 2) / size)).astype(np.float32)
        for place, size in zip(places, sizes, strict=True)
    ]


def sine_embeddings(config: Mapping[str, Any], channels: int, grid: Sequence[int]) -> list[np.ndarray]:
    """Return the values added to tokens along time, width and height: float32 [T, C/4], [W, 3C/8], [H, 3C/8]."""
    frames, height, width = grid
    space, time = config["spatial_interpolation_scale"], config["temporal_interpolation_scale"]
    return [
        _sines(channels // 4, np.arange(frames) / time),
        _sines(channels * 3 // 8, np.arange(width) / space),
        _sines(channels * 3 // 8, np.arange(height) / space),
    ]


def _sines(channels: int, places: np.ndarray) -> np.ndarray:
    angles = np.outer(places, _THETA ** -(np.arange(channels // 2) / (channels / 2)))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _fit_grid(size: Sequence[int], trained: Sequence[int]) -> list[np.ndarray]:
    """Return the positions of rows and columns, scaled as a whole into the middle of the trained grid."""
    (height, width), (rows, columns) = size, trained
    if height / width > rows / columns:
        scaled = rows, round(rows / height * width)
    else:
        scaled = round(columns / width * height), columns
    starts = [round((whole - part) / 2.0) for whole, part in zip(trained, scaled, strict=True)]
    return [
        np.linspace(start, (start + part) * (count - 1) / count, count)
        for start, part, count in zip(starts, scaled, size, strict=True)
    ]
