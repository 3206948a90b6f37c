"""A schedule: all numbers of a run's steps, computed on the host in float64.

Every model's prediction gives an estimate of the clean latents, clean = alpha x - sigma prediction, and every step of a
scheduler is one small matrix: from the vector of arrays (x, clean, *history, *noise) to (next x, *next history). The
device only forms linear combinations; there is no linear solve, no logarithm and no branch in the compiled step.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

TRAIN_TIMESTEPS = 1000


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The numbers of one run: S steps, K history terms, N arrays of fresh noise per step."""

    timesteps: np.ndarray  # Float32 [S], the transformer's input.
    # Float64 [S], alpha in clean = alpha x - sigma prediction; None for a flow model, whose alphas are all 1.
    alphas: np.ndarray | None
    sigmas: np.ndarray  # Float64 [S], sigma in the same formula.
    matrices: np.ndarray  # Float64 [S, K+1, K+2+N]: (next x, *next history) = matrix @ (x, clean, *history, *noise).
    guidance: np.ndarray  # Float64 [S], the scale of classifier-free guidance, or [S, ...] for a family with several.
    # For each step, how many arrays of noise are drawn from the request's generator; of more than N, the last N are
    # used. If no step of an expert draws noise, its program has no noise argument.
    draws: tuple[int, ...]
    # Float32 [S], the timestep after each step's, for a transformer that takes it as well; else None.
    following: np.ndarray | None = None
    start: float = 1.0  # The factor of the noise before the first step.

    def __post_init__(self) -> None:
        arrays = (self.timesteps, self.alphas, self.sigmas, self.matrices, self.guidance, self.following)
        for array in (array for array in arrays if array is not None):
            assert len(array) == self.steps, f"{len(array)} numbers for {self.steps} steps"
            array.flags.writeable = False  # Schedules are cached and shared.
        assert len(self.draws) == self.steps, f"{len(self.draws)} draws for {self.steps} steps"

    @property
    def steps(self) -> int:
        """Number of steps, S."""
        return len(self.timesteps)

    @property
    def history_terms(self) -> int:
        """Number of arrays that a step passes to the next in addition to the latents, K."""
        return self.matrices.shape[1] - 1

    @property
    def noise_terms(self) -> int:
        """Number of arrays of fresh noise that a step takes, N."""
        return self.matrices.shape[2] - 2 - self.history_terms

    def with_following(self) -> "Schedule":
        """Return the schedule with the timestep that follows each step's, 0 after the last."""
        return dataclasses.replace(self, following=np.append(self.timesteps[1:], np.float32(0)))

    def followed_by(self, other: "Schedule") -> "Schedule":
        """Return the steps of both, one after the other; neither may have alphas or following timesteps."""
        terms = max(self.noise_terms, other.noise_terms)
        padded = [np.pad(x.matrices, ((0, 0), (0, 0), (0, terms - x.noise_terms))) for x in (self, other)]
        return dataclasses.replace(
            self,
            timesteps=np.concatenate([self.timesteps, other.timesteps]),
            sigmas=np.concatenate([self.sigmas, other.sigmas]),
            matrices=np.concatenate(padded),
            guidance=np.concatenate([self.guidance, other.guidance]),
            draws=self.draws + other.draws,
        )

    def keep_result(self, steps: int) -> "Schedule":
        """Return a schedule whose result is fixed after `steps` steps; later steps run, but don't change it.

        It keeps that result as a history. The schedule itself may have none.
        """
        terms, result = self.matrices.shape[2] + 1, 2
        matrices = np.zeros((self.steps, 2, terms))
        matrices[:, 0] = np.insert(self.matrices[:, 0], result, 0, axis=1)
        matrices[:steps, 1] = matrices[:steps, 0]
        matrices[steps:, 1] = matrices[-1, 0] = np.eye(terms)[result]
        return dataclasses.replace(self, matrices=matrices)

    def with_guidance(self, guidance: Sequence[float] | np.ndarray) -> "Schedule":
        """Return the schedule with a scale of guidance for each step."""
        return dataclasses.replace(self, guidance=np.array(guidance, np.float64))


def make_schedule(
    timesteps: np.ndarray,
    sigmas: np.ndarray,
    matrices: np.ndarray,
    *,
    alphas: np.ndarray | None = None,
    draws: Sequence[int] | None = None,
) -> Schedule:
    """Return a schedule without guidance; by default of a flow model, and without fresh noise."""
    steps = len(timesteps)
    return Schedule(
        timesteps=timesteps.astype(np.float32),
        alphas=alphas,
        sigmas=sigmas,
        matrices=matrices,
        guidance=np.ones(steps),
        draws=(0,) * steps if draws is None else tuple(draws),
    )
