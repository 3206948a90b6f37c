"""Which nodes are about to be taken away: preempted by the cloud, drained by an operator or an autoscaler."""

import logging
import time
from collections.abc import Iterable

from cluster import ray_private

log = logging.getLogger(__name__)

ANSWER_S = 3.0  # Ray's control store answers in milliseconds; Ray Serve's own controller waits as long.


def draining_for(nodes: Iterable[str], timeout_s: float = ANSWER_S) -> float | None:
    """Return the seconds left to the first of some nodes that is being drained.

    It blocks until the control store answers: an event loop calls it in a thread.

    Args:
        nodes: Ids of a slice's hosts. A slice is taken as a whole, so one is enough to move.
        timeout_s: A control store that is silent for longer knows nothing.

    Returns:
        Seconds, inf where there is no deadline; None when none is drained, or when that isn't known now.
    """
    try:
        drained = ray_private.draining_nodes(timeout_s)
    except Exception as error:  # a time-out, a control store that is gone, a process that is leaving the cluster
        log.debug("it isn't known which nodes are drained: %s: %s", type(error).__name__, error)
        return None
    deadlines = [drained[node] for node in nodes if node in drained]
    if not deadlines:
        return None
    return min(float("inf") if not ms else max(0.0, ms / 1000 - time.time()) for ms in deadlines)
