"""The noise of a chunk, drawn as diffusers draws it: in float32, all from one generator.

Shapes: C channels, T frames, H W latent height and width.
"""

from collections.abc import Sequence

import numpy as np
import torch


def draw_first(shape: Sequence[int], stages: int, generator: torch.Generator) -> np.ndarray:
    """Return the initial noise of the first of several stages, at its size; `shape` is the finished chunk's."""
    noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
    frames = noise[0].transpose(0, 1)
    for _ in range(stages - 1):
        # Half the sum of four independent values has their variance.
        size = [length // 2 for length in frames.shape[2:]]
        frames = torch.nn.functional.interpolate(frames, size=size, mode="bilinear") * 2
    array: np.ndarray = frames.transpose(0, 1)[None].contiguous().numpy()
    return array


def draw_between(shape: Sequence[int], patch: Sequence[int], gamma: float, generator: torch.Generator) -> np.ndarray:
    """Return the noise that is mixed into enlarged latents, correlated within each token's square.

    With gamma 1/3 the values of a square nearly add up to 0.

    Args:
        shape: [1, C, T, H, W] of the enlarged latents.
        patch: Latent frames, rows and columns of a token.
        gamma: The correlation of two values of a square, negated and relative to their variance of 1.
    """
    _, channels, frames, height, width = shape
    rows, columns = patch[1:]
    grid = height // rows, width // columns
    drawn = torch.randn((channels * frames * grid[0] * grid[1], rows * columns), generator=generator)
    # Rows of the drawn array are squares, whose values lie next to each other.
    noise = drawn.numpy() @ square_factor(rows * columns, gamma).astype(np.float32).T
    array: np.ndarray = noise.reshape(1, channels, frames, *grid, rows, columns).transpose(0, 1, 2, 3, 5, 4, 6)
    return array.reshape(tuple(shape))


def square_factor(values: int, gamma: float) -> np.ndarray:
    """Return the Cholesky factor of the covariance within a square, float64 [values, values].

    The covariance is nearly singular at the published gamma: float32 would round an eigenvalue of 1e-8 below 0.
    """
    covariance = np.eye(values) * (1 + gamma) - gamma + np.eye(values) * 1e-8
    return np.linalg.cholesky(covariance)
