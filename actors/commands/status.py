"""`wan-tpu status`: what the pipeline of a cluster is doing."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from actors.commands.arguments import add_cluster_arguments, find_emulated, find_gcs_address
from wan_tpu.commands.parser import Parser

if TYPE_CHECKING:
    from cluster.inventory import LiveSlice

WATCH_S = 1.0  # Seconds between two updates of --watch.
MAX_GONE = 5  # Slices without hosts that are listed; Ray remembers all that were taken away.
UP = "wan-tpu pipeline up --layout ... --model ..."


def status(argv: Sequence[str]) -> None:
    """Show pools, slices, queues, requests under way, and how long steps and hand-offs take."""
    parser = Parser(prog="wan-tpu status", description=status.__doc__)
    add_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object (a line each with --watch)")
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    args = parser.parse_args(argv)

    from actors.pipeline.status import format_status, read_status
    from cluster.connect import connect
    from cluster.drawing import draw
    from cluster.inventory import list_slices

    address = find_gcs_address(args)
    running = None if args.address or "RAY_ADDRESS" in os.environ else find_emulated(args)
    jobs = f", jobs at http://{running.dashboard}" if running and running.dashboard else ""
    connect(address)
    while True:
        slices, hidden = _select_shown(list_slices())
        pipeline = read_status(args.name, slices)
        if args.json:
            rows = [_describe(slice_) for slice_ in slices]
            text = json.dumps({"slices": rows, "gone": hidden, "pipeline": pipeline and asdict(pipeline)})
        else:
            status_text = format_status(pipeline) if pipeline else f"no pipeline {args.name!r} runs here; {UP}"
            note = f"\n  and {hidden} that are gone, with all of their hosts" if hidden else ""
            text = f"cluster at {address}{jobs}\n{draw(slices)}{note}\n{status_text}"
        if args.watch and not args.json and sys.stdout.isatty():
            print("\x1b[H\x1b[J", end="")
        print(text, flush=True)
        if not args.watch:
            return
        time.sleep(WATCH_S)


def _select_shown(slices: Sequence["LiveSlice"]) -> tuple[list["LiveSlice"], int]:
    """Return the slices to list, and how many more have no host left."""
    lost_slices = [slice_ for slice_ in slices if not slice_.hosts]
    hidden = {slice_.name for slice_ in lost_slices[MAX_GONE:]}
    return [slice_ for slice_ in slices if slice_.name not in hidden], len(hidden)


def _describe(slice_: "LiveSlice") -> dict[str, object]:
    fields = {name: value for name, value in asdict(slice_).items() if name not in ("pod_type", "spec")}
    kind = str(slice_.spec or slice_.pod_type)
    return fields | {"kind": kind, "emulated": slice_.emulated, "missing": slice_.missing}
