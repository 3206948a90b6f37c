"""Describe a TPU slice that isn't present, so that programs can be compiled for it."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from wan_tpu.chip_files import COMPILES_ONLY
from wan_tpu.errors import InvalidInput

# On hosts with chips JAX adds this flag when it is imported (jax/_src/cloud_tpu_init.py). Programs compiled
# elsewhere need it too: without it no TPU would accept them as its own.
_ADDED_BY_JAX = "--xla_tpu_use_enhanced_launch_barrier"


@dataclass(frozen=True)
class Hardware:
    """One device as JAX counts devices: a chip, or half of one."""

    name: str  # The chip's name.
    host_topology: str  # The compiler's name for one host's chips, such as v6e:2x2. Kernels are compiled alone for it.
    clock_hz: float
    peak_flops: float  # Dense bfloat16 operations a second.
    hbm_bytes: float  # Memory that programs may use.
    hbm_bytes_per_s: float  # Bandwidth of that memory.
    grid_step_s: float = 0.0  # Seconds that a step of a kernel's grid takes beyond its bundles, if that was measured.


@dataclass(frozen=True)
class DescribedSlice:
    """A slice as the compiler and the cost model need it."""

    name: str  # Name for people, such as v6e-8.
    topology: str  # The compiler's name, such as v6e:2x4.
    host_bounds: tuple[int, ...]  # Chips of one host along each of the three axes.
    hardware: Hardware  # One JAX device.
    wraps: tuple[int, ...]  # Size of each axis that closes to a ring, 0 for others.
    link_bytes_per_s: float  # Bandwidth of one ICI link in one direction.
    core_bytes_per_s: float  # Bandwidth between the devices of one chip in one direction.
    cores: int = 1  # TensorCores of one JAX device; they share the parallel axes of a kernel's grid.
    calibrated: str = ""  # Says which of these figures were measured; empty if all are published ones.

    def devices(self) -> list[Any]:
        """Return the described devices, in the order in which JAX lists them.

        Raises:
            InvalidInput: libtpu, which holds the compiler, is missing or doesn't know the topology.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise InvalidInput("compiling for a TPU needs its compiler: pip install '.[tpu]' (Linux, x86-64)")
        for name, value in COMPILES_ONLY.items():
            os.environ.setdefault(name, value)
        flags = os.environ.get("LIBTPU_INIT_ARGS", "")
        if _ADDED_BY_JAX not in flags:
            os.environ["LIBTPU_INIT_ARGS"] = f"{flags} {_ADDED_BY_JAX}=true".strip()
        try:
            topology = topologies.get_topology_desc(
                platform="tpu", topology_name=self.topology, chips_per_host_bounds=self.host_bounds
            )
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InvalidInput(f"the TPU compiler has no topology {self.topology!r} ({reason})") from None
        return list(topology.devices)
