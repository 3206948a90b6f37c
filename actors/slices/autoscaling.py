"""Decide how many replicas a pool should have. Serve asks every few seconds, and applies its own delays."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

# The metric that replicas report: the seconds that a request occupies the slice, divided by the wait that is allowed.
LOAD = "stage_load"


class SliceTime:
    """The seconds for which a request occupies the slice, as an average that favours the latest requests."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._freed = 0.0  # `time.monotonic()` when the latest request left.

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the block as one request. With overlapping requests, each counts from the end of the one before."""
        start = time.monotonic()
        try:
            yield
        finally:
            now = time.monotonic()
            took, self._freed = now - max(start, self._freed), now
            self.seconds = took if not self.seconds else 0.8 * self.seconds + 0.2 * took


def count_replicas_needed(context: Any) -> tuple[int, dict[str, Any]]:
    """Return how many replicas keep every wait within `PipelineSettings.scale_wait_s`, inside the pool's bounds.

    With n requests at a pool whose stage takes s seconds, the last of them waits for n * s / replicas seconds.
    """
    reported = [value for value in (context.aggregated_metrics or {}).get(LOAD, {}).values() if value]
    load = sum(reported) / len(reported) if reported else 1.0
    replicas = math.ceil(context.total_num_requests * load)
    lowest, highest = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(lowest, min(highest, replicas)), {}
