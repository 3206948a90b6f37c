"""`wan-tpu cluster up | status | down`: an emulated cluster on this machine; `status` shows real ones too."""

import argparse
import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from actors.commands.arguments import emulated
from cluster.emulation.cluster import EmulatedCluster, Settings, default_folder, emulated_slices
from cluster.errors import LayoutError
from cluster.layout import Layout, shipped

LAYOUT = "layout.yaml"  # beside the cluster's state file


def cluster(argv: Sequence[str]) -> None:
    """Start, show and stop clusters."""
    parser = argparse.ArgumentParser(prog="wan-tpu cluster", description=cluster.__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    start = actions.add_parser("up", help="start an emulated cluster that stays until `down`")
    start.add_argument(
        "--emulate", required=True, metavar="LAYOUT", help=f"layout file, or a shipped one: {', '.join(shipped())}"
    )
    show = actions.add_parser("status", help="draw its slices, pools and what runs where")
    show.add_argument("--address", help='of any Ray cluster, "host:port"; default: the emulated one')
    stop = actions.add_parser("down", help="stop the emulated cluster, also what a crash has left of it")
    for action in (start, show, stop):
        action.add_argument(
            "--folder", type=Path, default=default_folder(), help="its state file's folder; default %(default)s"
        )
    args = parser.parse_args(argv)
    {"up": _up, "status": _status, "down": _down}[args.action](args)


def _up(args: argparse.Namespace) -> None:
    layout = Layout.load(args.emulate)
    slices = emulated_slices(layout)
    running = EmulatedCluster.start(slices, Settings(dashboard=True), folder=args.folder, outlive=True)
    shutil.copy(layout.source, args.folder / LAYOUT)
    hosts = sum(s.spec.hosts for s in slices)
    print(f"emulated cluster of {len(slices)} slices, {hosts} hosts: RAY_ADDRESS={running.address}")
    print(f"jobs are taken at http://{running.dashboard}")


def _status(args: argparse.Namespace) -> None:
    from cluster.connect import connect  # these bring Ray
    from cluster.drawing import draw
    from cluster.inventory import slices_found

    layout, address = None, args.address
    if address is None:
        running = emulated(args.folder)
        address = running.address
        with contextlib.suppress(LayoutError):  # of a cluster that wasn't started by this command
            layout = Layout.load(args.folder / LAYOUT)
        print(f"emulated cluster at {address}, jobs at http://{running.dashboard}, started from {args.folder}")
    else:
        print(f"cluster at {address}")
    connect(address)
    print(draw(slices_found(), layout))


def _down(args: argparse.Namespace) -> None:
    EmulatedCluster.attach(args.folder).stop()
    (args.folder / LAYOUT).unlink(missing_ok=True)
    print("stopped")
