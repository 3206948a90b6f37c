"""List the slices of a cluster, their hosts, and who holds them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group_table

from cluster.slice_spec import DEVICES, POD_TYPE, SLICE_NAME, WORKER_ID, SliceSpec, list_kinds

# Stands in a placement group's name between the holder's name and what makes the group's name unique.
SEPARATOR = "#"


@dataclass(frozen=True)
class LiveHost:
    """A Ray node that is alive and a TPU host; `devices` is as in `HostPlace`."""

    worker_id: int
    node_id: str
    ip: str
    devices: int | None


@dataclass(frozen=True)
class LiveSlice:
    """A slice of a cluster, with those of its hosts that are alive."""

    name: str
    pod_type: str  # Its kind as Ray spells it.
    spec: SliceSpec | None  # Its kind; None if `pod_type` is unknown here.
    hosts: tuple[LiveHost, ...]  # The hosts that are alive, by worker id.
    holder: str | None  # Who has reserved it; None if it is free.

    @property
    def missing(self) -> tuple[int, ...]:
        """The worker ids of hosts that aren't alive."""
        there = {host.worker_id for host in self.hosts}
        return tuple(i for i in range(self.spec.hosts if self.spec else 0) if i not in there)

    @property
    def has_wrong_ids(self) -> bool:
        """Whether two hosts have the same worker id, or a host has an id too high for this kind of slice."""
        ids = [host.worker_id for host in self.hosts]
        return (
            self.spec is not None
            and self.spec.hosts > 1
            and (len(set(ids)) < len(ids) or max(ids, default=0) >= self.spec.hosts)
        )

    @property
    def emulated(self) -> bool:
        """Whether CPU devices stand in for its chips."""
        return any(host.devices is not None for host in self.hosts)

    def __str__(self) -> str:
        if self.spec is not None and self.has_wrong_ids:
            return f"{self.name}: {explain_wrong_ids(self.spec, self.hosts)}"
        if self.missing:
            missing = ", ".join(map(str, self.missing))
            return f"{self.name}: host {missing} of {self.spec.hosts if self.spec else '?'} missing"
        return f"{self.name}: {f'taken by {self.holder}' if self.holder else 'free'}"


def explain_wrong_ids(spec: SliceSpec, hosts: Iterable[LiveHost]) -> str:
    """Return the message for a slice whose hosts don't have the worker ids 0 to n - 1, one each."""
    labels = ", ".join(f"{host.worker_id} on node {host.node_id[:8]} at {host.ip}" for host in hosts)
    return (
        f"its hosts need the labels {WORKER_ID} 0 to {spec.hosts - 1}, one each, but have {labels}; start Ray there "
        "without that label, so that Ray reads it from the machine, or give each host its own number"
    )


def list_slices() -> list[LiveSlice]:
    """Return the slices of the cluster that this process has joined, in the order of their names."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for node in ray.nodes():
        if POD_TYPE in node["Labels"]:
            by_name.setdefault(node["Labels"].get(SLICE_NAME, node["NodeID"][:8]), []).append(node)
    holders = _read_holders()
    return [_read_slice(name, by_name[name], holders) for name in sorted(by_name)]


def _read_slice(name: str, nodes: Sequence[dict[str, Any]], holders: dict[str, str]) -> LiveSlice:
    pod_type = nodes[-1]["Labels"][POD_TYPE]
    hosts = [read_host(node) for node in nodes if node["Alive"]]
    hosts.sort(key=lambda host: host.worker_id)
    names = {holders[host.node_id] for host in hosts if host.node_id in holders}
    return LiveSlice(name, pod_type, _find_spec(pod_type), tuple(hosts), ", ".join(sorted(names)) or None)


def read_host(node: dict[str, Any]) -> LiveHost:
    """Return the TPU host that a Ray node is."""
    worker_id = int(node["Labels"].get(WORKER_ID, 0))
    return LiveHost(worker_id, node["NodeID"], node["NodeManagerAddress"], read_devices(node))


def read_devices(node: dict[str, Any]) -> int | None:
    """Return how many CPU devices an emulated host shows; None for a real host."""
    return int(node["Labels"][DEVICES]) if DEVICES in node["Labels"] else None


def _read_holders() -> dict[str, str]:
    holders = {}
    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            for node_id in group["bundles_to_node_id"].values():
                holders[node_id] = group["name"].partition(SEPARATOR)[0] or "an unnamed placement group"
    return holders


def _find_spec(pod_type: str) -> SliceSpec | None:
    return next((spec for spec in map(SliceSpec, list_kinds()) if spec.pod_type == pod_type), None)
