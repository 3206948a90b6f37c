"""`wan-tpu profile`: trace what a slice computes, instruction by instruction."""

from collections.abc import Sequence

from actors.commands.arguments import add_cluster_arguments, find_gcs_address
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.addresses import absolute
from wan_tpu.suggest import did_you_mean

MAX_S = 60.0  # A trace of a busy chip grows by many megabytes per second.


def profile(argv: Sequence[str]) -> None:
    """Have a slice of a running pool trace what it computes for some seconds, for XProf or TensorBoard."""
    parser = Parser(prog="wan-tpu profile", description=profile.__doc__)
    add_cluster_arguments(parser)
    parser.add_argument("pool", help="of the pipeline's; one of its slices is traced, all hosts of it")
    parser.add_argument("--output", type=absolute, required=True, help="folder that the hosts reach, gs:// or s3://")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long; default %(default)s")
    args = parser.parse_args(argv)
    if not 0 < args.seconds <= MAX_S:
        raise InvalidInput(f"--seconds is {args.seconds:g}; give more than 0, and {MAX_S:g} at most")

    from actors.errors import PipelineNotFound
    from actors.pipeline.pools import find_spec, open_handle
    from cluster.connect import connect

    connect(find_gcs_address(args))
    spec = find_spec(args.name)
    if spec is None:
        raise PipelineNotFound(f"there is no pipeline {args.name!r} on this cluster: wan-tpu status")
    known = [pool.name for pool in spec.layout.pools]
    if args.pool not in known:
        raise InvalidInput(
            f"there is no pool {args.pool!r}{did_you_mean(args.pool, known)}; this pipeline has {', '.join(known)}"
        )
    handle = open_handle(args.name, args.pool, spec.settings.reliability.handle_attempts)
    run, nbytes = handle.profile.remote(args.output, args.seconds).result()
    print(f"{nbytes / 1e6:.1f} MB of each host are in {args.output}/plugins/profile/{run}; look at it with")
    print(f"  pip install xprof && xprof --logdir {args.output}")
