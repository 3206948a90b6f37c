"""`wan-tpu profile`: record a profiler trace of what a slice computes."""

from collections.abc import Sequence

from actors.commands.arguments import add_cluster_arguments, check_range
from actors.commands.connection import find_running_spec, join_cluster
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.addresses import KINDS, absolute
from wan_tpu.suggest import did_you_mean

MAX_S = 60.0  # The trace of a busy chip grows by many megabytes per second, so it has to be short.


def profile(argv: Sequence[str]) -> None:
    """Record a profiler trace of a slice of a running pool, for XProf or TensorBoard."""
    parser = Parser(prog="wan-tpu profile", description=profile.__doc__)
    add_cluster_arguments(parser)
    parser.add_argument("pool", help="name of a pool of the pipeline; all hosts of one of its slices are traced")
    parser.add_argument(
        "--output",
        type=absolute,
        required=True,
        help=f"where the trace is written: {KINDS}, or a folder that the hosts reach",
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to trace; default %(default)s")
    args = parser.parse_args(argv)
    check_range(args, "seconds", 0.001, MAX_S)

    from actors.pipeline.pools import open_handle

    join_cluster(args)
    spec = find_running_spec(args.name)
    names = [pool.name for pool in spec.layout.pools]
    if args.pool not in names:
        raise InvalidInput(
            f"there is no pool {args.pool!r}{did_you_mean(args.pool, names)}; this pipeline has {', '.join(names)}"
        )
    handle = open_handle(args.name, args.pool, spec.settings.reliability.handle_attempts)
    trace, nbytes = handle.profile.remote(args.output, args.seconds).result()
    print(f"wrote {nbytes / 1e6:.1f} MB for each host to {args.output}/plugins/profile/{trace}; view the trace with")
    print(f"  pip install xprof && xprof --logdir {args.output}")
