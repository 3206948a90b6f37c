"""Kinds of slices by their usual names: "v6e-8", "v5p-8", "v7x-4", or a generation with its topology, "v5p:2x2x2".

The number counts chips, but for v5p, which is named by its cores: a v5p-8 has 4 chips. Topologies of each size are
those that Cloud TPU offers (the pages named in chips.py).
"""

import math
import re
from dataclasses import dataclass

from cluster.chips import CHIPS, Chip

Sizes = dict[int, tuple[int, ...]]  # chips -> shape
_FLAT: Sizes = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
_CUBES: Sizes = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4)}
_CUBES |= {128: (4, 4, 8), 256: (4, 8, 8)}
TOPOLOGIES: dict[str, Sizes] = {
    "v5e": _FLAT,
    "v5p": _CUBES,
    "v6e": _FLAT,
    "v7x": {1: (1, 1, 1)} | _CUBES,
}


class UnknownSlice(ValueError):
    """No such kind of slice; the message names the nearest."""


@dataclass(frozen=True)
class SliceKind:
    """Chips of one generation joined by ICI.

    shape       chips along each axis of the interconnect; host_shape  the part of it that one host has
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    host_shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        """Chips in all."""
        return math.prod(self.shape)

    @property
    def hosts(self) -> int:
        """Machines, each with a process of its own."""
        return self.chips // math.prod(self.host_shape)

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
        """Which axes close to a ring.

        A 2D torus only where an axis spans the whole pod of 16; a 3D one where all axes are multiples of 4, the
        blocks that optical switches join.
        """
        if self.chip.torus_axes == 2:
            return tuple(size == 16 for size in self.shape)
        return (all(size % 4 == 0 for size in self.shape),) * len(self.shape)


def slice_kind(name: str) -> SliceKind:
    """Return the kind of that name. Raises `UnknownSlice` naming the nearest kind there is."""
    found = re.fullmatch(r"([a-z0-9]+?)(?:-(\d+)|:([\dx]+))", name.strip().lower())
    if not found:
        raise UnknownSlice(f"{name!r} is no slice; write a generation and a size, such as v6e-8 or v5p:2x2x1")
    chip = _chip(found[1], name, int(found[2] or 8))
    if found[3]:
        return _of_shape(name, chip, tuple(int(size) for size in found[3].split("x") if size))
    count = int(found[2])
    chips = count // chip.cores if chip.name == "v5p" else count
    sizes = TOPOLOGIES[chip.name]
    if chips not in sizes or (chip.name == "v5p" and count % chip.cores):
        raise UnknownSlice(f"there is no {name}; nearest: {_nearest(chip, chips)}; all: {', '.join(kinds(chip.name))}")
    return _of_shape(name, chip, sizes[chips])


def kinds(generation: str | None = None) -> list[str]:
    """Return the names of all kinds, or those of one generation."""
    chosen = CHIPS.values() if generation is None else [CHIPS[generation]]
    return [_name(chip, chips) for chip in chosen for chips in TOPOLOGIES[chip.name]]


def _chip(generation: str, name: str, size: int) -> Chip:
    for chip in CHIPS.values():
        if generation in (chip.name, chip.compiler, chip.gke_accelerator):
            return chip
    digits = re.sub(r"\D", "", generation)
    alike = [chip for chip in CHIPS.values() if digits and digits in chip.name] or list(CHIPS.values())
    nearest = ", ".join(_nearest(chip, size // chip.cores if chip.name == "v5p" else size) for chip in alike)
    raise UnknownSlice(f"{name!r} is of no generation known here ({', '.join(CHIPS)}); nearest: {nearest}")


def _of_shape(name: str, chip: Chip, shape: tuple[int, ...]) -> SliceKind:
    allowed = TOPOLOGIES[chip.name].values()
    if shape not in allowed:
        nearest = _nearest(chip, math.prod(shape) if shape else 1)
        raise UnknownSlice(
            f"{name!r} is no topology of {chip.name}; nearest: {nearest}; "
            f"all: {', '.join('x'.join(map(str, known)) for known in allowed)}"
        )
    if math.prod(shape) in chip.one_host_chips:
        return SliceKind(name, chip, shape, shape)
    return SliceKind(name, chip, shape, (2, 2, 1)[: len(shape)])  # hosts of 4 chips, in all generations


def _nearest(chip: Chip, chips: int) -> str:
    sizes = TOPOLOGIES[chip.name]
    return _name(chip, min(sizes, key=lambda size: (abs(math.log2(size / max(chips, 1))), size)))


def _name(chip: Chip, chips: int) -> str:
    return f"{chip.name}-{chips * chip.cores if chip.name == 'v5p' else chips}"
