"""The cluster that `wan-tpu serve` starts on its machine where it is given neither a cluster nor a layout."""

import argparse
import os
import shutil

from actors.commands.connection import is_cluster_running
from cluster.emulation.cluster import EmulatedCluster, EmulatedSlice, Settings
from cluster.errors import ClusterNotFound
from cluster.gang.devices import list_device_files
from cluster.gang.machine_place import read_metadata
from cluster.slice_spec import SliceSpec, list_kinds
from wan_tpu.families import open_spec
from wan_tpu.storage.addresses import absolute

EMULATED = "v6e-1"  # The slice that a machine without a TPU emulates.
_HEAD_STORE_MIB, _HOST_STORE_MIB = 2048, 8192  # Shared memory is allocated as needed. Videos pass through it.


def wants_own_cluster(args: argparse.Namespace) -> bool:
    """Return whether a command's arguments name neither a layout nor a cluster, and none runs on this machine."""
    has_layout = args.layout is not None or args.layout_text is not None
    has_address = args.address is not None or "RAY_ADDRESS" in os.environ
    return not (has_layout or has_address or args.model_id is None or is_cluster_running(args.folder))


def fill_arguments(args: argparse.Namespace) -> SliceSpec:
    """Complete a command's arguments for a pipeline of this machine alone, and return the kind of its slice.

    Raises:
        CheckpointError: The model can't be read.
        ClusterNotFound: It isn't known what TPU this machine has, or its TPU spans several machines.
    """
    kind, stages = find_slice(args.slice), ", ".join(open_spec(args.model_id).stages)
    args.layout_text = f"pools:\n  all: {{stages: [{stages}], slice: {kind}}}\n"
    if not list_device_files():
        args.layout_text += "emulate: {devices_per_host: 1}\n"
    args.snapshots = args.snapshots or absolute(str(args.folder / "snapshots"))
    return kind


def find_slice(name: str | None = None) -> SliceSpec:
    """Return the kind of slice that this machine is; without a TPU, the one that it emulates.

    Args:
        name: What the user calls it; by default what GKE's environment or a TPU VM's metadata says.

    Raises:
        ClusterNotFound: Nothing says what it is, or it isn't the chips of this machine.
        UnknownSlice: There is no slice of that name.
    """
    files = list_device_files()
    if not files:
        return SliceSpec(name or EMULATED)
    name = name or os.environ.get("TPU_ACCELERATOR_TYPE") or read_metadata("attributes/accelerator-type")
    if name is None:
        raise ClusterNotFound(f"this machine has {len(files)} TPU device files, but doesn't say of what; give --slice")
    kind = next((kind for kind in map(SliceSpec, list_kinds()) if kind.pod_type == name), None) or SliceSpec(name)
    if kind.hosts > 1:
        raise ClusterNotFound(
            f"this machine is one of the {kind.hosts} of a {kind}; start a cluster of all of them (docs/tpu-vm.md), "
            "and give --layout and --address"
        )
    expected = kind.chips * kind.chip.device_files
    if len(files) != expected:
        raise ClusterNotFound(
            f"a {kind} has {expected} device files, but this machine has {len(files)}: {', '.join(files)}; give the "
            "--slice that it is"
        )
    return kind


def start_cluster(args: argparse.Namespace, kind: SliceSpec) -> EmulatedCluster:
    """Start a cluster of this machine alone, which ends with this process unless --detach is given.

    Its one slice has this machine's chips; without a TPU, a CPU device stands in for them.
    """
    is_emulated = not list_device_files()
    free_mib = shutil.disk_usage("/dev/shm").free // 2**20 if os.path.isdir("/dev/shm") else _HOST_STORE_MIB
    return EmulatedCluster.start(
        [EmulatedSlice(f"{kind.pod_type}-0", kind, 1 if is_emulated else None)],
        Settings(
            head_store_mib=min(_HEAD_STORE_MIB, free_mib // 8), host_store_mib=min(_HOST_STORE_MIB, free_mib // 2)
        ),
        folder=args.folder,
        outlive=args.detach,
        # A process that has imported JAX is forked for every worker. On a TPU each imports it itself.
        imports="actors.imported" if is_emulated else None,
    )
