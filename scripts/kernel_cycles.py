#!/usr/bin/env python3
"""Count the bundles of kernels with the TPU compiler; no TPU needed.

    kernel_cycles.py --chip v6e                        attention: ours, jax's and tokamax's
    kernel_cycles.py --chip v6e --kernel convolution   the VAE's convolution, at each level of Wan's decoder

Needs libtpu (`pip install ".[tpu]"`); tokamax's row needs `.[peers]`. A bundle is a cycle when nothing stalls.
"slots" is the least the kernel's instructions allow, start and end of the kernel included.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # chips are described, this machine's own accelerators stay untouched

from kernel_tables.attention_kernels import table
from kernel_tables.conv_kernels import conv_table

from actors.planning.slice_description import describe_slice
from cluster.chips import CHIPS
from cluster.errors import ClusterError
from cluster.slice_spec import SliceSpec
from wan_tpu.cli import run


def main() -> None:
    """Print one row a kernel as it is compiled, or one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--kernel", choices=("attention", "convolution"), default="attention")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    show = _attention if args.kernel == "attention" else _convolution
    show(args.chip, as_json=args.json)


def _attention(chip: str, *, as_json: bool) -> None:
    if not as_json:
        print(f"{chip}, D=128, bfloat16; bundles a million scores of the hot region")
        print(f"{'kernel':32} {'tile':>12} {'hot/M':>8} {'slots/M':>8} {'a step':>8} {'other':>8}")
    for row in table(chip):
        if as_json:
            print(json.dumps(dataclasses.asdict(row)), flush=True)
        elif row.per_million is None:
            print(f"{row.kernel:32} {row.tile:>12} {row.note}", flush=True)
        else:
            numbers = f"{row.per_million:8.0f} {row.slots_per_million:8.0f} {row.step:8} {row.outside:8}"
            print(f"{row.kernel:32} {row.tile:>12} {numbers}", flush=True)


def _convolution(chip: str, *, as_json: bool) -> None:
    if not as_json:
        print(f"{chip}, 3x3x3 taps, residual, bfloat16; thousand cycles a call on one of eight devices")
        print(
            f"{'frames x columns x rows':24} {'channels':>8} {'grid':>10} {'cycles':>8} {'at peak':>8} {'HBM':>6} share"
        )
    with tempfile.TemporaryDirectory() as folder:
        for row in conv_table(describe_slice(SliceSpec(CHIPS[chip].host_topology)), Path(folder)):
            if as_json:
                print(json.dumps(dataclasses.asdict(row)), flush=True)
                continue
            sizes, grid = f"{row.frames} x {row.columns} x {row.rows}", "x".join(map(str, row.grid))
            numbers = f"{row.cycles / 1e3:8.0f} {row.at_peak / 1e3:8.0f} {row.hbm_cycles / 1e3:6.0f}"
            print(
                f"{sizes:24} {row.channels:8} {grid:>10} {numbers} {row.at_peak / row.cycles:5.0%}"
                f"   compiled in {row.compile_cpu_s:.1f} CPU s",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(run(lambda _: main(), expected=(ClusterError, ValueError, OSError)))
