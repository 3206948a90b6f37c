"""95 % intervals of shares and means over requests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959964  # The 97.5 % quantile of the normal distribution.


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, scale: float = 100, digits: int = 0) -> str:
        """Format as "87 (79 to 92)"; `scale` is 100 for percent."""
        value, low, high = (f"{scale * x:.{digits}f}" for x in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


def share(outcomes: Sequence[bool]) -> Estimate:
    """Return the share of true outcomes with Wilson's interval (E. B. Wilson, JASA 22, 1927)."""
    n = len(outcomes)
    p = sum(map(bool, outcomes)) / n
    middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))


def mean(values: Sequence[float], seed: int = 0, percent: float = 95) -> Estimate:
    """Return the mean with the bootstrap's percentile interval, 10,000 resamples; `percent` of them lie in it."""
    array = np.asarray(values, np.float64)
    drawn = np.random.default_rng(seed).choice(array, (10_000, len(array))).mean(axis=1)
    low, high = np.percentile(drawn, (50 - percent / 2, 50 + percent / 2))
    return Estimate(float(array.mean()), float(low), float(high))
