"""List the machines that a layout needs on GKE, and format them as variables for the Terraform module."""

import json
from dataclasses import dataclass

from cluster.errors import LayoutError
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec


@dataclass(frozen=True)
class NodePool:
    """The machines for one kind of slice."""

    kind: SliceSpec
    machine: str  # The hosts' machine type on GKE.
    slices: int  # The largest number of such slices that the layout may have at once.


def list_node_pools(layout: Layout) -> list[NodePool]:
    """Return the machines that a layout needs, for each kind of slice.

    Raises:
        LayoutError: GKE has no machines for a kind, or the layout is for emulated slices.
    """
    check_real(layout)
    kinds: dict[str, tuple[SliceSpec, int]] = {}
    for pool in layout.pools:
        kind, slices = kinds.get(pool.slice.pod_type, (pool.slice, 0))
        kinds[kind.pod_type] = kind, slices + pool.replicas.maximum
    return [NodePool(kind, _find_machine(kind, layout), slices) for kind, slices in kinds.values()]


def check_real(layout: Layout) -> None:
    """Raise `LayoutError` for a layout of emulated slices, which have no machines."""
    if layout.devices_per_host is not None:
        raise LayoutError(
            f"{layout.source}: its slices are emulated; give a layout of real slices (wan-tpu layouts lists them), or "
            "remove emulate from this one"
        )


def format_variables(layout: Layout, capacity: str) -> str:
    """Return a layout's node pools as variables of the Terraform module in `cluster/terraform`.

    Args:
        capacity: How TPU machines are provisioned, one of `cluster.provision.target.CAPACITIES`.

    Raises:
        LayoutError: GKE has no machines for a kind of slice, or the layout is for emulated slices.
    """
    pools = [
        f'  "{pool.kind.pod_type}" = {{ machine_type = "{pool.machine}", topology = "{pool.kind.topology}", '
        f"hosts = {pool.kind.hosts}, slices = {pool.slices} }}\n"
        for pool in list_node_pools(layout)
    ]
    return (
        "# The node pools of a layout, for cluster/terraform. Written by wan-tpu manifests --node_pools.\n"
        f"capacity = {json.dumps(capacity)}\ntpu_pools = {{\n{''.join(pools)}}}\n"
    )


def _find_machine(kind: SliceSpec, layout: Layout) -> str:
    machine = kind.chip.gke_machines.get(kind.chips_per_host)
    if machine is None:
        known = ", ".join(kind.chip.gke_machines.values()) or "none"
        raise LayoutError(
            f"{layout.source}: GKE has no machine type for the hosts of a {kind}; for {kind.chip.name} it has {known}"
        )
    return machine
