"""Reserve a whole slice, all of its hosts or none, and give it back."""

import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster import inventory
from cluster.chips import CHIPS
from cluster.errors import SliceStartTimeout
from cluster.gang.protocol import HostPlace
from cluster.slice_spec import ACCELERATOR_TYPE, SLICE_NAME, SliceSpec


@dataclass(frozen=True)
class Placement:
    """A reserved slice: its placement group, whose bundle i is the host of rank i."""

    group: PlacementGroup
    hosts: tuple[HostPlace, ...]


def reserve(spec: SliceSpec, name: str, timeout_s: float) -> Placement:
    """Return a free slice of that kind, reserved under a name that `wan-tpu status` shows.

    Raises `SliceStartTimeout`, which says what there is of that kind and which host is missing.
    """
    ranks = range(spec.hosts)
    # Of one host there is no slice to keep together, and it may have no slice name and no head resource.
    resources = [spec.host_resources(rank) if spec.hosts > 1 else {"TPU": spec.chips} for rank in ranks]
    strategy = {"ray.io/node-id": "STRICT_SPREAD"} | ({SLICE_NAME: "STRICT_PACK"} if spec.hosts > 1 else {})
    group = placement_group(
        resources,
        topology_strategy=strategy,
        # The worker id is part of it: without, bundle i would be on any host of the slice.
        bundle_label_selector=[spec.host_selector(rank) for rank in ranks],
        name=f"{name}{inventory.SEPARATOR}{uuid.uuid4().hex[:8]}",
    )
    try:
        if not group.wait(timeout_s):
            raise SliceStartTimeout(f"{name}: no free {spec} after {timeout_s:g} s; {_there_is(spec)}")
        chosen = placement_group_table(group)["bundles_to_node_id"]
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        return Placement(group, tuple(_place(spec, rank, nodes[chosen[rank]]) for rank in ranks))
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


def _place(spec: SliceSpec, rank: int, node: dict[str, Any]) -> HostPlace:
    return HostPlace(
        rank=rank,
        hosts=spec.hosts,
        slice_name=node["Labels"].get(SLICE_NAME, "unnamed slice"),
        node_id=node["NodeID"],
        ip=node["NodeManagerAddress"],
        devices=inventory.devices_of(node),
    )


def _there_is(spec: SliceSpec) -> str:
    found = inventory.slices_found()
    same = [str(s) for s in found if s.pod_type == spec.pod_type]
    if same:
        return "of that kind: " + "; ".join(same)
    others = sorted({s.pod_type for s in found})
    what = f"only {', '.join(others)}" if others else f"no TPU at all, {len(ray.nodes())} nodes"
    return f"the cluster has none of kind {spec.pod_type}, {what}"
