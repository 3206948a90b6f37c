#!/usr/bin/env python3
"""Count the bundles of attention kernels, ours and others', with the TPU compiler; no TPU needed.

Needs libtpu (`pip install ".[aot]"`); tokamax's row needs tokamax. A bundle is a cycle when nothing stalls. The column
"slots" is the least the kernel's instructions allow, start and end of the kernel included.
"""

import argparse
import dataclasses
import json

from wan_tpu.aot.attention_kernels import LOW_PRECISION, table


def main() -> None:
    """Print one row a kernel as it is compiled, or one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", choices=LOW_PRECISION, default="v6e")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print(f"{args.chip}, D=128, bfloat16; bundles a million scores of the hot region")
        print(f"{'kernel':32} {'tile':>12} {'hot/M':>8} {'slots/M':>8} {'a step':>8} {'other':>8}")
    for row in table(args.chip):
        if args.json:
            print(json.dumps(dataclasses.asdict(row)), flush=True)
        elif row.per_million is None:
            print(f"{row.kernel:32} {row.tile:>12} {row.note}", flush=True)
        else:
            numbers = f"{row.per_million:8.0f} {row.slots_per_million:8.0f} {row.step:8} {row.outside:8}"
            print(f"{row.kernel:32} {row.tile:>12} {numbers}", flush=True)


if __name__ == "__main__":
    main()
