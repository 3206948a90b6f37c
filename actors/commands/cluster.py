"""`wan-tpu cluster up | down`: an emulated cluster on this machine."""

import argparse
from collections.abc import Sequence

from actors.commands.arguments import LAYOUT_HELP, add_actions, add_folder
from actors.observe.console import LiveConsole
from cluster.emulation.cluster import STATE, EmulatedCluster, Settings, list_emulated_slices
from cluster.errors import ClusterNotFound
from cluster.layout import Layout
from wan_tpu.commands.parser import Parser


def cluster(argv: Sequence[str]) -> None:
    """Start and stop an emulated cluster on this machine, whose hosts have CPU devices in place of chips."""
    parser = Parser(prog="wan-tpu cluster", description=cluster.__doc__)
    actions = add_actions(parser)
    up = actions.add_parser("up", help="start an emulated cluster, which runs until wan-tpu cluster down")
    up.add_argument("--emulate", required=True, metavar="LAYOUT", help=LAYOUT_HELP)
    down = actions.add_parser("down", help="stop the emulated cluster, and remove what a crash has left of it")
    for action in (up, down):
        add_folder(action)
    args = parser.parse_args(argv)
    {"up": _start, "down": _stop}[args.action](args)


def _start(args: argparse.Namespace) -> None:
    layout = Layout.load(args.emulate)
    slices = list_emulated_slices(layout)
    hosts = sum(s.spec.hosts for s in slices)
    with LiveConsole() as live:
        live.tell(f"starting Ray nodes for {hosts} hosts")
        running = EmulatedCluster.start(
            slices, Settings(dashboard=True), folder=args.folder, outlive=True, imports="actors.imported"
        )
    print(f"emulated cluster of {len(slices)} slices, {hosts} hosts: RAY_ADDRESS={running.address}")
    print(f"jobs are accepted at http://{running.dashboard}")


def _stop(args: argparse.Namespace) -> None:
    if not (args.folder / STATE).exists():
        raise ClusterNotFound(
            f"there is no emulated cluster in {args.folder}; give the --folder that wan-tpu cluster up was run with"
        )
    EmulatedCluster.attach(args.folder).stop()
    print("stopped")
