"""Reserve whole slices, and place elsewhere what must not run on their hosts."""

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
from cluster.footprints import RESTARTABLE
from cluster.gang.protocol import HostPlace
from cluster.slice_spec import ACCELERATOR_TYPE, POD_TYPE, SLICE_NAME, WORKER_ID, SliceSpec

STATUS_PAUSE_S = 5.0  # Pause between two messages about what a leader waits for.
POLL_S = 0.1

OnStatus = Callable[[str], object]


@dataclass(frozen=True)
class Placement:
    """A reserved slice: its placement group, its hosts by worker id, and each host's bundle."""

    group: PlacementGroup
    hosts: tuple[HostPlace, ...]
    bundles: tuple[int, ...]


def reserve(spec: SliceSpec, name: str, timeout_s: float | None, on_status: OnStatus = lambda text: None) -> Placement:
    """Reserve a free slice: all of its hosts, or none.

    Args:
        name: The holder's name, which `wan-tpu status` shows.
        timeout_s: How long to wait until a slice is free. It may not exist yet, as queued machines may take days. None
            to wait for ever.
        on_status: Called repeatedly with a line that says what is being waited for.

    Raises:
        SliceStartTimeout: No slice was free in time; the message lists the slices of that kind and their missing hosts.
        WrongHost: The hosts' labels don't say which place in the slice each has.
    """
    # A single host needs no other one near it, and its node may have no slice name and no head resource.
    resources = [spec.build_host_resources(i) if spec.hosts > 1 else {"TPU": spec.chips} for i in range(spec.hosts)]
    strategy = {"ray.io/node-id": "STRICT_SPREAD"} | ({SLICE_NAME: "STRICT_PACK"} if spec.hosts > 1 else {})
    group = placement_group(
        resources,
        topology_strategy=strategy,
        bundle_label_selector=[spec.host_selector] * spec.hosts,
        name=f"{name}{inventory.SEPARATOR}{uuid.uuid4().hex[:8]}",
    )
    try:
        _wait(group, spec, name, timeout_s, on_status)
        chosen = placement_group_table(group)["bundles_to_node_id"]
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        return _build_placement(spec, group, [nodes[chosen[bundle]] for bundle in range(spec.hosts)])
    except BaseException:
        remove_placement_group(group)
        raise


def select_off_hosts() -> dict[str, str]:
    """Return Ray's label selector of nodes that aren't TPU hosts; empty if the cluster has only TPU hosts.

    Leaders of slices run there: on a host of another slice, a leader would be lost with that slice.
    """
    if all(ACCELERATOR_TYPE in node["Labels"] for node in ray.nodes() if node["Alive"]):
        return {}
    return {ACCELERATOR_TYPE: f"!in({','.join(chip.ray_accelerator for chip in CHIPS.values())})"}


def make_restartable(kind: type) -> Any:
    """Return an actor class that runs off the hosts of slices, and outlives its node.

    When its node ends, the actor is restarted elsewhere, and callers wait for it.
    """
    options = RESTARTABLE.build_ray_options()
    return ray.remote(**options, max_restarts=-1, max_task_retries=-1, label_selector=select_off_hosts())(kind)


def _wait(group: PlacementGroup, spec: SliceSpec, name: str, timeout_s: float | None, on_status: OnStatus) -> None:
    """Wait until a group is placed, by polling: Ray's GCS lets only few calls wait for groups at a time."""
    start, last_notice = time.monotonic(), 0.0
    while placement_group_table(group)["state"] != "CREATED":
        waited = time.monotonic() - start
        if timeout_s is not None and waited >= timeout_s:
            raise SliceStartTimeout(f"{name}: no free {spec} after {timeout_s:g} s; {_describe_slices(spec)}")
        if waited - last_notice >= STATUS_PAUSE_S:
            last_notice = waited
            on_status(f"waits for a free {spec}, {waited:.0f} s so far; {_describe_slices(spec)}")
        time.sleep(POLL_S)


def _build_placement(spec: SliceSpec, group: PlacementGroup, nodes: list[dict[str, Any]]) -> Placement:
    """Return a placement with hosts by worker id; `nodes` has each bundle's node, in any order of the hosts."""
    worker_ids = [int(node["Labels"].get(WORKER_ID, 0)) if spec.hosts > 1 else 0 for node in nodes]
    if sorted(worker_ids) != list(range(spec.hosts)):
        hosts = sorted(map(inventory.read_host, nodes), key=lambda host: host.worker_id)
        raise WrongHost(f"{nodes[0]['Labels'].get(SLICE_NAME)}: {inventory.explain_wrong_ids(spec, hosts)}")
    bundles = tuple(sorted(range(spec.hosts), key=lambda bundle: worker_ids[bundle]))
    return Placement(group, tuple(_build_place(spec, worker, nodes[b]) for worker, b in enumerate(bundles)), bundles)


def _build_place(spec: SliceSpec, worker_id: int, node: dict[str, Any]) -> HostPlace:
    return HostPlace(
        worker_id=worker_id,
        hosts=spec.hosts,
        slice_name=node["Labels"].get(SLICE_NAME, "unnamed slice"),
        node_id=node["NodeID"],
        ip=node["NodeManagerAddress"],
        devices=inventory.read_devices(node),
        chips=spec.devices // spec.hosts,
    )


def explain_other_machines(spec: SliceSpec, nodes: Sequence[dict[str, Any]]) -> str | None:
    """Explain that a cluster has slices of this kind only with machines of another size; None if that isn't so."""
    chips = {
        node["Resources"].get("TPU", 0)
        for node in nodes
        if node["Alive"] and node["Labels"].get(POD_TYPE) == spec.pod_type
    }
    if not chips or spec.chips_per_host in chips:
        return None
    machine = spec.chip.gke_machines.get(spec.chips_per_host)
    return (
        f"the cluster's machines of that kind have {max(chips):g} chips, but those of a {spec} must have "
        f"{spec.chips_per_host}{f' (on GKE {machine})' if machine else ''}"
    )


def _describe_slices(spec: SliceSpec) -> str:
    slices = inventory.list_slices()
    same = [str(s) for s in slices if s.pod_type == spec.pod_type]
    if same:
        return explain_other_machines(spec, ray.nodes()) or "slices of that kind: " + "; ".join(same)
    kinds = sorted({s.pod_type for s in slices})
    contents = f"only {', '.join(kinds)}" if kinds else f"no TPU at all on its {len(ray.nodes())} nodes"
    return f"the cluster has none of kind {spec.pod_type}, {contents}"
