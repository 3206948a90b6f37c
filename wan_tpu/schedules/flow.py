"""Schedulers of flow-matching models: UniPC and Euler, and the sampling of distilled consistency models.

With a flow model the velocity v gives the clean estimate x0 = x - sigma v.

Sources: UniPC, Zhao et al. 2023 (arXiv 2302.04867), B(h) = expm1(h), order 2; its conventions for flow models
(sigma grid, the first sigma, float32 rounding, lower order at the end) are those of diffusers'
UniPCMultistepScheduler, Euler's those of FlowMatchEulerDiscreteScheduler. rCM (arXiv 2510.08431) as in
github.com/thu-ml/TurboDiffusion, inference/wan2.2_i2v_infer.py: each step makes a whole clean estimate and adds fresh
noise to it, which is FlowMatchEulerDiscreteScheduler's stochastic sampling.
"""

import dataclasses
import functools
import math

import numpy as np

from wan_tpu.schedules.schedule import TRAIN_TIMESTEPS, Schedule, make_schedule


def _shift(sigmas: np.ndarray, shift: float) -> np.ndarray:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


@functools.lru_cache(maxsize=64)
def euler(steps: int, shift: float, first: int = 0) -> Schedule:
    """Return the schedule of Euler's method for a timestep shift. It needs no history, whichever step is run first."""
    # diffusers shifts the training grid, spaces the steps between its ends, and shifts once more.
    last = _shift(np.array(1 / TRAIN_TIMESTEPS, np.float32), shift)
    return _euler(np.linspace(TRAIN_TIMESTEPS, float(last) * TRAIN_TIMESTEPS, steps) / TRAIN_TIMESTEPS, shift)


@functools.lru_cache(maxsize=64)
def euler_even(steps: int, shift: float) -> Schedule:
    """Return the schedule of Euler's method on equal steps down to 0, shifted once.

    Pipelines that pass their own sigmas to diffusers' scheduler do this: linspace(1, 0, steps + 1) without the 0.
    """
    return _euler(np.linspace(1, 0, steps + 1)[:-1], shift)


def _euler(grid: np.ndarray, shift: float) -> Schedule:
    return euler_at(tuple(_shift(grid, shift).tolist()))


@functools.lru_cache(maxsize=64)
def euler_at(noise: tuple[float, ...], first: int = 0) -> Schedule:
    """Return the schedule of Euler's method for its steps' noise levels, shift included; the last step ends at 0."""
    sigmas = np.array(noise, np.float64).astype(np.float32)
    following = np.append(sigmas[1:], np.float32(0)).astype(np.float64)
    ratio = following / sigmas
    matrices = np.stack([ratio, 1 - ratio], axis=-1)[:, None, :]
    return make_schedule(sigmas * np.float32(TRAIN_TIMESTEPS), sigmas.astype(np.float64), matrices)


@functools.lru_cache(maxsize=64)
def euler_ancestral_at(noise: tuple[float, ...]) -> Schedule:
    """Return the schedule of the ancestral Euler method for its steps' noise levels; the last step ends at 0.

    A step leads further down than the next level, and fresh noise leads back up to it, so that signal and noise keep
    their shares. Source: EulerAncestralDiffusionStep of ltx_core/components/diffusion_steps.py, ltx-core at 400fd310,
    with eta 1; its numbers are float32.
    """
    schedule = euler_at(noise)
    sigmas = schedule.sigmas.astype(np.float32)
    before, following = sigmas[:-1], sigmas[1:]
    down = following * (np.float32(1) + (following / before - np.float32(1)))
    ratio, signal = down / before, (np.float32(1) - following) / (np.float32(1) - down)
    fresh = np.sqrt(np.maximum(following**2 - down**2 * signal**2, 0))
    rows = np.stack([signal * ratio, signal * (1 - ratio), fresh], axis=-1).astype(np.float64)
    matrices = np.concatenate([rows, [[0.0, 1.0, 0.0]]])[:, None, :]
    draws = (1,) * len(before) + (0,)
    return dataclasses.replace(schedule, matrices=matrices, draws=draws)


# The angles that rCM's model was distilled for: sin is the share of the noise, cos the share of the video.
RCM_ANGLES = (math.atan(200), 1.5, 1.4, 1.0)


def rcm(steps: int, shift: float, first: int = 0) -> Schedule:
    """Return the schedule of rCM's sampling for one to four steps; the shift has no effect."""
    angles = RCM_ANGLES[:steps]
    return rcm_at(tuple(math.sin(angle) / (math.sin(angle) + math.cos(angle)) for angle in angles))


@functools.lru_cache(maxsize=64)
def rcm_at(noise: tuple[float, ...], first: int = 0) -> Schedule:
    """Return the schedule of rCM's sampling for its steps' noise levels; the last step ends at 0."""
    sigmas = np.array(noise, np.float64)
    following = np.append(sigmas[1:], 0.0)
    matrices = np.stack([np.zeros_like(following), 1 - following, following], axis=-1)[:, None, :]
    schedule = make_schedule(sigmas * TRAIN_TIMESTEPS, sigmas, matrices, draws=(1,) * len(sigmas))
    return dataclasses.replace(schedule, start=float(sigmas[0]))


def unipc(steps: int, shift: float, first: int = 0) -> Schedule:
    """Return the schedule of UniPC for a timestep shift; `first` is the step that is run first, without a history."""
    return unipc_at(tuple(_shift(np.linspace(1, 1 / TRAIN_TIMESTEPS, steps + 1)[:-1], shift).tolist()), first)


@functools.lru_cache(maxsize=64)
def unipc_at(noise: tuple[float, ...], first: int = 0) -> Schedule:
    """Return the schedule of UniPC for its steps' noise levels, shift included; the last step ends at 0.

    `first` is the step that is run first, without a history.
    """
    sigmas = np.array(noise, np.float64)
    if abs(sigmas[0] - 1) < 1e-6:
        sigmas[0] -= 1e-6  # log(1 - sigma) must stay finite.
    timesteps = (sigmas * TRAIN_TIMESTEPS).astype(np.int64).astype(np.float32)
    # diffusers keeps its sigmas in float32. Near 1 that moves log(1 - sigma) by a percent, so a checkpoint's published
    # results were made with the rounded values, not the exact ones.
    sigmas = np.append(sigmas, 0).astype(np.float32).astype(np.float64)
    later = unipc_matrices(sigmas[first:])
    matrices = np.concatenate([np.zeros((first, *later.shape[1:])), later])
    return make_schedule(timesteps, sigmas[:-1], matrices)


def unipc_matrices(sigmas: np.ndarray) -> np.ndarray:
    """Return UniPC's steps from each noise level to the next, float64 [S, 4, 5] for S + 1 levels."""
    return np.stack([_unipc_step(sigmas, i) for i in range(len(sigmas) - 1)])


def _unipc_step(sigmas: np.ndarray, i: int) -> np.ndarray:
    """Return step i as a matrix over (x, x0, last, m1, m2), [4, 5].

    `last` is the corrected sample of step i-1; m1 and m2 are the clean estimates of steps i-1 and i-2.
    """
    steps = len(sigmas) - 1
    x, x0, last, m1, m2 = np.eye(5)
    corrected = x
    if i > 0:
        corrector_order = min(2, i, steps - (i - 1))  # The order of the prediction that is corrected.
        corrected = _correct(sigmas, i, corrector_order, last, x0, m1, m2)
    predictor_order = min(2, i + 1, steps - i)
    return np.stack([_predict(sigmas, i, predictor_order, corrected, x0, m1), corrected, x0, m1])


def _log_snr(sigma: float) -> float:
    return math.inf if sigma == 0 else math.log(1 - sigma) - math.log(sigma)


def _predict(sigmas: np.ndarray, i: int, order: int, sample: np.ndarray, x0: np.ndarray, m1: np.ndarray) -> np.ndarray:
    """Take UniP's step from sigma_i to sigma_i+1 (equation 3 of the paper, predicting x0)."""
    here, there = sigmas[i], sigmas[i + 1]
    h = _log_snr(there) - _log_snr(here)
    b = math.expm1(-h)
    result = there / here * sample - (1 - there) * b * x0
    if order == 2:
        r = (_log_snr(sigmas[i - 1]) - _log_snr(here)) / h
        result = result - (1 - there) * b * 0.5 * (m1 - x0) / r
    return result


def _correct(
    sigmas: np.ndarray, i: int, order: int, last: np.ndarray, x0: np.ndarray, m1: np.ndarray, m2: np.ndarray
) -> np.ndarray:
    """Take UniC's step: repeat step i-1 from its corrected sample, now with the estimate x0 at sigma_i."""
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


@functools.lru_cache(maxsize=64)
def euler_rising(steps: int, shift: float) -> Schedule:
    """Return the schedule of Euler's method for a transformer whose time rises from 0, of noise, to 1.

    The grid is diffusers' MiniMaxH3Scheduler's, linspace(1, 0, steps + 1) shifted once, in float32.
    """
    return _euler_rising(_shift(_torch_linspace(steps + 1), shift)[:-1])


@functools.lru_cache(maxsize=64)
def euler_rising_at(noise: tuple[float, ...]) -> Schedule:
    """Return the same schedule for its steps' noise levels, shift included; the last step ends at 0."""
    return _euler_rising(np.array(noise, np.float64).astype(np.float32))


def _euler_rising(sigmas: np.ndarray) -> Schedule:
    """Return a schedule whose velocity leads from noise to the video: clean = x + (1 - t) v with t = 1 - sigma."""
    timesteps, ratio = 1 - sigmas, np.append(sigmas[1:], np.float32(0)) / sigmas
    matrices = np.stack([ratio, 1 - ratio], axis=-1)[:, None, :].astype(np.float64)
    return make_schedule(timesteps, -(1 - timesteps).astype(np.float64), matrices)


def _torch_linspace(points: int) -> np.ndarray:
    """Return torch.linspace(1, 0, points): multiples of a float32 step from either end, rounded once."""
    step, index = float(np.float32(-1) / np.float32(points - 1)), np.arange(points)
    return np.where(index < points // 2, 1 + step * index, -step * (points - 1 - index)).astype(np.float32)
