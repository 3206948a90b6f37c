"""`wan-tpu manifests`: Kubernetes objects that run a layout on GKE with KubeRay, for `kubectl apply`."""

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from actors.commands.arguments import LAYOUT_HELP, MAX_IN_FLIGHT, check_range
from actors.commands.mounted_layout import MountedLayout
from actors.commands.new_pipeline import read_checked_layout
from actors.commands.serve import build_service_config
from actors.commands.serve_arguments import build_serve_parser, list_processes
from actors.provision.names import check_account, check_hostname, check_image, check_label, check_name
from cluster.layout import Layout
from cluster.provision import cloud_sql, kubernetes
from cluster.provision.exposure import Exposure, build_exposing_objects
from cluster.provision.kustomize import read_image, write_base, write_overlay
from cluster.provision.node_pools import format_variables
from cluster.provision.queued import request_slices
from cluster.provision.target import CAPACITIES, Target
from wan_tpu.commands.parser import Parser, as_words, flag_of
from wan_tpu.errors import InvalidInput, OutputError
from wan_tpu.storage.addresses import KINDS, is_bucket

# Options that describe the Kubernetes objects. All other options are passed on to the service or the batch.
_KUBERNETES_OPTIONS = (
    "address", "folder", "service", "job", "output", "in_flight", "namespace", "image", "account", "secret",
    "cloud_sql", "capacity", "queue", "monitor", "idle_s", "hostname", "certificate_map", "address_name", "armor",
    "ssl_policy", "kustomize", "overlay", "node_pools",
)  # fmt: skip
# Options that only have an effect together with another option, by that option.
_DEPENDENT_OPTIONS = {
    "service": ("hostname", "cloud_sql"),
    "job": ("output", "in_flight"),
    "hostname": ("certificate_map", "address_name", "armor", "ssl_policy"),
    "kustomize": ("overlay",),
}
_POSTGRES = "postgresql://"


def manifests(argv: Sequence[str]) -> int:
    """Print Kubernetes objects that run a layout: a Ray cluster or, with --service or --job, a service or a batch."""
    parser = build_serve_parser(manifests.__doc__)
    parser.prog = "wan-tpu manifests"
    _add_arguments(parser)
    args = parser.parse_args(argv)
    layout = read_checked_layout(args)
    if layout is None:
        raise InvalidInput(f"--layout is missing; give a {LAYOUT_HELP}")
    if args.node_pools is not None:
        _write_node_pools(args.node_pools, layout, args.capacity)
        return 0
    _check_arguments(args)
    target = Target(
        name=args.name,
        namespace=args.namespace,
        image=args.image,
        ray_version=version("ray"),
        account=args.account,
        secret=args.secret,
        cloud_sql=args.cloud_sql,
        capacity=args.capacity,
        queue=args.queue,
        monitor=None if args.monitor == "none" else args.monitor,
        traces=args.dashboard_traces,
        idle_s=args.idle_s,
        from_hub=args.model_id is not None and not is_bucket(args.model_id),
        public=args.hostname is not None,
        processes=() if args.job else list_processes(args),
    )
    if args.overlay is not None:
        target = dataclasses.replace(target, image=read_image(args.kustomize, target.name))
    cluster_spec = kubernetes.build_cluster_spec(layout, target)
    files = {
        "access.yaml": kubernetes.build_supporting_objects(target, http=args.service),
        "capacity.yaml": request_slices(cluster_spec["workerGroupSpecs"], target),
        "exposure.yaml": _build_exposure(args, target),
        "pipeline.yaml": _build_pipeline(args, parser, layout, target),
    }
    files = {name: objects for name, objects in files.items() if objects}
    if args.kustomize is not None:
        if args.overlay is None:
            paths = write_base(args.kustomize, target, files)
        else:
            paths = write_overlay(args.kustomize, args.overlay, target, args.image, files)
        print(*(f"wrote {path}" for path in paths), sep="\n")
        return 0
    sys.stdout.write(f"# Written by: wan-tpu manifests {shlex.join(argv)}\n")
    all_objects = {comment: item for objects in files.values() for comment, item in objects.items()}
    sys.stdout.write(kubernetes.format_yaml(all_objects))
    return 0


def _add_arguments(parser: Parser) -> None:
    group = parser.add_group("Kubernetes")
    purpose = group.add_alternatives()
    purpose.add_argument(
        "--service", action="store_true", help="print a RayService, which gets the arguments of wan-tpu serve"
    )
    purpose.add_argument(
        "--job", metavar="MANIFEST", help=f"print a RayJob, which makes every video of a manifest in {KINDS}"
    )
    group.add_argument("--output", help=f"where a --job writes its videos: {KINDS}")
    group.add_argument(
        "--kustomize",
        type=Path,
        metavar="FOLDER",
        help="write a Kustomize base and a first overlay to a folder, instead of printing",
    )
    group.add_argument(
        "--overlay",
        metavar="NAME",
        help="with --kustomize: leave the base as it is, and write what these arguments change in it as an overlay",
    )
    group.add_argument("--in_flight", type=int, help="requests of a --job under way at a time")
    group.add_argument(
        "--node_pools",
        type=Path,
        metavar="FILE",
        help="write only the layout's node pools, as variables for cluster/terraform",
    )
    group.add_argument(
        "--image", help="image of all containers, with this package and the same versions of Python and Ray as here"
    )
    group.add_argument(
        "--namespace", default="default", help="namespace of all objects; if omitted, the one called %(default)s"
    )
    group.add_argument("--account", help="Google service account that the pods act as, for buckets and Cloud SQL")
    group.add_argument(
        "--secret", help="Secret whose keys become environment variables of the pods, such as PGPASSWORD"
    )
    group.add_argument(
        "--cloud_sql",
        metavar="INSTANCE",
        help="Cloud SQL instance, PROJECT:REGION:NAME, to use in place of --database: the pods reach its database "
        "called jobs through Google's proxy, as --account",
    )
    group.add_argument(
        "--capacity",
        choices=CAPACITIES,
        default="on-demand",
        help="how TPU machines are provisioned; with queued, each slice waits until Google has all of its machines; "
        "default %(default)s",
    )
    group.add_argument("--queue", help="Kueue's local queue, in which the cluster waits for all of its slices at once")
    group.add_argument(
        "--monitor",
        choices=(*kubernetes.MONITORS, "none"),
        default="PodMonitoring",
        help="what collects metrics: GKE's managed Prometheus (PodMonitoring) or the Prometheus operator (PodMonitor); "
        "default %(default)s",
    )
    group.add_argument(
        "--hostname",
        metavar="NAME",
        help="host name by which clients reach a service, through Google's load balancer with TLS",
    )
    group.add_argument(
        "--certificate_map", metavar="MAP", help="Certificate Manager's map with a certificate for --hostname"
    )
    group.add_argument(
        "--address_name", metavar="ADDRESS", help="name of a reserved global address for the load balancer"
    )
    group.add_argument("--armor", metavar="POLICY", help="Cloud Armor security policy in front of the service")
    group.add_argument(
        "--ssl_policy", metavar="POLICY", help="SSL policy, which sets the versions of TLS that clients may use"
    )
    group.add_argument(
        "--dashboard_traces",
        action="store_true",
        help="let Ray's dashboard trace hosts, through a port that requires no token; the image must have been built "
        "with dashboard-traces",
    )
    group.add_argument(
        "--idle_s",
        type=int,
        default=600,
        help="seconds after which a slice that nobody uses is released; default %(default)s",
    )


def _check_arguments(args: argparse.Namespace) -> None:
    if args.image is None:
        raise InvalidInput("--image is missing; give the container image of all pods, REGISTRY/NAME:TAG")
    for needed, names in _DEPENDENT_OPTIONS.items():
        for name in names:
            if getattr(args, name) is not None and not getattr(args, needed):
                raise InvalidInput(f"{flag_of(name)} has no effect without {flag_of(needed)}; give both or neither")
    check_image(args.image)
    check_name("--name", args.name, "wan-tpu")
    check_label("--namespace", args.namespace, "videos")
    if args.overlay is not None:
        check_label("--overlay", args.overlay, "staging")
    if args.account is not None:
        check_account(args.account)
    if args.hostname is not None:
        check_hostname(args.hostname)
        if args.certificate_map is None:
            raise InvalidInput(
                "--certificate_map is missing; --hostname needs a map in Certificate Manager that has its certificate"
            )
    check_range(args, "in_flight", 1, MAX_IN_FLIGHT)
    check_range(args, "idle_s", 0)


def _build_exposure(args: argparse.Namespace, target: Target) -> dict[str, kubernetes.Object]:
    """Return the objects that put a service behind Google's load balancer; none without --hostname."""
    if args.hostname is None:
        return {}
    exposure = Exposure(args.hostname, args.certificate_map, args.address_name, args.armor, args.ssl_policy)
    return build_exposing_objects(target, exposure)


def _build_pipeline(
    args: argparse.Namespace, parser: Parser, layout: Layout, target: Target
) -> dict[str, kubernetes.Object]:
    """Return the objects of the service, the job or the cluster."""
    options = {name: value for name, value in parser.non_defaults(args).items() if name not in _KUBERNETES_OPTIONS}
    if args.service:
        return _build_service(args, options, layout, target)
    if args.job is not None:
        return _build_job(args, options, layout, target)
    slices = "all of its slices from the start" if target.is_whole else "no slices until a pipeline requests them"
    comment = (
        f"the cluster, with {slices}; to submit a batch (wan-tpu submit), run\n"
        f"kubectl port-forward svc/{target.name}-head-svc 8265"
    )
    return {comment: kubernetes.build_cluster(layout, target)}


def _build_service(
    args: argparse.Namespace, options: dict[str, Any], layout: Layout, target: Target
) -> dict[str, kubernetes.Object]:
    if target.requests_slices:
        raise InvalidInput(
            "--capacity queued is only for batches, because a slice that Google takes away isn't requested again; for "
            "a service, choose flex-start, spot or on-demand"
        )
    if args.cloud_sql is not None:
        options["database"] = args.database = _build_database_address(args)
    if args.database is None:
        raise InvalidInput(f"--database is missing; give {_POSTGRES}USER@HOST/NAME, or --cloud_sql")
    if not args.database.startswith(_POSTGRES):
        raise InvalidInput(
            f"--database is {args.database}, which pods can't reach; give {_POSTGRES}USER@HOST/NAME, or --cloud_sql"
        )
    _check_reachable(args, "model_id", "snapshots", "results")
    text = _read_text(args, layout)
    config, _ = build_service_config(args, options, MountedLayout(kubernetes.LAYOUT_FILE, text))
    comment = f"the service: http://{target.name}-head-svc:8000 in the cluster, once all pools have their slices"
    return {
        "the service's layout, whose hash is in the service's configuration: to change it, run wan-tpu manifests\n"
        "again and apply both": kubernetes.build_layout_map(target, text),
        comment: kubernetes.build_service(layout, target, config),
    }


def _build_job(
    args: argparse.Namespace, options: dict[str, Any], layout: Layout, target: Target
) -> dict[str, kubernetes.Object]:
    for name in ("model_id", "output"):
        if getattr(args, name) is None:
            raise InvalidInput(f"{flag_of(name)} is missing; --job needs --model and --output")
    _check_reachable(args, "job", "output", "model_id", "snapshots")
    arguments = {name: value for name, value in options.items() if name != "layout_text"}
    arguments |= {"manifest": args.job, "output": args.output, "layout": kubernetes.LAYOUT_FILE}
    arguments |= {} if args.in_flight is None else {"in_flight": args.in_flight}
    command = ["exec", "python", "-m", "actors.cli", "drive", *as_words(arguments)]
    return {
        "the batch's layout": kubernetes.build_layout_map(target, _read_text(args, layout)),
        "the batch, on a cluster that is deleted when it has ended": kubernetes.build_job(
            layout, target, shlex.join(command)
        ),
    }


def _read_text(args: argparse.Namespace, layout: Layout) -> str:
    """Return the layout as YAML, as its file has it."""
    return args.layout_text or Path(layout.source).read_text()


def _build_database_address(args: argparse.Namespace) -> str:
    if args.database is not None:
        raise InvalidInput("--database and --cloud_sql name two databases; omit one of them")
    if args.account is None:
        raise InvalidInput("--account is missing; give the Google service account that logs in to Cloud SQL")
    if re.fullmatch(r"[-a-z0-9:.]+:[-a-z0-9]+:[-a-z0-9]+", args.cloud_sql) is None:
        raise InvalidInput(f"--cloud_sql {args.cloud_sql!r} isn't an instance's name; give PROJECT:REGION:NAME")
    return cloud_sql.build_address(args.account)


def _write_node_pools(file: Path, layout: Layout, capacity: str) -> None:
    text = format_variables(layout, capacity)
    try:
        file.write_text(text)
    except OSError as error:
        raise OutputError(f"can't write {file} ({error.strerror}); choose another file") from None
    print(f"wrote {file}; create the node pools with: terraform apply -var-file {file.absolute()}")


def _check_reachable(args: argparse.Namespace, *names: str) -> None:
    """Raise `InvalidInput` for a location that pods can't reach; a model may also be a hub id."""
    for name in names:
        value = getattr(args, name)
        is_hub_id = name == "model_id" and not Path(str(value)).exists()
        if value is not None and not is_bucket(value) and not is_hub_id:
            raise InvalidInput(
                f"{flag_of(name)} {value} isn't in a bucket; pods can't read this machine's files, so give {KINDS}"
            )
