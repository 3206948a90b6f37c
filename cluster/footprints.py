"""The resources of processes outside the slices, by which Ray places them and pods without TPUs are sized."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.chips import GIB


@dataclass(frozen=True)
class Footprint:
    """The resources that a process may use on its machine."""

    cpus: float  # How many CPUs Ray counts for the process.
    memory_bytes: int  # The most memory that the process and its children take.

    def build_ray_options(self) -> dict[str, Any]:
        """Return Ray's options of an actor that takes this much."""
        return {"num_cpus": self.cpus, "memory": self.memory_bytes}


# An idle Python process with Ray takes 0.15 GB. A worker that was attacked for five minutes took 0.25 GB; it also runs
# a decoder for the previews of each finished video.
RESTARTABLE = Footprint(0, GIB // 4)
LEADER = Footprint(0.1, GIB // 2)
WORKER = Footprint(0.1, 2 * GIB)


def build_ingress(limited_bytes: int) -> Footprint:
    """Return what an ingress takes whose limits allow clients to occupy so much beside the process itself."""
    return Footprint(0.1, GIB // 2 + limited_bytes)


def count_machines(processes: Sequence[Footprint], machine: Footprint) -> int:
    """Return how many machines have room for some processes, in whatever order Ray places them.

    Ray adds a machine only when no existing one has room for a process. By then, the free part of every existing
    machine is smaller than the largest process, in CPUs or in memory.

    Args:
        processes: The processes, none of which is larger than a machine.
    """
    if not processes:
        return 0
    cpus = machine.cpus - max(process.cpus for process in processes)
    memory = machine.memory_bytes - max(process.memory_bytes for process in processes)
    return 1 + math.floor(sum(process.cpus / cpus + process.memory_bytes / memory for process in processes))
