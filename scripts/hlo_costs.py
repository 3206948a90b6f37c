#!/usr/bin/env python3
"""Print what a compiled TPU program costs, from the text that `compiled.as_text()` returned, gzipped or not.

    hlo_costs.py step.hlo --slice v6e-8 --kernel splash=25283 --kernel splash@10x23x1=4597 --prefer optimistic

--kernel NAME[@GRID]=BUNDLES prices every Pallas call whose name contains NAME (and whose grid is GRID, where given) at
BUNDLES a grid step; the last that matches counts. --count counts the others by compiling each alone. --prefer says
which branch of a conditional to follow. The program's devices are the slice's, in the order in which JAX lists them.
"""

import argparse
import gzip
import os
import re
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # slices are described, this machine's own accelerators stay untouched

import numpy as np
from jax.sharding import Mesh

from actors.planning.slice_description import describe_slice
from cluster.errors import ClusterError
from cluster.slice_spec import SliceSpec
from wan_tpu.cli import run
from wan_tpu.pricing.analyse import KernelCycles, analyse
from wan_tpu.pricing.ici import interconnect_of
from wan_tpu.pricing.kernel_calls import KernelCall
from wan_tpu.pricing.kernel_prices import KernelPrices, count_alone
from wan_tpu.pricing.report import describe
from wan_tpu_kernels.catalogue import ATTENTION


def main() -> None:
    """Print the tables of `describe`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hlo", type=Path)
    parser.add_argument("--slice", default="v6e-8")
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME[@GRID]=BUNDLES")
    parser.add_argument("--count", type=Path, metavar="FOLDER", help="count other kernels, and keep that in a folder")
    parser.add_argument("--prefer", action="append", default=[], metavar="NAME")
    parser.add_argument("--top", type=int, default=20)
    args = parser.parse_args()
    for option in args.kernel:
        if not re.fullmatch(r"[^=]+=\d+(\.\d+)?", option):
            parser.error(f"--kernel {option}: give NAME=BUNDLES or NAME@GRID=BUNDLES, such as splash=25283")
    where = describe_slice(SliceSpec(args.slice))
    counted = KernelPrices(args.count, where.hardware, where.cores, count_alone) if args.count else None
    cost = analyse(
        (gzip.decompress if args.hlo.suffix == ".gz" else bytes)(args.hlo.read_bytes()).decode(),
        where.hardware,
        interconnect_of(where, Mesh(np.array(where.devices()), ("devices",))),
        kernel_cycles=prices(args.kernel, where.cores, counted),
        prefer=args.prefer,
        others=ATTENTION,
    )
    print(describe(cost, top=args.top))


def prices(options: list[str], cores: int, counted: KernelPrices | None) -> KernelCycles:
    """Turn NAME[@GRID]=BUNDLES into a function of the kernel call; `counted` prices what no option names."""

    def cycles(call: KernelCall) -> float | None:
        price = None
        for option in options:
            key, _, bundles = option.partition("=")
            name, _, grid = key.partition("@")
            if name in call.name and grid in ("", "x".join(map(str, call.grid))):
                price = float(bundles) * call.steps_a_core(cores)
        return counted(call) if price is None and counted is not None else price

    return cycles


if __name__ == "__main__":
    sys.exit(run(lambda _: main(), expected=(ClusterError, ValueError, OSError)))
