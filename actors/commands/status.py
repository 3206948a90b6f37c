"""`wan-tpu status`: show the slices of a cluster, and what its pipeline is doing."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from actors.commands.arguments import add_cluster_arguments
from actors.commands.connection import build_not_found, find_emulated_cluster, find_gcs_address
from wan_tpu.commands.parser import Parser

if TYPE_CHECKING:
    from cluster.inventory import LiveSlice

WATCH_S = 1.0  # Seconds between two updates of --watch.
MAX_LOST_SLICES = 5  # How many slices without hosts to list. Ray never forgets a slice that was taken away.


def status(argv: Sequence[str]) -> None:
    """Show pools, slices, queues, running requests, and how long steps and hand-offs take."""
    parser = Parser(prog="wan-tpu status", description=status.__doc__)
    add_cluster_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object, for programs; with --watch, one per line"
    )
    parser.add_argument("--watch", action="store_true", help="update every second, until Ctrl-C")
    args = parser.parse_args(argv)

    from actors.pipeline.status import format_status, read_status
    from cluster.connect import connect
    from cluster.drawing import draw
    from cluster.inventory import list_slices

    address = find_gcs_address(args)
    emulated = None if args.address or "RAY_ADDRESS" in os.environ else find_emulated_cluster(args)
    jobs = f", jobs at http://{emulated.dashboard}" if emulated and emulated.dashboard else ""
    connect(address)
    while True:
        slices, hidden = _select_shown(list_slices())
        pipeline = read_status(args.name, slices)
        if args.json:
            rows = [_describe(slice_) for slice_ in slices]
            text = json.dumps({"slices": rows, "gone": hidden, "pipeline": pipeline and asdict(pipeline)})
        else:
            status_text = format_status(pipeline) if pipeline else str(build_not_found(args.name))
            note = f"\n  and {hidden} more without any hosts left" if hidden else ""
            text = f"cluster at {address}{jobs}\n{draw(slices)}{note}\n{status_text}"
        if args.watch and not args.json and sys.stdout.isatty():
            print("\x1b[H\x1b[J", end="")
        print(text, flush=True)
        if not args.watch:
            return
        time.sleep(WATCH_S)


def _select_shown(slices: Sequence["LiveSlice"]) -> tuple[list["LiveSlice"], int]:
    """Return the slices to list, and how many slices without hosts are left out."""
    lost_slices = [slice_ for slice_ in slices if not slice_.hosts]
    hidden = {slice_.name for slice_ in lost_slices[MAX_LOST_SLICES:]}
    return [slice_ for slice_ in slices if slice_.name not in hidden], len(hidden)


def _describe(slice_: "LiveSlice") -> dict[str, object]:
    fields = {name: value for name, value in asdict(slice_).items() if name not in ("pod_type", "spec")}
    kind = str(slice_.spec or slice_.pod_type)
    return fields | {"kind": kind, "emulated": slice_.emulated, "missing": slice_.missing}
