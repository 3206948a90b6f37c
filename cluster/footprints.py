"""What the processes beside the slices take. Ray places them by it, and the pods without TPUs are sized by it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.chips import GIB


@dataclass(frozen=True)
class Footprint:
    """What a process may take of its machine.

    Attributes:
        cpus: How many CPUs Ray counts for it.
        memory_bytes: Its memory at most, and that of the processes it starts.
    """

    cpus: float
    memory_bytes: int

    def build_ray_options(self) -> dict[str, Any]:
        """Return Ray's options of an actor that takes this much."""
        return {"num_cpus": self.cpus, "memory": self.memory_bytes}


# An idle Python process with Ray takes 0.15 GB. A worker that was attacked for five minutes took 0.25 GB; it also runs
# a decoder for the previews of each finished video.
SURVIVING = Footprint(0, GIB // 4)
LEADER = Footprint(0.1, GIB // 2)
WORKER = Footprint(0.1, 2 * GIB)


def build_ingress(limited_bytes: int) -> Footprint:
    """Return what an ingress takes.

    Args:
        limited_bytes: What its limits allow clients to occupy, beside the process itself.
    """
    return Footprint(0.1, GIB // 2 + limited_bytes)


def count_machines(processes: Sequence[Footprint], machine: Footprint) -> int:
    """Return how many machines have room for some processes, in whatever order Ray places them.

    Ray asks for another machine once none has room for a process. Of each machine there is by then, more is taken than
    what it has minus the largest process: of its CPUs, or of its memory.

    Args:
        processes: The processes, none of which is larger than a machine.
        machine: What a machine offers.
    """
    if not processes:
        return 0
    cpus = machine.cpus - max(process.cpus for process in processes)
    memory = machine.memory_bytes - max(process.memory_bytes for process in processes)
    return 1 + math.floor(sum(process.cpus / cpus + process.memory_bytes / memory for process in processes))
