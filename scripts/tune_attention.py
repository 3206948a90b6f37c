#!/usr/bin/env python3
"""Search the attention kernel's block sizes and schedules for a chip, by compiling each and counting its bundles.

Prints every candidate, best first, and the row for `wan_tpu_kernels.blocks`. A search takes a few minutes on two cores.
"""

import argparse
import datetime
import itertools

from kernel_tables.attention_kernels import Row, ours

from cluster.chips import CHIPS
from wan_tpu_kernels.blocks import MIB, BlockSizes, Schedule

# Rows of Q: multiples of 256 that divide 75,776 with little left over; the last two are maxdiffusion's (its pull
# request 452).
BLOCKS = ((3328, 2560), (2816, 2560), (9472, 2048), (9472, 1024), (6400, 2048))
SCHEDULES = (
    Schedule(512),
    Schedule(1280),
    Schedule(512, columns=256, ahead=2, mxu_sums=True),
    Schedule(512, columns=256, ahead=4, mxu_sums=True),
    Schedule(512, columns=256, ahead=4, mxu_sums=False),
    Schedule(256, columns=256, ahead=4, mxu_sums=True),
)


def main() -> None:
    """Compile every candidate, print the count of each, then all in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--softmax", choices=("bounded", "optimistic", "online"), default="optimistic")
    parser.add_argument("--low-precision", action="store_true", help="8-bit logits, as the chip has them")
    parser.add_argument("--blocks", nargs="+", metavar="QxKV", default=[f"{q}x{kv}" for q, kv in BLOCKS])
    parser.add_argument("--vmem", type=int, default=48, help="MiB that a kernel may use; default %(default)s")
    args = parser.parse_args()
    qk = CHIPS[args.chip].mxu_8bit_dtype if args.low_precision else None

    candidates: list[tuple[Row, BlockSizes, Schedule]] = []
    sizes = [tuple(map(int, block.split("x"))) for block in args.blocks]
    for (block_q, block_kv), schedule in itertools.product(sizes, SCHEDULES):
        if block_kv % schedule.chunk:
            continue
        blocks = BlockSizes(block_q, block_kv, schedule, schedule, args.vmem * MIB)
        row = ours(args.chip, args.softmax, qk, blocks)
        print(f"{row.tile:>12} {schedule}: {row.note or f'{row.per_million:.0f}'}", flush=True)
        if row.per_million is not None:
            candidates.append((row, blocks, schedule))
    if not candidates:
        parser.exit(1, "no candidate compiles; pass smaller --blocks\n")
    best, blocks, schedule = min(candidates, key=lambda entry: entry[0].per_million or 0)
    part = "online" if args.softmax == "online" else "fixed"
    print(f"best, {args.softmax} {part}={schedule}, blocks {blocks.block_q} x {blocks.block_kv}")
    print(f"# {best.per_million:.0f} bundles a million scores, tune_attention.py, {datetime.date.today()}")


if __name__ == "__main__":
    main()
