"""`wan-tpu manifests`: a layout as what `kubectl apply` takes, on GKE with KubeRay."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from actors.commands.arguments import read_checked_layout
from actors.commands.serve import build_service_config
from actors.commands.serve_arguments import build_serve_parser
from cluster.layout import Layout, list_shipped
from cluster.provision import kubernetes
from cluster.provision.exposure import Exposure, build_exposing_objects
from cluster.provision.kubernetes import Target
from cluster.provision.kustomize import write_kustomization
from wan_tpu.commands.parser import Parser, as_words, flag_of
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.addresses import is_bucket

# What is about Kubernetes, and not about the pipeline or the service.
_HERE = (
    "address", "folder", "service", "job", "output", "in_flight", "namespace", "image", "account", "secret", "capacity",
    "queue", "monitor", "idle_s", "hostname", "certificate_map", "address_name", "armor", "kustomize",
)  # fmt: skip
_POSTGRES = "postgresql://"


def manifests(argv: Sequence[str]) -> int:
    """Print what kubectl applies: a Ray cluster for a layout, with --service or --job one that does something."""
    parser = build_serve_parser(manifests.__doc__)
    parser.prog = "wan-tpu manifests"
    _add_arguments(parser)
    args = parser.parse_args(argv)
    layout = read_checked_layout(args)
    if layout is None:
        raise InvalidInput(f"--layout is missing: a layout file, or a shipped one: {', '.join(list_shipped())}")
    target = Target(
        name=args.name,
        namespace=args.namespace,
        image=args.image,
        ray_version=version("ray"),
        account=args.account,
        secret=args.secret,
        capacity=args.capacity,
        queue=args.queue,
        monitor=None if args.monitor == "none" else args.monitor,
        traces=args.dashboard_traces,
        idle_s=args.idle_s,
        from_hub=args.model_id is not None and not is_bucket(args.model_id),
        public=args.hostname is not None,
    )
    files = {
        "access.yaml": kubernetes.supporting(target, http=args.service),
        "exposure.yaml": _exposing(args, target),
        "pipeline.yaml": _main(args, parser, layout, target),
    }
    files = {name: objects for name, objects in files.items() if objects}
    if args.kustomize is not None:
        for path in write_kustomization(args.kustomize, target, files):
            print(f"wrote {path}")
        return 0
    sys.stdout.write(f"# Written by: wan-tpu manifests {shlex.join(argv)}\n")
    every = {comment: item for objects in files.values() for comment, item in objects.items()}
    sys.stdout.write(kubernetes.as_yaml(every))
    return 0


def _add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("Kubernetes")
    purpose = group.add_mutually_exclusive_group()
    purpose.add_argument("--service", action="store_true", help="a RayService, with the arguments of wan-tpu serve")
    purpose.add_argument("--job", metavar="MANIFEST", help="a RayJob that makes every video of a manifest in gs://")
    group.add_argument("--output", help="gs:// of a job's videos")
    group.add_argument(
        "--kustomize", type=Path, metavar="FOLDER", help="write a Kustomize base and an overlay there instead"
    )
    group.add_argument("--in_flight", type=int, help="requests of a job at a time")
    group.add_argument("--image", required=True, help="of all containers: this package, with Python and Ray as here")
    group.add_argument("--namespace", default="default", help="of all objects; it is %(default)s where left out")
    group.add_argument("--account", help="Google service account that the pods act as, to reach buckets")
    group.add_argument("--secret", help="Secret whose keys are environment variables of the pods, such as PGPASSWORD")
    group.add_argument(
        "--capacity",
        choices=("on-demand", "spot", "flex-start"),
        default="on-demand",
        help="how the slices are had; default %(default)s",
    )
    group.add_argument("--queue", help="Kueue's local queue that it waits in, for all its slices at once")
    group.add_argument(
        "--monitor",
        choices=(*kubernetes.MONITORS, "none"),
        default="PodMonitoring",
        help="what collects figures: GKE itself (default) or, with PodMonitor, the Prometheus operator",
    )
    group.add_argument(
        "--hostname",
        metavar="NAME",
        help="name by which clients reach a service, through Google's load balancer with TLS",
    )
    group.add_argument(
        "--certificate_map", metavar="MAP", help="Certificate Manager's map with that name's certificate"
    )
    group.add_argument("--address_name", metavar="ADDRESS", help="reserved global address of the load balancer")
    group.add_argument("--armor", metavar="POLICY", help="Cloud Armor security policy in front of the service")
    group.add_argument(
        "--dashboard_traces",
        action="store_true",
        help="let Ray's dashboard trace hosts, on a port that asks for no token; wants an image with dashboard-traces",
    )
    group.add_argument(
        "--idle_s", type=int, default=600, help="until a slice that nobody holds is given back; default %(default)s"
    )


def _exposing(args: argparse.Namespace, target: Target) -> dict[str, kubernetes.Object]:
    """Return what puts a service behind Google's load balancer; nothing unless that is asked for."""
    if args.hostname is None:
        for name in ("certificate_map", "address_name", "armor"):
            if getattr(args, name) is not None:
                raise InvalidInput(f"{flag_of(name)} is of a load balancer; give the service's --hostname, too")
        return {}
    if not args.service:
        raise InvalidInput("--hostname is of a service; give --service, too")
    if args.certificate_map is None:
        raise InvalidInput("--certificate_map is missing: the load balancer shows clients a certificate of --hostname")
    return build_exposing_objects(target, Exposure(args.hostname, args.certificate_map, args.address_name, args.armor))


def _main(args: argparse.Namespace, parser: Parser, layout: Layout, target: Target) -> dict[str, kubernetes.Object]:
    chosen = {name: value for name, value in parser.non_defaults(args).items() if name not in _HERE}
    if args.service:
        if not str(args.database).startswith(_POSTGRES):
            database = args.database or "a file of this machine"
            raise InvalidInput(f"--database is {database}; pods reach {_POSTGRES}... alone")
        _check_reached(args, "model_id", "snapshots", "results")
        config, _ = build_service_config(args, chosen)
        comment = f"the service: http://{target.name}-head-svc:8000 in the cluster, once all pools have their slices"
        return {comment: kubernetes.service(layout, target, config)}
    if args.job is not None:
        for name in ("model_id", "output"):
            if getattr(args, name) is None:
                raise InvalidInput(f"{flag_of(name)} is missing; see wan-tpu manifests --help")
        _check_reached(args, "job", "output", "model_id", "snapshots")
        arguments = {name: value for name, value in chosen.items() if name not in ("layout", "layout_text")}
        text = args.layout_text or Path(layout.source).read_text()
        arguments |= {"manifest": args.job, "output": args.output, "layout_text": text}
        arguments |= {} if args.in_flight is None else {"in_flight": args.in_flight}
        command = ["exec", "python", "-m", "actors.cli", "drive", *as_words(arguments)]
        return {
            "the batch, and a cluster that goes when it has ended": kubernetes.job(layout, target, shlex.join(command))
        }
    comment = (
        "the cluster: no slice at first; pools and batches bring what they need (wan-tpu submit, through\n"
        f"kubectl port-forward svc/{target.name}-head-svc 8265)"
    )
    return {comment: kubernetes.cluster(layout, target)}


def _check_reached(args: argparse.Namespace, *names: str) -> None:
    """Raise `InvalidInput` for a place that pods don't reach; a model may also be the hub's."""
    for name in names:
        value = getattr(args, name)
        of_the_hub = name == "model_id" and not Path(str(value)).exists()
        if value is not None and not is_bucket(value) and not of_the_hub:
            raise InvalidInput(
                f"{flag_of(name)} {value} isn't in a bucket; pods reach gs:// and s3://, not this machine"
            )
