"""The TPU generations: what one chip has, and what Google, JAX and Ray call it.

Each generation is a file of facts in `cluster/generations/`, every figure with its source; all else derives from them.
"""

import math
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict

from cluster.yaml_values import parsed, validated

GIB = 2**30

Shape = Annotated[tuple[int, ...], BeforeValidator(lambda text: str(text).split("x"))]  # Written as "2x4".


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation; figures are of a whole chip.

    Attributes:
        name: The usual name, which names of slices begin with.
        jax_kind: `device_kind` of its devices in JAX.
        compiler: Its name in the compiler's topologies.
        devices: JAX devices of a chip.
        cores: TensorCores of a chip.
        name_counts: What the number in a slice's name counts.
        usable_gib: Memory that programs may use, as libtpu's compiler says when it refuses one.
        hbm_bytes_per_s: Bandwidth of that memory.
        bf16_flops: Dense peak a second; a multiply-add is two operations.
        clock_hz: Clock of the TensorCore, which issues one VLIW bundle a cycle.
        matrix_8_bits: The 8-bit type, as JAX names it, whose products take half the time of bfloat16's.
        ici_link_bytes_per_s: Rate of one link in one direction; two an axis of the torus leave a chip.
        core_link_bytes_per_s: Rate between the two devices of a chip, in one direction; None where it is one device.
        sparse_core_collectives: Collectives that its compiler hands to SparseCores unless told otherwise.
        topologies: The shapes of slices that Google offers, one of each number of chips.
        ring_size: An axis of so many chips closes to a ring, and no other; None where `ring_block` says it.
        ring_block: All axes close to rings where all are multiples of this; None where `ring_size` says it.
        host_shape: The chips of one host where a slice has several hosts.
        one_host_chips: The numbers of chips that a single host can have.
        ray_accelerator: Ray's name.
        device_files: Files in /dev of a chip, each of which Ray counts as a chip.
        gke_accelerator: The name in GKE's node selector.
        gke_machines: GKE's machine types by their number of chips.
        tpu_vm_runtime: The software version that Cloud TPU's API is asked for; None where it has no such chips.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    jax_kind: str
    compiler: str
    devices: int
    cores: int
    name_counts: Literal["chips", "cores"] = "chips"
    usable_gib: float
    hbm_bytes_per_s: float
    bf16_flops: float
    clock_hz: float
    matrix_8_bits: str
    ici_link_bytes_per_s: float
    core_link_bytes_per_s: float | None = None
    sparse_core_collectives: tuple[str, ...] = ()
    topologies: tuple[Shape, ...]
    ring_size: int | None = None
    ring_block: int | None = None
    host_shape: Shape
    one_host_chips: tuple[int, ...]
    ray_accelerator: str
    device_files: int = 1
    gke_accelerator: str
    gke_machines: dict[int, str] = field(default_factory=dict, hash=False)
    tpu_vm_runtime: str | None = None

    @property
    def device_bytes(self) -> float:
        """Memory that programs may use of one JAX device."""
        return self.usable_gib * GIB / self.devices

    @property
    def sizes(self) -> dict[int, tuple[int, ...]]:
        """The shape of a slice by its number of chips."""
        return {math.prod(shape): shape for shape in self.topologies}

    @property
    def counted_per_chip(self) -> int:
        """How much one chip adds to the number in a slice's name."""
        return self.cores if self.name_counts == "cores" else 1

    @property
    def host_topology(self) -> str:
        """The compiler's name of one host's chips, such as "v6e:2x2"."""
        return f"{self.compiler}:{'x'.join(map(str, self.host_shape))}"


def load_chip(file: Traversable) -> Chip:
    """Return the generation that a file describes; raises `ValueError` naming what is wrong with it."""
    try:
        return validated(Chip, parsed(file.read_text()), {Chip: "write what the other files in its folder have"})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


_files = (file for file in (resources.files("cluster") / "generations").iterdir() if file.name.endswith(".yaml"))
CHIPS = {chip.name: chip for chip in map(load_chip, sorted(_files, key=lambda file: file.name))}
