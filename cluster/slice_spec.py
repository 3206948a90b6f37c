"""Kinds of slices by their usual names: "v6e-8", "v5p-8", "v7x-4", or a generation with its topology, "v5p:2x2x2".

The number counts what the generation's `name_counts` says: a v5p-8 has 8 cores, which are 4 chips. Ray's spelling of
all this is that of Ray 2.60 (ray/_private/accelerators/tpu.py): tests/cluster/test_slice_spec.py asks Ray's own
functions.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.chips import CHIPS, Chip
from cluster.errors import UnknownSlice

# Labels that Ray gives to TPU hosts.
ACCELERATOR_TYPE = "ray.io/accelerator-type"
SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
TOPOLOGY = "ray.io/tpu-topology"
POD_TYPE = "ray.io/tpu-pod-type"
# Ours, and only emulated hosts have it: how many CPU devices the host shows in place of its chips.
DEVICES = "wan-tpu/devices"


@dataclass(frozen=True)
class SliceSpec:
    """A kind of slice: chips of one generation joined by ICI. Raises `UnknownSlice` naming the nearest kind there is.

    shape       chips along each axis of the interconnect; host_shape  the part of it that one host has
    """

    name: str
    chip: Chip = field(init=False, repr=False)
    shape: tuple[int, ...] = field(init=False, repr=False)
    host_shape: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        chip, shape = _parsed(self.name)
        host_shape = shape if math.prod(shape) in chip.one_host_chips else chip.host_shape
        for key, value in (("chip", chip), ("shape", shape), ("host_shape", host_shape)):
            object.__setattr__(self, key, value)

    def __str__(self) -> str:
        return self.name

    @property
    def chips(self) -> int:
        """Chips in all."""
        return math.prod(self.shape)

    @property
    def chips_per_host(self) -> int:
        """Chips of one host."""
        return math.prod(self.host_shape)

    @property
    def hosts(self) -> int:
        """Machines, each with a process of its own."""
        return self.chips // self.chips_per_host

    @property
    def devices(self) -> int:
        """What `jax.devices()` counts."""
        return self.chips * self.chip.devices

    @property
    def topology(self) -> str:
        """The shape as GKE and Ray write it: "2x4", "2x2x1"."""
        return "x".join(map(str, self.shape))

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which axes close to a ring."""
        block = self.chip.ring_block
        if block is None:
            return tuple(size == self.chip.ring_size for size in self.shape)
        return (all(size % block == 0 for size in self.shape),) * len(self.shape)

    @property
    def pod_type(self) -> str:
        """Ray's name: its own generation and the TensorCores, such as "v5litepod-8", "v5p-8", "v6e-16", "v7x-8"."""
        generation = self.chip.ray_accelerator.removeprefix("TPU-").lower()
        return f"{generation}-{self.chips * self.chip.cores}"

    @property
    def head_resource(self) -> str:
        """Ray's resource that only the host with worker id 0 has."""
        return f"TPU-{self.pod_type}-head"

    def host_resources(self, worker_id: int) -> dict[str, float]:
        """Return what Ray counts on the host with that worker id: {"TPU": chips}, and one slice on the first host."""
        return {"TPU": float(self.chips_per_host)} | ({self.head_resource: 1.0} if worker_id == 0 else {})

    @property
    def host_selector(self) -> dict[str, str]:
        """The Ray labels that all hosts of such a slice have.

        An autoscaler launches nodes for these only if it knows that they will have them: a worker group's own labels,
        the same for all of its nodes. So slice name and worker id can't be among them.
        """
        return {POD_TYPE: self.pod_type, TOPOLOGY: self.topology}

    def host_labels(self, worker_id: int, slice_name: str) -> dict[str, str]:
        """Return all labels that Ray gives such a host of a slice of that name."""
        return {
            ACCELERATOR_TYPE: self.chip.ray_accelerator,
            SLICE_NAME: slice_name,
            WORKER_ID: str(worker_id),
            TOPOLOGY: self.topology,
            POD_TYPE: self.pod_type,
        }

    @property
    def gke_selector(self) -> Mapping[str, str]:
        """Node selector of GKE node pools of this kind."""
        return {
            "cloud.google.com/gke-tpu-accelerator": self.chip.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": self.topology,
        }


def kinds(generation: str | None = None) -> list[str]:
    """Return the names of all kinds, or those of one generation."""
    chosen = CHIPS.values() if generation is None else [CHIPS[generation]]
    return [slice_name(chip, chips) for chip in chosen for chips in chip.sizes]


def _chip(generation: str, name: str, size: int) -> Chip:
    for chip in CHIPS.values():
        if generation in (chip.name, chip.compiler, chip.gke_accelerator):
            return chip
    digits = re.sub(r"\D", "", generation)
    alike = [chip for chip in CHIPS.values() if digits and digits in chip.name] or list(CHIPS.values())
    nearest = ", ".join(_nearest(chip, size // chip.counted_per_chip) for chip in alike)
    raise UnknownSlice(f"{name!r} is of no generation known here ({', '.join(CHIPS)}); nearest: {nearest}")


def _parsed(name: str) -> tuple[Chip, tuple[int, ...]]:
    match = re.fullmatch(r"([a-z0-9]+?)(?:-(\d+)|:([\dx]+))", str(name).strip().lower())
    if not match:
        raise UnknownSlice(f"{name!r} is no slice; write a generation and a size, such as v6e-8 or v5p:2x2x1")
    chip = _chip(match[1], name, int(match[2] or 8))
    sizes = chip.sizes
    if match[3]:
        shape = tuple(int(size) for size in match[3].split("x") if size)
        if shape not in sizes.values():
            allowed = ", ".join("x".join(map(str, known)) for known in sizes.values())
            nearest = _nearest(chip, math.prod(shape))
            raise UnknownSlice(f"{name!r} is no topology of {chip.name}; nearest: {nearest}; all: {allowed}")
        return chip, shape
    count = int(match[2])
    chips, rest = divmod(count, chip.counted_per_chip)
    if chips not in sizes or rest:
        raise UnknownSlice(f"there is no {name}; nearest: {_nearest(chip, chips)}; all: {', '.join(kinds(chip.name))}")
    return chip, sizes[chips]


def _nearest(chip: Chip, chips: int) -> str:
    return slice_name(chip, min(chip.sizes, key=lambda size: (abs(math.log2(size / max(chips, 1))), size)))


def slice_name(chip: Chip, chips: int) -> str:
    """Return the name of a slice of so many chips."""
    return f"{chip.name}-{chips * chip.counted_per_chip}"
