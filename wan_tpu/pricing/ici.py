"""The time of a collective on the links between chips.

Traffic is assigned to the real links: members of a group have their coordinates in the slice, every hop is routed
dimension by dimension over the shorter way, all groups of a collective run at once, and the busiest link determines the
time. Latency is not modelled: it is microseconds, whereas the collectives that matter here take hundreds.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from wan_tpu.aot.topology import DescribedSlice

Coordinate = tuple[int, ...]
Link = tuple[Coordinate, Coordinate]  # One direction of a link: from, to.
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast")  # fmt: skip


@dataclass(frozen=True)
class Interconnect:
    """The links among the devices of a program."""

    # Those of each device, (x, y, z, core on chip), in the program's order (`mesh.devices.flat`).
    coordinates: tuple[Coordinate, ...]
    link_bytes_per_s: float  # The bandwidth of one ICI link in one direction.
    # The bandwidth between a chip's two devices in one direction; unused on chips of one device.
    core_bytes_per_s: float
    wraps: Coordinate = (0, 0, 0, 0)  # The size of each axis that closes to a ring, and 0 for an axis that doesn't.

    def seconds(self, kind: str, groups: Sequence[Sequence[int]], data_bytes: float) -> float:
        """Return the time of one collective that has the links to itself; the arguments are those of `busy`."""
        return max(self.busy(kind, groups, data_bytes).values(), default=0.0)

    def busy(self, kind: str, groups: Sequence[Sequence[int]], data_bytes: float) -> dict[Link, float]:
        """Return the seconds for which one collective keeps each link that it uses busy.

        Args:
            kind: One of `KINDS`.
            groups: Members by position in the program's device order; (source, target) pairs for a permute.
            data_bytes: For an all-gather, the size of the gathered array; for all others, of each member's input.
        """
        load: defaultdict[Link, float] = defaultdict(float)
        for group in groups:
            if len(set(group)) < 2:
                continue
            for source, target, share in _list_transfers(kind, self._order_ring(kind, group)):
                for link in self._route(self.coordinates[source], self.coordinates[target]):
                    load[link] += share * data_bytes
        return {link: volume / self._find_bandwidth(link) for link, volume in load.items()}

    def _find_bandwidth(self, link: Link) -> float:
        source, target = link
        return self.link_bytes_per_s if source[:3] != target[:3] else self.core_bytes_per_s

    def _route(self, source: Coordinate, target: Coordinate) -> Iterator[Link]:
        """Yield the directed links from source to target: within the chip first, then x, y, z.

        The two devices of a chip share its ICI links: these are named by chip, (x, y, z) alone.
        """
        if source[3] != target[3]:
            yield source, (*source[:3], target[3])
        here = list(source[:3])
        for axis in range(3):
            while here[axis] != target[axis]:
                before = tuple(here)
                here[axis] = self._find_next(axis, here[axis], target[axis])
                yield before, tuple(here)

    def _find_next(self, axis: int, here: int, target: int) -> int:
        size = self.wraps[axis]
        if size == 0:
            return here + (1 if target > here else -1)
        forward = (target - here) % size
        return (here + (1 if forward <= size - forward else -1)) % size

    def _order_ring(self, kind: str, group: Sequence[int]) -> list[int]:
        """Order a group so that neighbours are close: as a cycle through a block of chips if it is one."""
        if kind in ("all-to-all", "ragged-all-to-all", "collective-permute"):
            return list(group)
        candidates = [_order_snake(self.coordinates, group, flipped) for flipped in (False, True)]
        return min(candidates, key=lambda order: self._count_hops(order))

    def _count_hops(self, order: Sequence[int]) -> int:
        following = [*order[1:], order[0]]
        return sum(
            len(list(self._route(self.coordinates[a], self.coordinates[b])))
            for a, b in zip(order, following, strict=True)
        )


def interconnect_of(slice_: DescribedSlice, mesh: Mesh) -> Interconnect:
    """Return the links among the devices of a mesh over a described slice."""
    coordinates = tuple((*device.coords, device.core_on_chip) for device in mesh.devices.flat)
    return Interconnect(coordinates, slice_.link_bytes_per_s, slice_.core_bytes_per_s, (*slice_.wraps, 0))


def _list_transfers(kind: str, group: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Yield (source, target, share of the data) of every transfer of a collective.

    Rings run in both directions with half the data each, as the compiler's strategies with two colours do: each of
    n - 1 stages moves a 1/n shard to the neighbour. An all-reduce is a reduce-scatter and an all-gather.
    """
    n = len(group)
    if kind == "collective-permute":
        yield group[0], group[1], 1.0
    elif kind in ("all-to-all", "ragged-all-to-all"):
        yield from ((a, b, 1 / n) for a in group for b in group if a != b)
    else:
        share = (n - 1) / n / 2 * (2 if kind == "all-reduce" else 1)
        for here, following in zip(group, [*group[1:], group[0]], strict=True):
            yield here, following, share
            yield following, here, share


def _order_snake(coordinates: Sequence[Coordinate], group: Sequence[int], flipped: bool) -> list[int]:
    """Order a block of devices as a cycle of neighbours: out along the first row, back in turns through the others.

    All axes but one count as rows, numbered so that consecutive rows are neighbours; devices of one chip stay together.
    """
    chips = {member: coordinates[member][:3] for member in group}
    axes = [axis for axis in range(3) if len({chip[axis] for chip in chips.values()}) > 1]
    axes = axes[::-1] if flipped else axes
    if not axes:
        return sorted(group, key=lambda member: coordinates[member])
    first, rest = axes[0], axes[1:]
    rows = {
        row: i for i, row in enumerate(_order_neighbours({tuple(c[axis] for axis in rest) for c in chips.values()}))
    }
    columns = sorted({chip[first] for chip in chips.values()}, reverse=True)

    def position(member: int) -> tuple[int, ...]:
        chip, core = chips[member], coordinates[member][3]
        row, column = rows[tuple(chip[axis] for axis in rest)], columns.index(chip[first])
        if row == 0:
            return (0, -column, 0, core)
        return (1, column, row if column % 2 == 0 else -row, core)

    return sorted(group, key=position)


def _order_neighbours(rows: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Order points of one or two dimensions so that consecutive ones are neighbours."""
    return sorted(rows, key=lambda row: (row[0], *(n if row[0] % 2 == 0 else -n for n in row[1:])) if row else ())


def parse_groups(kind: str, attributes: str) -> list[list[int]]:
    """Return the groups (pairs for a permute) that a collective's attributes name.

    Three notations are in use: {{0,4},{1,5}}, [2,4]<=[8] with an optional T(1,0), and mesh['a'=2,'b'=4] {'b'}.
    """
    if kind == "collective-permute":
        match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
        return _parse_lists(match[1]) if match else []
    if match := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}", attributes):
        return _parse_lists(match[1])
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, sizes = _parse_numbers(match[1]), _parse_numbers(match[2])
        devices = np.arange(int(np.prod(sizes))).reshape(sizes)
        devices = devices.transpose(_parse_numbers(match[3])) if match[3] else devices
        return devices.reshape(shape).tolist()
    if match := re.search(r"replica_groups=(?:@\w+)?mesh\[([^\]]*)\](.*?)\{([^}]*)\}", attributes):
        return _parse_mesh_groups(match[1], match[2], match[3])
    raise ValueError(f"replica groups in an unknown notation: {attributes[:200]}")


def _parse_mesh_groups(axes: str, order: str, chosen: str) -> list[list[int]]:
    """Return the groups along chosen axes of a mesh, or along parts of axes: 'a':(2)4 is the middle of 2 x 4 x rest."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    members = []
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        start = int(before or 1)
        members.append((name, start, start * int(part or sizes[name])))
    # The mesh's axes and their parts, as (name, start, stop): the products of sizes before a part and through it.
    split: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        bounds = sorted({1, size, *(bound for other, *part in members if other == name for bound in part)})
        split += [(name, start, stop) for start, stop in itertools.pairwise(bounds)] or [(name, 1, 1)]
    shape = [stop // start for _, start, stop in split]
    match = re.search(r"device_ids=\(([\d,]+)\)", order)
    devices = np.array(_parse_numbers(match[1]) if match else range(math.prod(shape))).reshape(shape)
    inner = [
        axis
        for name, start, stop in members
        for axis, (other, first, last) in enumerate(split)
        if other == name and start <= first and last <= stop
    ]
    outer = [axis for axis in range(len(split)) if axis not in inner]
    width = math.prod(shape[axis] for axis in inner)
    return devices.transpose(outer + inner).reshape(-1, width).tolist()


def _parse_lists(text: str) -> list[list[int]]:
    return [_parse_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
