"""Flow-matching solvers as tables of coefficients, computed on the host in float64.

With a flow model the velocity v gives the clean estimate x0 = x - sigma v. Every solver step here is one small
matrix: from the vector of arrays (x, x0, *history) to (next x, *next history). The device only forms linear
combinations; there is no linear solve, no logarithm and no branch in the compiled step.

Sources: UniPC, Zhao et al. 2023 (arXiv 2302.04867), B(h) = expm1(h), order 2; its conventions for flow models
(sigma grid, the first sigma, float32 rounding, lower order at the end) are those of diffusers'
UniPCMultistepScheduler, Euler's those of FlowMatchEulerDiscreteScheduler.
"""

import dataclasses
import functools
import math

import numpy as np

from wan_tpu.errors import InvalidRequest

TRAIN_TIMESTEPS = 1000


@dataclasses.dataclass(frozen=True)
class SolverTable:
    """All coefficients of one run, S steps and K history terms.

    timesteps  float32 [S], what the transformer is told
    sigmas     float64 [S], noise level of each step
    matrices   float64 [S, K+1, K+2]: (next x, *next history) = matrix @ (x, x0, *history)
    """

    timesteps: np.ndarray
    sigmas: np.ndarray
    matrices: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.timesteps, self.sigmas, self.matrices):
            array.flags.writeable = False  # it is shared by all who ask for it

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.timesteps)

    @property
    def history_terms(self) -> int:
        """How many arrays one step hands to the next beside the latents."""
        return self.matrices.shape[1] - 1

    def high_noise_steps(self, boundary_ratio: float | None) -> int:
        """How many steps come before the boundary: those with t >= boundary_ratio x 1000; all without one."""
        if boundary_ratio is None:
            return self.steps
        return int((self.timesteps >= boundary_ratio * TRAIN_TIMESTEPS).sum())


@functools.lru_cache(maxsize=64)
def solver_table(solver: str, steps: int, shift: float) -> SolverTable:
    """Return the table of `solver` ("unipc" or "euler") for `steps` steps and timestep shift `shift`."""
    if solver == "unipc":
        return _unipc(steps, shift)
    if solver == "euler":
        return _euler(steps, shift)
    raise InvalidRequest(f"solver {solver!r} is unknown; choose one of unipc, euler")


def _shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _euler(steps: int, shift: float) -> SolverTable:
    # diffusers shifts the training grid, spaces the steps between its ends, and shifts once more.
    last = _shifted(np.array(1 / TRAIN_TIMESTEPS, np.float32), shift)
    grid = np.linspace(TRAIN_TIMESTEPS, float(last) * TRAIN_TIMESTEPS, steps) / TRAIN_TIMESTEPS
    sigmas = _shifted(grid, shift).astype(np.float32)
    following = np.append(sigmas[1:], np.float32(0)).astype(np.float64)
    ratio = following / sigmas
    matrices = np.stack([ratio, 1 - ratio], axis=-1)[:, None, :]
    return SolverTable(sigmas * np.float32(TRAIN_TIMESTEPS), sigmas.astype(np.float64), matrices)


def _unipc(steps: int, shift: float) -> SolverTable:
    sigmas = _shifted(np.linspace(1, 1 / TRAIN_TIMESTEPS, steps + 1)[:-1], shift)
    if abs(sigmas[0] - 1) < 1e-6:
        sigmas[0] -= 1e-6  # log(1 - sigma) must stay finite
    timesteps = (sigmas * TRAIN_TIMESTEPS).astype(np.int64).astype(np.float32)
    # diffusers keeps its sigmas in float32. Near 1 that moves log(1 - sigma) by a percent, so the rounded
    # values, not the exact ones, are what a checkpoint's published results were made with.
    sigmas = np.append(sigmas, 0).astype(np.float32).astype(np.float64)
    matrices = np.stack([_unipc_step(sigmas, i) for i in range(steps)])
    return SolverTable(timesteps, sigmas[:-1], matrices)


def _unipc_step(sigmas: np.ndarray, i: int) -> np.ndarray:
    """Return step i as a matrix over (x, x0, last, m1, m2), [4, 5].

    last is the corrected sample of step i-1; m1 and m2 are the clean estimates of steps i-1 and i-2.
    """
    steps = len(sigmas) - 1
    x, x0, last, m1, m2 = np.eye(5)
    corrected = x
    if i > 0:
        corrector_order = min(2, i, steps - (i - 1))  # that of the prediction it corrects
        corrected = _corrector(sigmas, i, corrector_order, last, x0, m1, m2)
    predictor_order = min(2, i + 1, steps - i)
    return np.stack([_predictor(sigmas, i, predictor_order, corrected, x0, m1), corrected, x0, m1])


def _log_snr(sigma: float) -> float:
    return math.inf if sigma == 0 else math.log(1 - sigma) - math.log(sigma)


def _predictor(
    sigmas: np.ndarray, i: int, order: int, sample: np.ndarray, x0: np.ndarray, m1: np.ndarray
) -> np.ndarray:
    """UniP from sigma_i to sigma_i+1 (equation 3 of the paper, predicting x0)."""
    here, there = sigmas[i], sigmas[i + 1]
    h = _log_snr(there) - _log_snr(here)
    b = math.expm1(-h)
    result = there / here * sample - (1 - there) * b * x0
    if order == 2:
        r = (_log_snr(sigmas[i - 1]) - _log_snr(here)) / h
        result = result - (1 - there) * b * 0.5 * (m1 - x0) / r
    return result


def _corrector(
    sigmas: np.ndarray, i: int, order: int, last: np.ndarray, x0: np.ndarray, m1: np.ndarray, m2: np.ndarray
) -> np.ndarray:
    """UniC: step i-1 repeated from its corrected sample, now knowing the estimate x0 at sigma_i."""
    before, here = sigmas[i - 1], sigmas[i]
    h = _log_snr(here) - _log_snr(before)
    b = math.expm1(-h)
    result = here / before * last - (1 - here) * b * m1
    if order == 1:
        return result - (1 - here) * b * 0.5 * (x0 - m1)
    r = (_log_snr(sigmas[i - 2]) - _log_snr(before)) / h
    phi_2 = b / -h - 1
    phi_3 = phi_2 / -h - 1 / 2
    weights = np.linalg.solve([[1.0, 1.0], [r, 1.0]], [phi_2 / b, 2 * phi_3 / b])
    return result - (1 - here) * b * (weights[0] * (m2 - m1) / r + weights[1] * (x0 - m1))
