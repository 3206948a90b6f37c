"""Schedulers of models that predict v, with a diffusion's noise schedule: DDIM, and DPM-Solver++ (2M, SDE).

With v = alpha noise - sigma clean and alpha^2 + sigma^2 = 1, clean = alpha x - sigma v. Sources: DDIM, Song et al. 2020
(arXiv 2010.02502); DPM-Solver++, Lu et al. 2022 (arXiv 2211.01095); zero terminal SNR, Lin et al. 2023 (arXiv
2305.08891). Conventions (spacing, the shift of the SNR, the last step, which noise is drawn) are those of diffusers'
schedulers with a shift of the SNR; tests compare every step with theirs.
"""

import functools
from dataclasses import dataclass

import numpy as np

from wan_tpu.errors import InvalidRequest
from wan_tpu.schedules.schedule import TRAIN_TIMESTEPS, Schedule, make_schedule

SPACINGS = ("trailing", "leading", "linspace")


@dataclass(frozen=True)
class NoiseSchedule:
    """The noise that a model was trained with at each of its 1,000 timesteps.

    Attributes:
        beta_start, beta_end: The first and last betas, whose square roots grow linearly.
        snr_shift: Divisor of the signal-to-noise ratio.
        zero_snr: Whether the last timestep is pure noise.
        final_one: Whether a video is completely clean after its last step, instead of only as clean as at timestep 0.
        spacing: How steps are spread over the timesteps, one of `SPACINGS`.
    """

    beta_start: float = 0.00085
    beta_end: float = 0.012
    snr_shift: float = 3.0
    zero_snr: bool = False
    final_one: bool = True
    spacing: str = "leading"

    def alphas_squared(self) -> np.ndarray:
        """Return the share of the signal's variance at each timestep, float64 [1000]."""
        betas = np.linspace(self.beta_start**0.5, self.beta_end**0.5, TRAIN_TIMESTEPS) ** 2
        shares = np.cumprod(1 - betas)
        shares = shares / (self.snr_shift + (1 - self.snr_shift) * shares)
        if self.zero_snr:
            first, last = np.sqrt(shares[0]), np.sqrt(shares[-1])
            shares = ((np.sqrt(shares) - last) * (first / (first - last))) ** 2
        return shares

    def timesteps(self, steps: int) -> np.ndarray:
        """Return the timesteps of a number of steps, int64 [S], falling.

        Raises:
            InvalidRequest: There are more steps than timesteps.
        """
        if steps > TRAIN_TIMESTEPS:
            raise InvalidRequest(
                f"steps is {steps}; allowed: at most {TRAIN_TIMESTEPS}, the timesteps that the model was trained for",
                "steps",
            )
        if self.spacing == "linspace":
            return np.linspace(0, TRAIN_TIMESTEPS - 1, steps).round()[::-1].astype(np.int64)
        if self.spacing == "leading":
            return np.arange(steps)[::-1] * (TRAIN_TIMESTEPS // steps)
        spaced = np.round(np.arange(TRAIN_TIMESTEPS, 0, -TRAIN_TIMESTEPS / steps)).astype(np.int64)
        # For 62 step counts, 61 for example, rounding yields one step too many, which ends at timestep -1. diffusers
        # runs that step, with the noise level of timestep 999, on a video that is already clean.
        return spaced[:steps] - 1

    def levels(self, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (timesteps, the signal's share at each one, its share after each step); diffusers' steps are equal."""
        timesteps, share = self.timesteps(steps), self.alphas_squared()
        following = timesteps - TRAIN_TIMESTEPS // steps
        final = 1.0 if self.final_one else share[0]
        return timesteps, share[timesteps], np.where(following >= 0, share[following], final)


@functools.lru_cache(maxsize=64)
def ddim(noise: NoiseSchedule, steps: int) -> Schedule:
    """Return the schedule of DDIM without added noise."""
    timesteps, here, there = noise.levels(steps)
    noise_ratio = np.sqrt((1 - there) / (1 - here))
    matrices = np.stack([noise_ratio, np.sqrt(there) - np.sqrt(here) * noise_ratio], axis=-1)[:, None, :]
    return make_schedule(timesteps, np.sqrt(1 - here), matrices, alphas=np.sqrt(here))


@functools.lru_cache(maxsize=64)
def dpm(noise: NoiseSchedule, steps: int) -> Schedule:
    """Return the schedule of DPM-Solver++ of second order with noise, over (x, clean, previous clean, noise).

    The first step is of first order, and so is a step that ends at timestep 0 or below. Before a second-order step,
    diffusers draws noise for the first order, too, so the second of the two arrays is used.
    """
    timesteps, here, there = noise.levels(steps)
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # The first step has no signal; after the last there is no noise.
        before, after = (0.5 * np.log(share / (1 - share)) for share in (here, there))
        h = after - before
        ratio = np.diff(before) / h[1:]  # The previous step's length divided by this one's.
        noise_ratio = np.sqrt((1 - there) / (1 - here)) * np.exp(-h)
        fresh = np.sqrt(1 - there) * np.sqrt(1 - np.exp(-2 * h))
    x0_weight = -np.expm1(-2 * h) * np.sqrt(there)
    second = np.append(False, timesteps[1:] - TRAIN_TIMESTEPS // steps >= 0)
    with np.errstate(divide="ignore"):
        back = np.where(second, np.append(0.0, 1 / (2 * ratio)), 0.0)
    zeros, ones = np.zeros(steps), np.ones(steps)
    matrices = np.stack(
        [
            np.stack([noise_ratio, x0_weight * (1 + back), -x0_weight * back, fresh], axis=-1),
            np.stack([zeros, ones, zeros, zeros], axis=-1),
        ],
        axis=1,
    )
    return make_schedule(
        timesteps, np.sqrt(1 - here), matrices, alphas=np.sqrt(here), draws=[2 if twice else 1 for twice in second]
    )
