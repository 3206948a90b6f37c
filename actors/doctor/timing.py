"""Measure calls on the devices."""

import time
from collections.abc import Callable
from typing import Any

import jax

TRIES = 3


def measure(call: Callable[[], Any], tries: int = TRIES) -> list[float]:
    """Return the seconds of some calls; one before them, which compiles, isn't counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return times


def time_best(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of some calls."""
    return min(measure(call))
