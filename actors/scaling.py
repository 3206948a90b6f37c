"""How many replicas a pool should have: Serve asks every few seconds, and waits before it acts (its own delays)."""

import math
from typing import Any

LOAD = "stage_load"  # what replicas report: a request's seconds on the slice, over how long it may wait for one


def replicas_needed(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the replicas at which nobody waits longer than `PipelineSettings.scale_wait_s`, within the bounds.

    With n requests at a pool whose stage takes s seconds, the last of them waits for n s / replicas.
    """
    reported = [value for value in (context.aggregated_metrics or {}).get(LOAD, {}).values() if value]
    load = sum(reported) / len(reported) if reported else 1.0
    wanted = math.ceil(context.total_num_requests * load)
    lowest, highest = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(lowest, min(highest, wanted)), {}
