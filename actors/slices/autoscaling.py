"""How many replicas a pool should have: Serve asks every few seconds, and waits before it acts (its own delays)."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

LOAD = "stage_load"  # what replicas report: a request's seconds on the slice, over how long it may wait for one


class SliceTime:
    """How many seconds of a slice a request takes, the latest counting most."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._freed = 0.0  # time.monotonic() when the latest one left

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Count what is done inside as a request's; of several at once, each from when the one before has left."""
        start = time.monotonic()
        try:
            yield
        finally:
            now = time.monotonic()
            took, self._freed = now - max(start, self._freed), now
            self.seconds = took if not self.seconds else 0.8 * self.seconds + 0.2 * took


def replicas_needed(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the replicas at which nobody waits longer than `PipelineSettings.scale_wait_s`, within the bounds.

    With n requests at a pool whose stage takes s seconds, the last of them waits for n s / replicas.
    """
    reported = [value for value in (context.aggregated_metrics or {}).get(LOAD, {}).values() if value]
    load = sum(reported) / len(reported) if reported else 1.0
    wanted = math.ceil(context.total_num_requests * load)
    lowest, highest = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(lowest, min(highest, wanted)), {}
