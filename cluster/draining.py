"""Which nodes are about to be taken away: preempted by the cloud, drained by an operator or an autoscaler."""

import time
from collections.abc import Iterable


def draining_for(nodes: Iterable[str]) -> float | None:
    """Return the seconds left to the first of these nodes that is being drained (inf: no deadline), None if none is.

    nodes  ids of a slice's hosts: a slice is taken as a whole, so one is enough to move
    """
    from ray._private.state import state  # where Ray Train's own watcher of preemptions asks (2.60)

    drained = state.get_draining_nodes()
    deadlines = [drained[node] for node in nodes if node in drained]
    if not deadlines:
        return None
    return min(float("inf") if not ms else ms / 1000 - time.time() for ms in deadlines)
