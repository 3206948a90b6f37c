"""`wan-tpu pipeline up | down`: a pipeline that stays up and that batches share."""

from collections.abc import Sequence

from actors.commands.arguments import add_actions, add_cluster_arguments, add_pipeline_arguments, check_range
from actors.commands.connection import build_not_found, join_cluster
from actors.commands.new_pipeline import build_spec, read_settings
from actors.observe.console import LiveConsole
from wan_tpu.commands.parser import Parser


def pipeline(argv: Sequence[str]) -> None:
    """Bring a pipeline up on a cluster, and take it down."""
    parser = Parser(prog="wan-tpu pipeline", description=pipeline.__doc__)
    actions = add_actions(parser)
    up = actions.add_parser("up", help="start the pools, and return when all of them have loaded their weights")
    add_pipeline_arguments(up)
    down = actions.add_parser("down", help="let the pools finish their requests, then stop them")
    down.add_argument(
        "--drain_s", type=float, default=60, help="seconds after which unfinished pools are killed; default %(default)s"
    )
    for action in (up, down):
        add_cluster_arguments(action)
    args = parser.parse_args(argv)
    if args.action == "down":
        check_range(args, "drain_s", 0)
    with LiveConsole() as live:
        from actors.pipeline.pools import deploy, list_applications, shut_down

        live.tell("joining the cluster")
        address = join_cluster(args)
        if args.action == "up":
            spec = build_spec(*read_settings(args, address))
            deploy(spec, on_status=live.tell)
            message = f"pipeline {args.name} is up: {', '.join(pool.name for pool in spec.layout.pools)}"
        else:
            if not list_applications(args.name):
                raise build_not_found(args.name)
            live.tell(f"taking the pipeline {args.name} down")
            shut_down(args.name, drain_s=args.drain_s)
            message = "stopped"
    print(message)
