"""`wan-tpu cluster up | down`: an emulated cluster on this machine."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cluster.emulation.cluster import EmulatedCluster, Settings, find_default_folder, list_emulated_slices
from cluster.layout import Layout, list_shipped
from wan_tpu.commands.parser import Parser


def cluster(argv: Sequence[str]) -> None:
    """Start and stop an emulated cluster."""
    parser = Parser(prog="wan-tpu cluster", description=cluster.__doc__)
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=Parser, help="what to do; each has a --help"
    )
    start = actions.add_parser("up", help="start an emulated cluster that stays until `down`")
    start.add_argument(
        "--emulate", required=True, metavar="LAYOUT", help=f"layout file, or a shipped one: {', '.join(list_shipped())}"
    )
    stop = actions.add_parser("down", help="stop the emulated cluster, also what a crash has left of it")
    for action in (start, stop):
        action.add_argument(
            "--folder",
            type=Path,
            default=find_default_folder(),
            help="of the emulated cluster's state; default %(default)s",
        )
    args = parser.parse_args(argv)
    {"up": _up, "down": _down}[args.action](args)


def _up(args: argparse.Namespace) -> None:
    layout = Layout.load(args.emulate)
    slices = list_emulated_slices(layout)
    running = EmulatedCluster.start(
        slices, Settings(dashboard=True), folder=args.folder, outlive=True, imports="actors.imported"
    )
    hosts = sum(s.spec.hosts for s in slices)
    print(f"emulated cluster of {len(slices)} slices, {hosts} hosts: RAY_ADDRESS={running.address}")
    print(f"jobs are taken at http://{running.dashboard}")


def _down(args: argparse.Namespace) -> None:
    EmulatedCluster.attach(args.folder).stop()
    print("stopped")
