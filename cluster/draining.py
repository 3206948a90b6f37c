"""Find nodes that are about to go away: preempted by the cloud, or drained by an operator or an autoscaler."""

import logging
import time
from collections.abc import Iterable

from cluster import ray_private

log = logging.getLogger(__name__)

# Ray's control store answers in milliseconds. Ray Serve's own controller waits for it as long as this.
ANSWER_S = 3.0


def find_drain_s(nodes: Iterable[str], timeout_s: float = ANSWER_S) -> float | None:
    """Return how many seconds are left until the first of some nodes has been drained.

    This blocks until the control store answers, so an event loop must call it in a thread.

    Args:
        nodes: Ids of a slice's hosts. A slice goes away as a whole, so one drained node is reason enough to move.
        timeout_s: How long to wait for the control store.

    Returns:
        The seconds left, inf where there is no deadline. None if no node is being drained, or if the control store
        doesn't answer.
    """
    try:
        drained = ray_private.list_draining_nodes(timeout_s)
    # A time-out, a control store that is gone, or a process that is leaving the cluster: any type may come.
    except Exception as error:
        log.debug("the list of draining nodes can't be read: %s: %s", type(error).__name__, error)
        return None
    deadlines = [drained[node] for node in nodes if node in drained]
    if not deadlines:
        return None
    return min(float("inf") if not ms else max(0.0, ms / 1000 - time.time()) for ms in deadlines)
