#!/usr/bin/env python3
"""Print what a compiled TPU program costs, from the text that `compiled.as_text()` returned.

    hlo_costs.py step.hlo --chip v6e --topology 2x4 --kernel splash=25283 --kernel splash@10x23x1=4597 --prefer bounded

--kernel NAME[@GRID]=BUNDLES prices every Pallas call whose name contains NAME (and whose grid is GRID, where given) at
BUNDLES a grid step; the last that matches counts. --prefer says which branch of a conditional to follow.
Devices are taken in the order of their coordinates, x first, as on a mesh over one host.
"""

import argparse
import itertools
from pathlib import Path

from cluster.chips import CHIPS, Chip
from wan_tpu.aot.analyse import KernelCycles, analyse
from wan_tpu.aot.cost import Hardware
from wan_tpu.aot.ici import Interconnect
from wan_tpu.aot.kernel_calls import KernelCall
from wan_tpu.aot.report import describe


def main() -> None:
    """Print the tables of `describe`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hlo", type=Path)
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--topology", default="2x4")
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME[@GRID]=BUNDLES")
    parser.add_argument("--prefer", action="append", default=[], metavar="NAME")
    parser.add_argument("--top", type=int, default=20)
    args = parser.parse_args()
    chip = CHIPS[args.chip]
    cost = analyse(
        args.hlo.read_text(),
        hardware(chip),
        interconnect(chip, args.topology),
        kernel_cycles=prices(args.kernel),
        prefer=args.prefer,
    )
    print(describe(cost, top=args.top))


def hardware(chip: Chip) -> Hardware:
    """Return one JAX device of a chip."""
    return Hardware(
        name=chip.name,
        clock_hz=chip.clock_hz,
        peak_flops=chip.bf16_flops / chip.devices,
        hbm_bytes=chip.hbm_gib * 2**30 / chip.devices,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / chip.devices,
    )


def interconnect(chip: Chip, topology: str) -> Interconnect:
    """Return the links of a slice such as 2x4, devices ordered by core, x, y, z."""
    sizes = [int(size) for size in topology.split("x")]
    x, y, z = [*sizes, 1, 1][:3]
    grid = itertools.product(range(z), range(y), range(x), range(chip.devices))
    coordinates = tuple((x, y, z, core) for z, y, x, core in grid)
    return Interconnect(coordinates, chip.ici_link_bytes_per_s, chip.core_link_bytes_per_s or 0.0)


def prices(options: list[str]) -> KernelCycles:
    """Turn NAME[@GRID]=BUNDLES into a function of the kernel call."""

    def cycles(call: KernelCall) -> float | None:
        found = None
        for option in options:
            key, _, bundles = option.partition("=")
            name, _, grid = key.partition("@")
            if name in call.name and grid in ("", "x".join(map(str, call.grid))):
                found = float(bundles) * call.steps
        return found

    return cycles


if __name__ == "__main__":
    main()
