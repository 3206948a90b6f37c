"""Kinds of slices by their usual names: "v6e-8", "v5p-8", "v7x-4", or a generation with its topology, "v5p:2x2x2".

The number counts what the generation's `size_unit` says: a v5p-8 has 8 cores, which are 4 chips. Labels and resources
are spelled as in Ray 2.60 (ray/_private/accelerators/tpu.py); tests/cluster/test_slice_spec.py compares them with Ray's
own functions.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.chips import ANNOUNCED, CHIPS, Chip
from cluster.errors import UnknownSlice

# Labels that Ray gives to the nodes of TPU hosts.
ACCELERATOR_TYPE = "ray.io/accelerator-type"
SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
TOPOLOGY = "ray.io/tpu-topology"
POD_TYPE = "ray.io/tpu-pod-type"
# Our own label, which only emulated hosts have: how many CPU devices the host shows in place of its chips.
DEVICES = "wan-tpu/devices"


@dataclass(frozen=True)
class SliceSpec:
    """A kind of slice: chips of one generation joined by ICI.

    Attributes:
        name: The usual name, as written by whoever asked for it.
        shape: Chips along each axis of the interconnect.
        host_shape: The part of `shape` that belongs to one host.

    Raises:
        UnknownSlice: The kind is unknown; the message names the nearest.
    """

    name: str
    chip: Chip = field(init=False, repr=False)
    shape: tuple[int, ...] = field(init=False, repr=False)
    host_shape: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        chip, shape = _parse(self.name)
        host_shape = shape if math.prod(shape) in chip.one_host_chips else chip.host_shape
        for key, value in (("chip", chip), ("shape", shape), ("host_shape", host_shape)):
            object.__setattr__(self, key, value)

    def __str__(self) -> str:
        return self.name

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def chips_per_host(self) -> int:
        return math.prod(self.host_shape)

    @property
    def hosts(self) -> int:
        """How many machines it has, each with a process of its own."""
        return self.chips // self.chips_per_host

    @property
    def devices(self) -> int:
        """How many devices `jax.devices()` returns."""
        return self.chips * self.chip.devices

    @property
    def topology(self) -> str:
        """The shape as GKE and Ray write it: "2x4", "2x2x1"."""
        return "x".join(map(str, self.shape))

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which axes close to rings."""
        block = self.chip.ring_block
        if block is None:
            return tuple(size == self.chip.ring_size for size in self.shape)
        return (all(size % block == 0 for size in self.shape),) * len(self.shape)

    @property
    def pod_type(self) -> str:
        """Ray's name, which counts TensorCores: "v5litepod-8", "v5p-8", "v6e-16", "v7x-8"."""
        generation = self.chip.ray_accelerator.removeprefix("TPU-").lower()
        return f"{generation}-{self.chips * self.chip.cores}"

    @property
    def head_resource(self) -> str:
        """The Ray resource that only the host with worker id 0 has."""
        return f"TPU-{self.pod_type}-head"

    def build_host_resources(self, worker_id: int) -> dict[str, float]:
        """Return the Ray resources of a host: {"TPU": chips}, and `head_resource` on the host with worker id 0."""
        return {"TPU": float(self.chips_per_host)} | ({self.head_resource: 1.0} if worker_id == 0 else {})

    @property
    def host_selector(self) -> dict[str, str]:
        """The Ray labels that all hosts of such a slice share.

        An autoscaler launches nodes for a selector only if it knows that they will match. All it knows is the labels of
        a worker group, which are the same for all of its nodes, so slice name and worker id can't be selected by.
        """
        return {POD_TYPE: self.pod_type, TOPOLOGY: self.topology}

    def build_host_labels(self, worker_id: int, slice_name: str) -> dict[str, str]:
        """Return all labels that Ray gives to one host of a slice."""
        return {
            ACCELERATOR_TYPE: self.chip.ray_accelerator,
            SLICE_NAME: slice_name,
            WORKER_ID: str(worker_id),
            TOPOLOGY: self.topology,
            POD_TYPE: self.pod_type,
        }

    @property
    def gke_selector(self) -> Mapping[str, str]:
        """The node selector of GKE node pools of this kind."""
        return {
            "cloud.google.com/gke-tpu-accelerator": self.chip.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": self.topology,
        }


def list_kinds(generation: str | None = None) -> list[str]:
    """Return the names of all kinds of slices, or of those of one generation."""
    chosen = CHIPS.values() if generation is None else [CHIPS[generation]]
    return [name_slice(chip, chips) for chip in chosen for chips in chip.sizes]


def _find_chip(generation: str, name: str, size: int) -> Chip:
    for chip in CHIPS.values():
        if generation in (chip.name, chip.compiler, chip.gke_accelerator):
            return chip
    for announced in ANNOUNCED.values():
        if generation in (announced.name, announced.compiler):
            raise UnknownSlice(
                f"{name}: {announced.refused_by} has no topology for {announced.jax_kind} yet; "
                f"generations with slices: {', '.join(CHIPS)}"
            )
    digits = re.sub(r"\D", "", generation)
    alike = [chip for chip in CHIPS.values() if digits and digits in chip.name] or list(CHIPS.values())
    nearest = ", ".join(_name_nearest(chip, size // chip.counted_per_chip) for chip in alike)
    raise UnknownSlice(f"{name!r} doesn't begin with a known generation ({', '.join(CHIPS)}); nearest: {nearest}")


def _parse(name: str) -> tuple[Chip, tuple[int, ...]]:
    match = re.fullmatch(r"([a-z0-9]+?)(?:-(\d+)|:([\dx]+))", str(name).strip().lower())
    if not match:
        raise UnknownSlice(f"{name!r} isn't a slice; write a generation and a size, such as v6e-8 or v5p:2x2x1")
    chip = _find_chip(match[1], name, int(match[2] or 8))
    sizes = chip.sizes
    if match[3]:
        shape = tuple(int(size) for size in match[3].split("x") if size)
        if shape not in sizes.values():
            allowed = ", ".join("x".join(map(str, known)) for known in sizes.values())
            nearest = _name_nearest(chip, math.prod(shape))
            raise UnknownSlice(f"{name!r} isn't a topology of {chip.name}; nearest: {nearest}; all: {allowed}")
        return chip, shape
    count = int(match[2])
    chips, rest = divmod(count, chip.counted_per_chip)
    if chips not in sizes or rest:
        raise UnknownSlice(
            f"there is no {name}; nearest: {_name_nearest(chip, chips)}; all: {', '.join(list_kinds(chip.name))}"
        )
    return chip, sizes[chips]


def _name_nearest(chip: Chip, chips: int) -> str:
    return name_slice(chip, min(chip.sizes, key=lambda size: (abs(math.log2(size / max(chips, 1))), size)))


def name_slice(chip: Chip, chips: int) -> str:
    """Return the name of a slice of a generation with that many chips."""
    return f"{chip.name}-{chips * chip.counted_per_chip}"
