"""Reserve a whole slice, all of its hosts or none, and give it back."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster import inventory
from cluster.chips import CHIPS
from cluster.errors import SliceStartTimeout, WrongHost
from cluster.gang.protocol import HostPlace
from cluster.slice_spec import ACCELERATOR_TYPE, POD_TYPE, SLICE_NAME, WORKER_ID, SliceSpec

TELL_S = 5.0  # between two words on what is waited for
POLL_S = 0.1

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Placement:
    """A reserved slice: its placement group, its hosts by worker id, and the bundle of each."""

    group: PlacementGroup
    hosts: tuple[HostPlace, ...]
    bundles: tuple[int, ...]


def reserve(spec: SliceSpec, name: str, timeout_s: float | None, tell: Tell = lambda text: None) -> Placement:
    """Return a free slice of that kind, reserved under a name that `wan-tpu status` shows.

    timeout_s  how long one may take to come free, or to be there at all: machines that are queued for take days. None:
               without end
    tell       is told what is waited for, again and again

    Raises `SliceStartTimeout`, which says what there is of that kind and which host is missing; `WrongHost` for hosts
    that don't know their place in the slice.
    """
    # Of one host there is no slice to keep together, and it may have no slice name and no head resource.
    resources = [spec.host_resources(i) if spec.hosts > 1 else {"TPU": spec.chips} for i in range(spec.hosts)]
    strategy = {"ray.io/node-id": "STRICT_SPREAD"} | ({SLICE_NAME: "STRICT_PACK"} if spec.hosts > 1 else {})
    group = placement_group(
        resources,
        topology_strategy=strategy,
        bundle_label_selector=[spec.host_selector] * spec.hosts,
        name=f"{name}{inventory.SEPARATOR}{uuid.uuid4().hex[:8]}",
    )
    try:
        _wait(group, spec, name, timeout_s, tell)
        chosen = placement_group_table(group)["bundles_to_node_id"]
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        return _placement(spec, group, [nodes[chosen[bundle]] for bundle in range(spec.hosts)])
    except BaseException:
        remove_placement_group(group)
        raise


def off_hosts() -> dict[str, str]:
    """Return Ray's label selector of nodes that are no TPU hosts; empty when the cluster has no other.

    For what leads slices: on a host of another slice, it would be lost with that.
    """
    if all(ACCELERATOR_TYPE in node["Labels"] for node in ray.nodes() if node["Alive"]):
        return {}
    return {ACCELERATOR_TYPE: f"!in({','.join(chip.ray_accelerator for chip in CHIPS.values())})"}


def surviving(kind: type) -> Any:
    """Return an actor class off the hosts of slices: restarted elsewhere with its node's end, and who asks waits."""
    return ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, label_selector=off_hosts())(kind)


def _wait(group: PlacementGroup, spec: SliceSpec, name: str, timeout_s: float | None, tell: Tell) -> None:
    """Return when the group is placed. It is asked after: of what waits for it in Ray's GCS little may be at a time."""
    start, last_notice = time.monotonic(), 0.0
    while placement_group_table(group)["state"] != "CREATED":
        waited = time.monotonic() - start
        if timeout_s is not None and waited >= timeout_s:
            raise SliceStartTimeout(f"{name}: no free {spec} after {timeout_s:g} s; {_there_is(spec)}")
        if waited - last_notice >= TELL_S:
            last_notice = waited
            tell(f"waits for a free {spec}, {waited:.0f} s so far; {_there_is(spec)}")
        time.sleep(POLL_S)


def _placement(spec: SliceSpec, group: PlacementGroup, nodes: list[dict[str, Any]]) -> Placement:
    """Return a placement by worker id; nodes: of the bundles, each on any host of the slice."""
    worker_ids = [int(node["Labels"].get(WORKER_ID, 0)) if spec.hosts > 1 else 0 for node in nodes]
    if sorted(worker_ids) != list(range(spec.hosts)):
        hosts = sorted(map(inventory.host_of, nodes), key=lambda host: host.worker_id)
        raise WrongHost(f"{nodes[0]['Labels'].get(SLICE_NAME)}: {inventory.wrong_ids(spec, hosts)}")
    bundles = tuple(sorted(range(spec.hosts), key=lambda bundle: worker_ids[bundle]))
    return Placement(group, tuple(_place(spec, worker, nodes[b]) for worker, b in enumerate(bundles)), bundles)


def _place(spec: SliceSpec, worker_id: int, node: dict[str, Any]) -> HostPlace:
    return HostPlace(
        worker_id=worker_id,
        hosts=spec.hosts,
        slice_name=node["Labels"].get(SLICE_NAME, "unnamed slice"),
        node_id=node["NodeID"],
        ip=node["NodeManagerAddress"],
        devices=inventory.devices_of(node),
        chips=spec.devices // spec.hosts,
    )


def other_machines(spec: SliceSpec, nodes: Sequence[dict[str, Any]]) -> str | None:
    """Return what is wrong where a cluster has such slices, but of machines of another size; None where it isn't so."""
    chips = {
        node["Resources"].get("TPU", 0)
        for node in nodes
        if node["Alive"] and node["Labels"].get(POD_TYPE) == spec.pod_type
    }
    if not chips or spec.chips_per_host in chips:
        return None
    machine = spec.chip.gke_machines.get(spec.chips_per_host)
    return (
        f"of that kind there are machines of {max(chips):g} chips, and a {spec} here is of machines with "
        f"{spec.chips_per_host}{f' (on GKE {machine})' if machine else ''}"
    )


def _there_is(spec: SliceSpec) -> str:
    slices = inventory.slices_found()
    same = [str(s) for s in slices if s.pod_type == spec.pod_type]
    if same:
        return other_machines(spec, ray.nodes()) or "of that kind: " + "; ".join(same)
    others = sorted({s.pod_type for s in slices})
    contents = f"only {', '.join(others)}" if others else f"no TPU at all, {len(ray.nodes())} nodes"
    return f"the cluster has none of kind {spec.pod_type}, {contents}"
