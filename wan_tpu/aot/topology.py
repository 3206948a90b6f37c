"""Describe a TPU slice that isn't there, so that programs can be compiled for it."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from wan_tpu.errors import InvalidInput

# libtpu asks a metadata server where it runs, and takes a lock for the chips, unless told not to.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",  # must be a valid type; which one is of no consequence
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# On hosts with chips JAX adds this flag when it is imported (jax/_src/cloud_tpu_init.py). What is compiled elsewhere
# must have it too, or no TPU would take it for its own.
_ADDED_BY_JAX = "--xla_tpu_use_enhanced_launch_barrier"


@dataclass(frozen=True)
class Hardware:
    """One device as JAX counts them: a chip, or half of one.

    host_topology     the compiler's name of one host's chips, for which kernels are compiled alone, such as v6e:2x2
    peak_flops        dense bfloat16 operations a second
    hbm_bytes         its memory that programs may use; hbm_bytes_per_s  its bandwidth
    grid_step_s       what a step of a kernel's grid takes beyond its bundles, where that was measured
    """

    name: str
    host_topology: str
    clock_hz: float
    peak_flops: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    grid_step_s: float = 0.0


@dataclass(frozen=True)
class DescribedSlice:
    """A slice as the compiler and the cost model need it.

    name          for people, such as v6e-8
    topology      the compiler's name, such as v6e:2x4
    host_bounds   chips along each axis (three of them) that one host has
    hardware      one JAX device
    wraps         size of each axis that closes to a ring, 0 for others
    link_bytes_per_s, core_bytes_per_s  of one ICI link, and between the devices of one chip, in one direction
    cores         TensorCores of one JAX device: they share the parallel axes of a kernel's grid
    calibrated    for people: which of these figures were measured; empty where all are published ones
    """

    name: str
    topology: str
    host_bounds: tuple[int, ...]
    hardware: Hardware
    wraps: tuple[int, ...]
    link_bytes_per_s: float
    core_bytes_per_s: float
    cores: int = 1
    calibrated: str = ""

    def devices(self) -> list[Any]:
        """Return the described devices, in the order in which JAX lists them.

        Raises `InvalidInput` when libtpu, which holds the compiler, is missing or doesn't know the topology.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise InvalidInput("compiling for a TPU needs its compiler: pip install 'wan-tpu[tpu]' (Linux, x86-64)")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        flags = os.environ.get("LIBTPU_INIT_ARGS", "")
        if _ADDED_BY_JAX not in flags:
            os.environ["LIBTPU_INIT_ARGS"] = f"{flags} {_ADDED_BY_JAX}=true".strip()
        try:
            described = topologies.get_topology_desc(
                platform="tpu", topology_name=self.topology, chips_per_host_bounds=self.host_bounds
            )
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InvalidInput(f"the TPU compiler has no topology {self.topology!r} ({reason})") from None
        return list(described.devices)
