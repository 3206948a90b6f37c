"""The schedules of a chunk's stages, and the transition from one stage to the next, on the host in float64.

A chunk is denoised at up to three sizes. Each stage runs through a range of the training timesteps of its own, with
noise levels that fall from 0.999 to 0; before the next one its latents are enlarged and get noise again, whose share
follows from where that stage's range begins.

Source: HeliosScheduler and HeliosDMDScheduler of diffusers 0.42, with the sigmas that its pipelines pass.
"""

import functools
import itertools
import math

import numpy as np

from wan_tpu.families.helios.published import PyramidConfig
from wan_tpu.schedules.flow import unipc_matrices
from wan_tpu.schedules.schedule import TRAIN_TIMESTEPS, Schedule, make_schedule

HIGHEST = 0.999  # The first noise level of each stage.


@functools.lru_cache(maxsize=64)
def stage_schedule(pyramid: PyramidConfig, stage: int, steps: int, tokens: int, *, amplified: bool = False) -> Schedule:
    """Return the schedule of one stage of a chunk, without guidance.

    Args:
        stage: The stage, from 0, the smallest.
        tokens: Tokens of its latents.
        amplified: Whether a distilled model takes twice as many steps, as it may in the first chunk.
    """
    timesteps, sigmas = _levels(pyramid, stage, steps * (1 + amplified), tokens)
    if pyramid.solver == "dmd":
        return _dmd(timesteps, sigmas)
    # Pipelines pass timesteps as integers where there are several stages.
    rounded = np.trunc(timesteps) if pyramid.stages > 1 else timesteps
    if pyramid.solver == "unipc":
        return make_schedule(rounded, sigmas[:-1], unipc_matrices(sigmas))
    ratio = sigmas[1:] / sigmas[:-1]
    return make_schedule(rounded, sigmas[:-1], np.stack([ratio, 1 - ratio], axis=-1)[:, None, :])


def mixing_factors(pyramid: PyramidConfig, stage: int) -> tuple[float, float]:
    """Return the factors of the enlarged latents and of the noise that a stage after the first one starts from."""
    signal = 1 - _training_sigmas(pyramid)[int(pyramid.stage_range[stage] * TRAIN_TIMESTEPS)]
    alpha = 1 / (math.sqrt(1 + 1 / pyramid.gamma) * (1 - signal) + signal)
    return alpha, alpha * (1 - signal) / math.sqrt(pyramid.gamma)


def _levels(pyramid: PyramidConfig, stage: int, steps: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a stage's timesteps [S] and its noise levels [S + 1], the last of which is 0."""
    if pyramid.stages == 1:
        sigmas = np.append(np.linspace(HIGHEST, 0, steps + 1)[:-1], 0)
        sigmas = _shift(pyramid, sigmas, tokens)
        return sigmas[:-1] * TRAIN_TIMESTEPS, sigmas
    highest, lowest = _stage_ends(pyramid)[stage]
    distilled = pyramid.solver == "dmd"
    # The schedule of a distilled model has one more step, which isn't run, because its estimates are already complete.
    points = steps + distilled
    grid = np.linspace(highest, lowest, TRAIN_TIMESTEPS + 1)[:-1]
    levels = np.linspace(HIGHEST, 0, TRAIN_TIMESTEPS + 1)[:-1]
    timesteps = np.linspace(grid[0], grid[-1], points)[:steps]
    sigmas = np.append(np.linspace(levels[0], levels[-1], points)[:steps], 0)
    if pyramid.dynamic:
        sigmas = _shift(pyramid, sigmas, tokens)
        timesteps = np.min(grid) + sigmas[:-1] * (np.max(grid) - np.min(grid))
    return timesteps, sigmas


def _shift(pyramid: PyramidConfig, sigmas: np.ndarray, tokens: int) -> np.ndarray:
    """Raise noise levels, by more the more tokens there are; 0 stays 0."""
    if not pyramid.dynamic:
        return sigmas
    (few, many), (least, most) = pyramid.shift_tokens, pyramid.shifts
    shift = least + (tokens - few) * (most - least) / (many - few)
    factor = math.exp(shift) if pyramid.shift_type == "exponential" else shift
    return factor * sigmas / (factor * sigmas + 1 - sigmas)


@functools.lru_cache(maxsize=8)
def _training_sigmas(pyramid: PyramidConfig) -> np.ndarray:
    """Return the noise levels of training, from the highest, [1000]."""
    sigmas = 1.0 - np.linspace(1, 1 / TRAIN_TIMESTEPS, TRAIN_TIMESTEPS + 1)
    levels: np.ndarray = np.flip(pyramid.shift * sigmas / (1 + (pyramid.shift - 1) * sigmas))[:-1]
    return levels


@functools.lru_cache(maxsize=8)
def _stage_ends(pyramid: PyramidConfig) -> list[tuple[float, float]]:
    """Return the first and the last training timestep of each stage.

    A stage's share of the timesteps is the way that its noise level goes, from the one that the noise before it leaves.
    """
    levels, distances = _training_sigmas(pyramid), []
    for stage in range(pyramid.stages):
        start, end = (int(pyramid.stage_range[stage + i] * TRAIN_TIMESTEPS) for i in range(2))
        sigma = float(levels[start])
        if stage > 0:
            sigma = 1 - mixing_factors(pyramid, stage)[0] * (1 - sigma)
        distances.append(sigma - (float(levels[end]) if end < TRAIN_TIMESTEPS else 0.0))
    shares = [sum(distances[:stage]) / sum(distances) for stage in range(pyramid.stages)]
    indices = [int(share * TRAIN_TIMESTEPS) for share in (*shares, 0.9999999999999999)]
    timesteps = levels * TRAIN_TIMESTEPS
    return [
        (min(float(timesteps[first]), 999.0), float(timesteps[min(last, TRAIN_TIMESTEPS - 1)]))
        for first, last in itertools.pairwise(indices)
    ]


def _dmd(timesteps: np.ndarray, sigmas: np.ndarray) -> Schedule:
    """Return the steps of a distilled model as matrices over (x, x0, start).

    Each step makes a complete estimate x0, and mixes it with the latents that the stage started from.
    """
    rounded = np.trunc(timesteps)
    nearest = np.abs(timesteps - rounded[:, None]).argmin(axis=1)  # Levels are looked up by the integer timestep.
    here = sigmas[nearest]
    x, x0, start = np.eye(3)
    matrices = []
    for i, following in enumerate((*here[1:], 0.0)):
        noisy = x if i == 0 else start
        matrices.append(np.stack([(1 - following) * x0 + following * noisy, noisy]))
    return make_schedule(rounded, here, np.stack(matrices))
