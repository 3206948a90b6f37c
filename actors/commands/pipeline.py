"""`wan-tpu pipeline up | down`: a pipeline that stays, for all batches."""

from collections.abc import Sequence

from actors.commands.arguments import (
    add_cluster_arguments,
    add_pipeline_arguments,
    build_spec,
    join_cluster,
    read_settings,
)
from actors.errors import PipelineNotFound
from actors.observe.console import LiveConsole
from wan_tpu.commands.parser import Parser


def pipeline(argv: Sequence[str]) -> None:
    """Bring a pipeline up on a cluster, and take it down."""
    parser = Parser(prog="wan-tpu pipeline", description=pipeline.__doc__)
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=Parser, help="what to do; each has a --help"
    )
    start = actions.add_parser("up", help="start its pools, and return when all have read their weights")
    add_pipeline_arguments(start)
    stop = actions.add_parser("down", help="end its pools when they have done what they have")
    stop.add_argument(
        "--drain_s", type=_parse_seconds, default=60, help="kill them after this many seconds; default %(default)s"
    )
    for action in (start, stop):
        add_cluster_arguments(action)
    args = parser.parse_args(argv)
    with LiveConsole() as live:
        from actors.pipeline.pools import deploy, find_spec, list_applications, shut_down

        live.tell("joining the cluster")
        address = join_cluster(args)
        if args.action == "up":
            spec = build_spec(*read_settings(args, address))
            deploy(spec, tell=live.tell)
            done = f"pipeline {args.name} is up: {', '.join(pool.name for pool in spec.layout.pools)}"
        else:
            if find_spec(args.name) is None and not list_applications(args.name):
                raise PipelineNotFound(f"no pipeline {args.name!r} runs on this cluster")
            live.tell(f"taking the pipeline {args.name} down")
            shut_down(args.name, drain_s=args.drain_s)
            done = "stopped"
    print(done)


def _parse_seconds(text: str) -> float:
    """Return a number of seconds; argparse reports a `ValueError`."""
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds
