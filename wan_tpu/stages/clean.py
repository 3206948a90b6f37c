"""The clean latents that a denoising step has estimated (x0), read from the latents before and after it.

A step is a matrix over (x, x0, history, noise) with the rows (next x, next history), so one of the rows says what x0
was. The compiled step needn't return it, and no step waits for it.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from wan_tpu.data import DenoiseState
from wan_tpu.plan import VIDEO


@dataclass(frozen=True)
class CleanEstimate:
    """A step's estimate of the video's clean latents, as a weighted sum of arrays that exist anyway."""

    # The weights and their arrays, float32 [1, C, T, H, W], on the devices or on the host.
    terms: tuple[tuple[float, jax.Array | np.ndarray], ...]

    def to_host(self) -> np.ndarray:
        """Return the estimate, float32 [1, C, T, H, W]. Any thread may call this while later steps run."""
        total: np.ndarray = functools.reduce(np.add, (np.float32(weight) * np.asarray(x) for weight, x in self.terms))
        return total


def estimate_clean(
    matrix: np.ndarray, before: DenoiseState, after: DenoiseState, noise: np.ndarray | None
) -> CleanEstimate:
    """Return the estimate of a step of the solver.

    Args:
        matrix: The step's matrix, as in `Schedule.matrices`.
        before: The state before the step.
        after: The state after it.
        noise: The fresh noise that it has added, if any.
    """
    rows = matrix.astype(np.float32)
    # The row with the largest share of x0: a history that keeps x0 has it alone, and then nothing is rounded.
    row = int(np.argmax(np.abs(rows[:, 1]) / np.abs(rows).sum(axis=1)))
    latents, history = before.parts[VIDEO]
    next_latents, next_history = after.parts[VIDEO]
    result = (next_latents, *next_history)[row]
    others = (latents, None, *history, noise)
    weight = float(rows[row, 1])
    known = [(-float(rows[row, k]) / weight, others[k]) for k in range(rows.shape[1]) if k != 1 and rows[row, k] != 0]
    terms: list[tuple[float, Any]] = [(1 / weight, result), *known]
    return CleanEstimate(tuple(terms))
