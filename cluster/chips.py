"""The TPU generations: what one chip has, and what Google, JAX and Ray call it.

Each generation is a file of facts in `cluster/generations/`, with a source for every figure. What else a
generation needs is in docs/cluster.md. Those that libtpu can't compile for yet have a file in `cluster/announced/`.
"""

import math
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict

from cluster.yaml_values import T, parse_yaml, validate

GIB = 2**30

Shape = Annotated[tuple[int, ...], BeforeValidator(lambda text: str(text).split("x"))]  # Written as "2x4".


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation. Figures are for a whole chip."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str  # The usual name, with which the names of slices begin.
    jax_kind: str  # The `device_kind` of its devices in JAX.
    compiler: str  # Its name in the compiler's topologies.
    devices: int
    cores: int
    # What the number in a slice's name counts: "chips", or "cores" as in v5p-8.
    size_unit: Literal["chips", "cores"] = "chips"
    usable_gib: float  # Memory that programs may use, as libtpu's compiler reports it when it refuses a program.
    hbm_bytes_per_s: float  # Bandwidth of that memory.
    bf16_flops: float  # Dense peak per second; a multiply-add counts as two operations.
    clock_hz: float  # Clock of the TensorCore, which issues one VLIW bundle a cycle.
    mxu_8bit_dtype: str  # The 8-bit type, as JAX names it, that the matrix units multiply in half the time of bfloat16.
    ici_link_bytes_per_s: float  # Rate of one link in one direction; a chip has two links along each axis of the torus.
    # Rate between the two devices of a chip, in one direction; None for chips of one device.
    core_link_bytes_per_s: float | None = None
    sparse_core_collectives: tuple[str, ...] = ()  # Collectives that its compiler runs on SparseCores by default.
    topologies: tuple[Shape, ...]  # The shapes of slices that Google offers, one for each number of chips.
    # Exactly the axes with this many chips close to rings; None where `ring_block` decides.
    ring_size: int | None = None
    # All axes close to rings if all are multiples of this; None where `ring_size` decides.
    ring_block: int | None = None
    host_shape: Shape  # The chips of one host in a slice with several hosts.
    one_host_chips: tuple[int, ...]  # How many chips a slice with a single host can have.
    ray_accelerator: str  # The accelerator type in Ray.
    device_files: int = 1  # How many files in /dev a chip has, each of which Ray counts as a chip.
    gke_accelerator: str  # The accelerator in GKE's node selector.
    # GKE's machine types, by their number of chips.
    gke_machines: dict[int, str] = field(default_factory=dict, hash=False)
    # The software version to request from Cloud TPU's API; None where it doesn't offer such chips.
    tpu_vm_runtime: str | None = None

    @property
    def device_bytes(self) -> float:
        """How many bytes of one JAX device's memory programs may use."""
        return self.usable_gib * GIB / self.devices

    @property
    def sizes(self) -> dict[int, tuple[int, ...]]:
        """The shape of each size of slice, by its number of chips."""
        return {math.prod(shape): shape for shape in self.topologies}

    @property
    def counted_per_chip(self) -> int:
        """How much each chip adds to the number in a slice's name."""
        return self.cores if self.size_unit == "cores" else 1

    @property
    def host_topology(self) -> str:
        """The compiler's name for the chips of one host, such as "v6e:2x2"."""
        return f"{self.compiler}:{'x'.join(map(str, self.host_shape))}"


@dataclass(frozen=True, kw_only=True)
class AnnouncedChip:
    """A generation that libtpu has no topology for; fields are as those of `Chip`, which it becomes one day."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    jax_kind: str
    compiler: str
    devices: int
    cores: int
    hbm_bytes: float  # All of its memory; programs may use a little less.
    hbm_bytes_per_s: float
    bf16_flops: float
    mxu_8bit_dtype: str
    mxu_8bit_flops: float  # Dense peak per second in that type.
    refused_by: str  # The compiler that has no topology for it.


def load(file: Traversable, kind: type[T]) -> T:
    """Read a file as a value of a class.

    Raises:
        ValueError: The file is wrong; the message says where.
    """
    try:
        return validate(kind, parse_yaml(file.read_text()), {kind: "write what the other files in its folder have"})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _load_all(folder: str, kind: type[T]) -> list[T]:
    files = (file for file in (resources.files("cluster") / folder).iterdir() if file.name.endswith(".yaml"))
    return [load(file, kind) for file in sorted(files, key=lambda file: file.name)]


CHIPS = {chip.name: chip for chip in _load_all("generations", Chip)}
ANNOUNCED = {chip.name: chip for chip in _load_all("announced", AnnouncedChip)}
