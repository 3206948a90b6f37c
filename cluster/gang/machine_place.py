"""Compare what the machines of a slice say about their places in it with the labels of their Ray nodes.

libtpu uses the machine's own data, placement uses the labels. If they differ, hosts would wait for each other until a
time-out whose message names none of them.
"""

import os
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import WrongHost
from cluster.gang.protocol import HostPlace
from cluster.slice_spec import SLICE_NAME, TOPOLOGY, WORKER_ID

METADATA = "http://169.254.169.254/computeMetadata/v1/instance"
_METADATA_S = 0.5


@dataclass(frozen=True)
class MachinePlace:
    """A machine's place in its slice, from GKE's environment variables or a TPU VM's metadata."""

    worker_id: int | None = None  # Which host of its slice it is; None if nothing says so.
    hosts: tuple[str, ...] = ()  # The names of all hosts of its slice, in order; empty if nothing says so.


def read_machine_place(*, metadata: bool = True) -> MachinePlace:
    """Return this machine's place; `metadata` also asks Google's metadata server, which only Google's machines have."""
    number = os.environ.get("TPU_WORKER_ID")
    names = os.environ.get("TPU_WORKER_HOSTNAMES")
    if metadata:
        number = number or read_metadata("attributes/agent-worker-number")
        names = names or read_metadata("attributes/worker-network-endpoints")
    worker_id = int(number) if number and number.isdigit() else None
    return MachinePlace(worker_id, tuple(name for name in (names or "").split(",") if name))


def read_metadata(path: str) -> str | None:
    """Return a value from Google's metadata server; None if there is no such value, or outside Google Cloud."""
    request = urllib.request.Request(f"{METADATA}/{path}", headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_S) as answer:
            return answer.read().decode()
    except (OSError, ValueError):
        return None


def check_machine_places(hosts: Sequence[HostPlace], machines: Sequence[MachinePlace]) -> None:
    """Check that each machine's own place agrees with the labels of its node.

    Args:
        hosts: The hosts according to the labels, in the order of worker ids.
        machines: What the machine of each host says.

    Raises:
        WrongHost: They differ; the message names the host.
    """
    for host, machine in zip(hosts, machines, strict=True):
        if machine.worker_id not in (None, host.worker_id):
            raise WrongHost(
                f"{host} is worker {machine.worker_id} of its TPU slice according to its machine (TPU_WORKER_ID), "
                f"but worker {host.worker_id} according to its node's label {WORKER_ID}; start Ray there without "
                "that label, so that Ray reads it from the machine, or with the machine's number"
            )
        if machine.hosts and len(machine.hosts) != host.hosts:
            raise WrongHost(
                f"{host} is one of {len(machine.hosts)} hosts of its TPU slice according to its machine "
                f"(TPU_WORKER_HOSTNAMES), but one of {host.hosts} according to its node's label {TOPOLOGY}; give "
                "its node the labels of the slice that it belongs to"
            )
    same_slice = defaultdict[tuple[str, ...], list[HostPlace]](list)
    for host, machine in zip(hosts, machines, strict=True):
        if machine.hosts:
            same_slice[machine.hosts].append(host)
    if len(same_slice) > 1:
        # The majority is right; of two hosts, worker 0 is, because all others join it.
        names = sorted(same_slice, key=lambda names: len(same_slice[names]), reverse=True)
        stranger = same_slice[names[-1]][0]
        raise WrongHost(
            f"{stranger} doesn't belong to the same TPU slice as {same_slice[names[0]][0]}: its machine's slice is "
            f"{','.join(names[-1])}, the other's {','.join(names[0])} (TPU_WORKER_HOSTNAMES); give the nodes of each "
            f"slice a label {SLICE_NAME} of their own"
        )
