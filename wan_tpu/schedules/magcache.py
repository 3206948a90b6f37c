"""MagCache: steps that reuse what the blocks of a transformer added in the step before. Lossy: an option, no default.

Ma et al. 2025 (arXiv 2506.09045; github.com/Zehong-Ma/MagCache). Between steps, what all blocks together add to the
tokens, the residual, changes in its magnitude by a ratio that depends on the step and hardly on prompt or seed. Where
ratios say that an error accumulates slowly, the blocks are skipped and the last residual is added instead. Which steps
these are is known before the first one.

Decisions are those of diffusers' `MagCacheConfig`, in its float32 arithmetic, once for each branch of guidance.
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
    """What decides which steps are skipped; what is None takes the model's published value.

    threshold       error that may accumulate
    max_skip_steps  steps in a row that may be skipped
    retention_ratio part of each expert's steps, at its beginning, that is never skipped
    """

    threshold: float | None = None
    max_skip_steps: int | None = None
    retention_ratio: float | None = None

    def __str__(self) -> str:
        given = (self.threshold, self.max_skip_steps, self.retention_ratio)
        said = [f"{value:g}" for value in given if value is not None]
        return f"magcache:{','.join(said)}" if said else "magcache"


@dataclass(frozen=True)
class Curve:
    """How a model's residuals change, as it was measured for one schedule.

    ratios     [S, 2]: of each step, prompt's and negative prompt's branch
    first_low  the first step of the low-noise expert; None with one expert
    shift, boundary, solver  of that schedule; others have other curves
    usual      the published settings
    sigmas     the noise levels that it was measured with, where they were given, as a preset gives them: then it holds
               for these, its `first_low` and its solver alone, whatever shift and boundary are
    """

    ratios: tuple[tuple[float, float], ...]
    first_low: int | None
    shift: float
    boundary: float | None
    usual: MagCache
    sigmas: tuple[float, ...] | None = None
    solver: str = "unipc"


def magcache_of(text: str) -> MagCache:
    """Return the settings in `FORM`; raises `InvalidRequest`."""
    found = _TEXT.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        threshold, skip, retention = found["threshold"], found["skip"], found["retention"]
        made = MagCache(
            None if threshold is None else float(threshold),
            None if skip is None else int(skip),
            None if retention is None else float(retention),
        )
    except ValueError:
        raise InvalidRequest(f"cache is {text[:60]!r}; give {FORM}, such as magcache:0.06,2,0.2", "cache") from None
    for name, value, (lowest, highest) in (
        ("threshold", made.threshold, (0, 10)),
        ("max_skip_steps", made.max_skip_steps, (1, 100)),
        ("retention_ratio", made.retention_ratio, (0, 1)),
    ):
        if value is not None and not lowest <= value <= highest:
            nearest = min(max(value, lowest), highest)
            raise InvalidRequest(
                f"cache has the {name} {value:g}; allowed are {lowest} to {highest}, nearest {nearest:g}", "cache"
            )
    return made


def skipped(curve: Curve, cache: MagCache, phases: list[tuple[int, int]]) -> np.ndarray:
    """Return which branches of which steps are skipped, bool [S, 2].

    phases  first step and the one after the last of each expert, in order; each begins anew
    """
    threshold, most, retention = (
        getattr(curve.usual if getattr(cache, name) is None else cache, name)
        for name in ("threshold", "max_skip_steps", "retention_ratio")
    )
    ratios = np.array(curve.ratios, np.float32)
    halves = [ratios] if curve.first_low is None else [ratios[: curve.first_low], ratios[curve.first_low :]]
    # One that runs all steps has the curve of its side; a boundary that leaves one out is its model's own.
    found = [
        np.stack([_phase(_nearest(half[:, branch], stop - start), threshold, most, retention) for branch in (0, 1)], -1)
        for half, (start, stop) in zip(halves[-len(phases) :], phases, strict=True)
    ]
    return np.concatenate(found)


def _phase(ratios: np.ndarray, threshold: float, most: int, retention: float) -> np.ndarray:
    kept = int(retention * len(ratios) + 0.5)
    ratio, error, steps = np.float32(1), np.float32(0), 0
    found = np.zeros(len(ratios), bool)
    for i, scale in enumerate(ratios):
        if i < kept:
            continue
        ratio, steps = np.float32(ratio * scale), steps + 1
        error = np.float32(error + abs(np.float32(1) - ratio))
        # The first step has nothing to reuse.
        found[i] = i > 0 and error <= threshold and steps <= most
        if not found[i]:
            ratio, error, steps = np.float32(1), np.float32(0), 0
    return found


def _nearest(ratios: np.ndarray, length: int) -> np.ndarray:
    """Return a curve for another number of steps, as diffusers does."""
    if length == len(ratios):
        return ratios
    if length == 1:
        return ratios[-1:]
    scale = (len(ratios) - 1) / (length - 1)
    places = np.round(np.arange(length, dtype=np.float32) * np.float32(scale)).astype(int)
    found: np.ndarray = ratios[places]
    return found


USUAL = MagCache(0.06, 2, 0.2)  # of a curve that says nothing else


def curve_from(given: Any) -> Curve:
    """Return a curve from its JSON, {"ratios": [[1, 1], ...], "first_low", "shift", "boundary", "sigmas", "solver"}.

    Raises `KeyError`, `TypeError`, `ValueError`.
    """
    ratios = tuple((float(prompt), float(negative)) for prompt, negative in given["ratios"])
    first, boundary = given.get("first_low"), given.get("boundary")
    if not ratios or not np.isfinite(ratios).all() or (first is not None and not 0 < int(first) < len(ratios)):
        raise ValueError("ratios are pairs of numbers, and first_low one of their places")
    sigmas = given.get("sigmas")
    if sigmas is not None:
        sigmas = tuple(float(sigma) for sigma in sigmas)
        if len(sigmas) != len(ratios):
            raise ValueError("there is a pair of ratios for each of the sigmas")
    solver = str(given.get("solver", "unipc"))
    return Curve(ratios, None if first is None else int(first), float(given["shift"]), boundary, USUAL, sigmas, solver)
