"""What a cluster has: its slices by name, their hosts, and who holds them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group_table

from cluster.slice_spec import DEVICES, POD_TYPE, SLICE_NAME, WORKER_ID, SliceSpec, kinds

SEPARATOR = "#"  # between the name of a holder and what makes its placement group's name unique


@dataclass(frozen=True)
class HostFound:
    """A Ray node that is alive and a TPU host. `devices`: as in `HostPlace`."""

    worker_id: int
    node_id: str
    ip: str
    devices: int | None


@dataclass(frozen=True)
class SliceFound:
    """A slice that a cluster has.

    pod_type   as Ray spells it; spec None when it is of no kind known here
    holder     the name of what has reserved it, None when it is free
    """

    name: str
    pod_type: str
    spec: SliceSpec | None
    hosts: tuple[HostFound, ...]
    holder: str | None

    @property
    def missing(self) -> tuple[int, ...]:
        """Worker ids of hosts that are not there."""
        there = {host.worker_id for host in self.hosts}
        return tuple(i for i in range(self.spec.hosts if self.spec else 0) if i not in there)

    @property
    def has_wrong_ids(self) -> bool:
        """Whether two of its hosts have the same worker id, or one an id that its kind of slice doesn't have."""
        ids = [host.worker_id for host in self.hosts]
        return (
            self.spec is not None
            and self.spec.hosts > 1
            and (len(set(ids)) < len(ids) or max(ids, default=0) >= self.spec.hosts)
        )

    @property
    def emulated(self) -> bool:
        """Whether CPU devices stand for its chips."""
        return any(host.devices is not None for host in self.hosts)

    def __str__(self) -> str:
        if self.spec is not None and self.has_wrong_ids:
            return f"{self.name}: {wrong_ids(self.spec, self.hosts)}"
        if self.missing:
            wanted = ", ".join(map(str, self.missing))
            return f"{self.name}: host {wanted} of {self.spec.hosts if self.spec else '?'} missing"
        return f"{self.name}: {f'taken by {self.holder}' if self.holder else 'free'}"


def wrong_ids(spec: SliceSpec, hosts: Iterable[HostFound]) -> str:
    """Return what to say of a slice whose hosts don't have one worker id each."""
    labelled = ", ".join(f"{host.worker_id} on node {host.node_id[:8]} at {host.ip}" for host in hosts)
    return (
        f"its hosts need the labels {WORKER_ID} 0 to {spec.hosts - 1}, one each, and have {labelled}; start Ray there "
        "without that label, which Ray then takes from the machine, or give each its own number"
    )


def slices_found() -> list[SliceFound]:
    """Return the slices of the cluster that this process has joined, by name."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for node in ray.nodes():
        if POD_TYPE in node["Labels"]:
            by_name.setdefault(node["Labels"].get(SLICE_NAME, node["NodeID"][:8]), []).append(node)
    holders = _holders()
    return [_read_slice(name, by_name[name], holders) for name in sorted(by_name)]


def _read_slice(name: str, nodes: Sequence[dict[str, Any]], holders: dict[str, str]) -> SliceFound:
    pod_type = nodes[-1]["Labels"][POD_TYPE]
    hosts = [host_of(node) for node in nodes if node["Alive"]]
    hosts.sort(key=lambda host: host.worker_id)
    held = {holders[host.node_id] for host in hosts if host.node_id in holders}
    return SliceFound(name, pod_type, _spec(pod_type), tuple(hosts), ", ".join(sorted(held)) or None)


def host_of(node: dict[str, Any]) -> HostFound:
    """Return a TPU host, of its Ray node."""
    worker_id = int(node["Labels"].get(WORKER_ID, 0))
    return HostFound(worker_id, node["NodeID"], node["NodeManagerAddress"], devices_of(node))


def devices_of(node: dict[str, Any]) -> int | None:
    """Return how many CPU devices an emulated host shows, None for a real one."""
    return int(node["Labels"][DEVICES]) if DEVICES in node["Labels"] else None


def _holders() -> dict[str, str]:
    holders = {}
    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            for node_id in group["bundles_to_node_id"].values():
                holders[node_id] = group["name"].partition(SEPARATOR)[0] or "an unnamed placement group"
    return holders


def _spec(pod_type: str) -> SliceSpec | None:
    return next((spec for spec in map(SliceSpec, kinds()) if spec.pod_type == pod_type), None)
