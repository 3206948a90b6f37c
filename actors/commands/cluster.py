"""`wan-tpu cluster up | status | down`: an emulated cluster on this machine; `status` shows real ones too."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster.drawing import draw
from cluster.emulated import EmulatedCluster, Settings, default_folder
from cluster.errors import ClusterNotFound, LayoutError
from cluster.layout import Layout, shipped
from wan_tpu.expert import STAGES, TOGETHER

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
    layout = Layout.load(args.emulate, STAGES, TOGETHER)
    slices = layout.emulated_slices()
    running = EmulatedCluster.start(slices, Settings(dashboard=True), folder=args.folder, outlive=True)
    shutil.copy(layout.source, args.folder / LAYOUT)
    hosts = sum(s.spec.hosts for s in slices)
    print(f"emulated cluster of {len(slices)} slices, {hosts} hosts: RAY_ADDRESS={running.address}")
    print(f"jobs are taken at http://{running.dashboard}")


def _status(args: argparse.Namespace) -> None:
    layout = None
    if args.address is None:
        running = EmulatedCluster.attach(args.folder)
        if not running.running:
            raise ClusterNotFound(
                f"the emulated cluster of {args.folder} is not running any more; wan-tpu cluster down"
            )
        address = running.address
        layout = _layout(args.folder / LAYOUT)
        print(f"emulated cluster at {address}, jobs at http://{running.dashboard}, started from {args.folder}")
    else:
        address = args.address
        print(f"cluster at {address}")
    from cluster.connect import connect

    connect(address)
    from cluster.inventory import slices_found

    print(draw(slices_found(), layout))


def _down(args: argparse.Namespace) -> None:
    EmulatedCluster.attach(args.folder).stop()
    (args.folder / LAYOUT).unlink(missing_ok=True)
    print("stopped")


def _layout(path: Path) -> Layout | None:
    try:
        return Layout.load(path, STAGES, TOGETHER)
    except LayoutError:  # of a cluster that wasn't started by this command
        return None
