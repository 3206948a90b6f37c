"""MagCache: some steps reuse what a transformer's blocks added in the previous step. It is lossy, and off by default.

Ma et al. 2025 (arXiv 2506.09045; github.com/Zehong-Ma/MagCache). The magnitude of the residual, which is what all
blocks together add to the tokens, changes from step to step by a ratio that depends on the step and hardly on the
prompt or the seed. While these ratios show that the error accumulates slowly, the blocks are skipped and the last
residual is added instead. Which steps are skipped is known before the first one.

Decisions are those of diffusers' `MagCacheConfig`, in its float32 arithmetic, for each branch of guidance separately.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from wan_tpu.errors import InvalidRequest

FORM = "magcache[:THRESHOLD[,MAX_SKIP_STEPS[,RETENTION_RATIO]]]"
_TEXT = re.compile(r"magcache(?::(?P<threshold>[0-9.]+)(?:,(?P<skip>[0-9]+)(?:,(?P<retention>[0-9.]+))?)?)?")


@dataclass(frozen=True)
class MagCache:
    """Settings that decide which steps are skipped; None means the model's published value."""

    threshold: float | None = None
    max_skip_steps: int | None = None  # How many steps in a row may be skipped.
    retention_ratio: float | None = None  # The share of each expert's steps, at its beginning, that is never skipped.

    def __str__(self) -> str:
        settings = (self.threshold, self.max_skip_steps, self.retention_ratio)
        texts = [f"{value:g}" for value in settings if value is not None]
        return f"magcache:{','.join(texts)}" if texts else "magcache"


@dataclass(frozen=True)
class Curve:
    """The change of a model's residuals from step to step, measured for one schedule.

    Attributes:
        ratios: [S, 2]: for each step, the ratios of the prompt's and the negative prompt's branches.
        first_low: The first step of the low-noise expert; None with one expert.
        shift, boundary, solver: The schedule's settings; other schedules have other curves.
        sigmas: The noise levels of the measurement, if they were set explicitly, as presets do. The curve is then valid
            only for these, its `first_low` and its solver, but for any shift and boundary.
    """

    ratios: tuple[tuple[float, float], ...]
    first_low: int | None
    shift: float
    boundary: float | None
    defaults: MagCache
    sigmas: tuple[float, ...] | None = None
    solver: str = "unipc"


def parse_magcache(text: str) -> MagCache:
    """Parse settings in `FORM`; raises `InvalidRequest`."""
    match = _TEXT.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        threshold, skip, retention = match["threshold"], match["skip"], match["retention"]
        cache = MagCache(
            None if threshold is None else float(threshold),
            None if skip is None else int(skip),
            None if retention is None else float(retention),
        )
    except ValueError:
        raise InvalidRequest(f"cache is {text[:60]!r}; give {FORM}, such as magcache:0.06,2,0.2", "cache") from None
    for name, value, (lowest, highest) in (
        ("threshold", cache.threshold, (0, 10)),
        ("max_skip_steps", cache.max_skip_steps, (1, 100)),
        ("retention_ratio", cache.retention_ratio, (0, 1)),
    ):
        if value is not None and not lowest <= value <= highest:
            nearest = min(max(value, lowest), highest)
            raise InvalidRequest(
                f"cache has {name} {value:g}; allowed: {lowest} to {highest}, nearest {nearest:g}", "cache"
            )
    return cache


def choose_skipped(curve: Curve, cache: MagCache, phases: list[tuple[int, int]]) -> np.ndarray:
    """Return which branches of which steps are skipped, bool [S, 2].

    Args:
        phases: Start and stop of each expert's steps, in order. The error is reset for each.
    """
    threshold, most, retention = (
        getattr(curve.defaults if getattr(cache, name) is None else cache, name)
        for name in ("threshold", "max_skip_steps", "retention_ratio")
    )
    ratios = np.array(curve.ratios, np.float32)
    halves = [ratios] if curve.first_low is None else [ratios[: curve.first_low], ratios[curve.first_low :]]
    # If one of two experts runs all steps it uses the second half of the curve.
    skipped = [
        np.stack(
            [
                _choose_in_phase(_resample(half[:, branch], stop - start), threshold, most, retention)
                for branch in (0, 1)
            ],
            axis=-1,
        )
        for half, (start, stop) in zip(halves[-len(phases) :], phases, strict=True)
    ]
    return np.concatenate(skipped)


def _choose_in_phase(ratios: np.ndarray, threshold: float, most: int, retention: float) -> np.ndarray:
    first = int(retention * len(ratios) + 0.5)
    ratio, error, steps = np.float32(1), np.float32(0), 0
    skipped = np.zeros(len(ratios), bool)
    for i, scale in enumerate(ratios):
        if i < first:
            continue
        ratio, steps = np.float32(ratio * scale), steps + 1
        error = np.float32(error + abs(np.float32(1) - ratio))
        # The first step has nothing to reuse.
        skipped[i] = i > 0 and error <= threshold and steps <= most
        if not skipped[i]:
            ratio, error, steps = np.float32(1), np.float32(0), 0
    return skipped


def _resample(ratios: np.ndarray, length: int) -> np.ndarray:
    """Resample a curve to another number of steps, as diffusers does."""
    if length == len(ratios):
        return ratios
    if length == 1:
        return ratios[-1:]
    scale = (len(ratios) - 1) / (length - 1)
    indices = np.round(np.arange(length, dtype=np.float32) * np.float32(scale)).astype(int)
    resampled: np.ndarray = ratios[indices]
    return resampled


DEFAULTS = MagCache(0.06, 2, 0.2)  # The settings of curves without settings of their own.


def read_curve(data: Any) -> Curve:
    """Return a curve from its JSON, {"ratios": [[1, 1], ...], "first_low", "shift", "boundary", "sigmas", "solver"}.

    Raises:
        KeyError, TypeError, ValueError: The JSON doesn't describe a curve.
    """
    ratios = tuple((float(prompt), float(negative)) for prompt, negative in data["ratios"])
    first, boundary = data.get("first_low"), data.get("boundary")
    if not ratios or not np.isfinite(ratios).all() or (first is not None and not 0 < int(first) < len(ratios)):
        raise ValueError("ratios are pairs of numbers, and first_low one of their places")
    sigmas = data.get("sigmas")
    if sigmas is not None:
        sigmas = tuple(float(sigma) for sigma in sigmas)
        if len(sigmas) != len(ratios):
            raise ValueError("there is a pair of ratios for each of the sigmas")
    first_low = None if first is None else int(first)
    solver = str(data.get("solver", "unipc"))
    return Curve(ratios, first_low, float(data["shift"]), boundary, DEFAULTS, sigmas, solver)
