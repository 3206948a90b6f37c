"""`wan-tpu manifests`: a layout as Kubernetes objects for `kubectl apply`, on GKE with KubeRay."""

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from actors.commands.arguments import read_checked_layout
from actors.commands.mounted_layout import MountedLayout
from actors.commands.serve import build_service_config
from actors.commands.serve_arguments import build_serve_parser, list_processes
from cluster.layout import Layout, list_shipped
from cluster.provision import cloud_sql, kubernetes
from cluster.provision.exposure import Exposure, build_exposing_objects
from cluster.provision.kustomize import read_image, write_base, write_overlay
from cluster.provision.node_pools import format_variables
from cluster.provision.queued import request_slices
from cluster.provision.target import CAPACITIES, Target
from wan_tpu.commands.parser import Parser, as_words, flag_of
from wan_tpu.errors import InvalidInput, OutputError
from wan_tpu.storage.addresses import is_bucket

# Options about Kubernetes, not about the pipeline or the service.
_HERE = (
    "address", "folder", "service", "job", "output", "in_flight", "namespace", "image", "account", "secret",
    "cloud_sql", "capacity", "queue", "monitor", "idle_s", "hostname", "certificate_map", "address_name", "armor",
    "ssl_policy", "kustomize", "overlay", "node_pools",
)  # fmt: skip
_POSTGRES = "postgresql://"


def manifests(argv: Sequence[str]) -> int:
    """Print objects for kubectl: a Ray cluster for a layout, or with --service or --job one that runs it."""
    parser = build_serve_parser(manifests.__doc__)
    parser.prog = "wan-tpu manifests"
    _add_arguments(parser)
    args = parser.parse_args(argv)
    layout = read_checked_layout(args)
    if layout is None:
        raise InvalidInput(f"--layout is missing: a layout file, or a shipped one: {', '.join(list_shipped())}")
    if args.node_pools is not None:
        _write_node_pools(args.node_pools, layout, args.capacity)
        return 0
    if args.image is None:
        raise InvalidInput("--image is missing: the container of all pods, REGISTRY/NAME:TAG")
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
        _check_overlay(args)
        target = dataclasses.replace(target, image=read_image(args.kustomize, target.name))
    files = {
        "access.yaml": kubernetes.supporting(target, http=args.service),
        "capacity.yaml": request_slices(kubernetes.ray_cluster(layout, target)["workerGroupSpecs"], target),
        "exposure.yaml": _exposing(args, target),
        "pipeline.yaml": _main(args, parser, layout, target),
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
        "--kustomize", type=Path, metavar="FOLDER", help="write a Kustomize base and a first overlay there instead"
    )
    group.add_argument(
        "--overlay",
        metavar="NAME",
        help="with --kustomize: only write what these arguments change in the base that is there, as an overlay",
    )
    group.add_argument("--in_flight", type=int, help="requests of a job at a time")
    group.add_argument(
        "--node_pools", type=Path, metavar="FILE", help="only write the layout's node pools, for cluster/terraform"
    )
    group.add_argument("--image", help="of all containers: this package, with Python and Ray as here")
    group.add_argument("--namespace", default="default", help="of all objects; it is %(default)s where left out")
    group.add_argument("--account", help="Google service account that the pods act as, for buckets and Cloud SQL")
    group.add_argument("--secret", help="Secret whose keys are environment variables of the pods, such as PGPASSWORD")
    group.add_argument(
        "--cloud_sql",
        metavar="INSTANCE",
        help="in place of --database: PROJECT:REGION:NAME, with a database jobs, through Google's proxy as --account",
    )
    group.add_argument(
        "--capacity",
        choices=CAPACITIES,
        default="on-demand",
        help="how TPU machines are provisioned; queued ones wait for Google to have a whole slice; default %(default)s",
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
    group.add_argument("--ssl_policy", metavar="POLICY", help="SSL policy: which versions of TLS clients may use")
    group.add_argument(
        "--dashboard_traces",
        action="store_true",
        help="let Ray's dashboard trace hosts, on a port that asks for no token; wants an image with dashboard-traces",
    )
    group.add_argument(
        "--idle_s", type=int, default=600, help="until a slice that nobody holds is given back; default %(default)s"
    )


def _exposing(args: argparse.Namespace, target: Target) -> dict[str, kubernetes.Object]:
    """Return the objects that put a service behind Google's load balancer, if that is asked for."""
    if args.hostname is None:
        for name in ("certificate_map", "address_name", "armor", "ssl_policy"):
            if getattr(args, name) is not None:
                raise InvalidInput(f"{flag_of(name)} is of a load balancer; give the service's --hostname, too")
        return {}
    if not args.service:
        raise InvalidInput("--hostname is of a service; give --service, too")
    if args.certificate_map is None:
        raise InvalidInput("--certificate_map is missing: the load balancer shows clients a certificate of --hostname")
    exposure = Exposure(args.hostname, args.certificate_map, args.address_name, args.armor, args.ssl_policy)
    return build_exposing_objects(target, exposure)


def _main(args: argparse.Namespace, parser: Parser, layout: Layout, target: Target) -> dict[str, kubernetes.Object]:
    """Return the service, the job or the cluster."""
    options = {name: value for name, value in parser.non_defaults(args).items() if name not in _HERE}
    if args.service:
        return _build_service(args, options, layout, target)
    if args.cloud_sql is not None:
        raise InvalidInput("--cloud_sql is the database of a service; give --service, too")
    if args.job is not None:
        return _build_job(args, options, layout, target)
    slices = "all its slices from the start" if target.is_whole else "no slice at first"
    comment = (
        f"the cluster: {slices}; pools and batches bring what they need (wan-tpu submit, through\n"
        f"kubectl port-forward svc/{target.name}-head-svc 8265)"
    )
    return {comment: kubernetes.cluster(layout, target)}


def _build_service(
    args: argparse.Namespace, options: dict[str, Any], layout: Layout, target: Target
) -> dict[str, kubernetes.Object]:
    if target.requests_slices:
        raise InvalidInput(
            "--capacity queued is for batches: a slice that was requested once, and taken away, isn't requested "
            "again; a service takes flex-start, spot or on-demand"
        )
    if args.cloud_sql is not None:
        options["database"] = args.database = _address_cloud_sql(args)
    if not str(args.database).startswith(_POSTGRES):
        database = args.database or "a file of this machine"
        raise InvalidInput(f"--database is {database}; pods reach {_POSTGRES}... alone")
    _check_reached(args, "model_id", "snapshots", "results")
    text = _read_text(args, layout)
    config, _ = build_service_config(args, options, MountedLayout(kubernetes.LAYOUT_FILE, text))
    comment = f"the service: http://{target.name}-head-svc:8000 in the cluster, once all pools have their slices"
    return {
        "the service's layout, whose hash is in the service's configuration: to change it, run wan-tpu manifests\n"
        "again and apply both": kubernetes.build_layout_map(target, text),
        comment: kubernetes.service(layout, target, config),
    }


def _build_job(
    args: argparse.Namespace, options: dict[str, Any], layout: Layout, target: Target
) -> dict[str, kubernetes.Object]:
    for name in ("model_id", "output"):
        if getattr(args, name) is None:
            raise InvalidInput(f"{flag_of(name)} is missing; see wan-tpu manifests --help")
    _check_reached(args, "job", "output", "model_id", "snapshots")
    arguments = {name: value for name, value in options.items() if name != "layout_text"}
    arguments |= {"manifest": args.job, "output": args.output, "layout": kubernetes.LAYOUT_FILE}
    arguments |= {} if args.in_flight is None else {"in_flight": args.in_flight}
    command = ["exec", "python", "-m", "actors.cli", "drive", *as_words(arguments)]
    return {
        "the batch's layout": kubernetes.build_layout_map(target, _read_text(args, layout)),
        "the batch, and a cluster that goes when it has ended": kubernetes.job(layout, target, shlex.join(command)),
    }


def _check_overlay(args: argparse.Namespace) -> None:
    if args.kustomize is None:
        raise InvalidInput("--kustomize is missing: the folder with the base that --overlay changes")
    if re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", args.overlay) is None:
        raise InvalidInput(f"--overlay {args.overlay!r} isn't made of lower-case letters, digits and dashes")


def _read_text(args: argparse.Namespace, layout: Layout) -> str:
    """Return the text of the layout."""
    return args.layout_text or Path(layout.source).read_text()


def _address_cloud_sql(args: argparse.Namespace) -> str:
    if args.database is not None:
        raise InvalidInput("--database and --cloud_sql name two databases; leave out one of them")
    if args.account is None:
        raise InvalidInput("--account is missing: the Google service account that logs in to Cloud SQL")
    if re.fullmatch(r"[-a-z0-9:.]+:[-a-z0-9]+:[-a-z0-9]+", args.cloud_sql) is None:
        raise InvalidInput(f"--cloud_sql {args.cloud_sql!r} is no instance; give PROJECT:REGION:NAME")
    return cloud_sql.build_address(args.account)


def _write_node_pools(file: Path, layout: Layout, capacity: str) -> None:
    text = format_variables(layout, capacity)
    try:
        file.write_text(text)
    except OSError as error:
        raise OutputError(f"can't write {file} ({error.strerror}); choose another place") from None
    print(f"wrote {file}; terraform apply -var-file {file.absolute()}")


def _check_reached(args: argparse.Namespace, *names: str) -> None:
    """Raise `InvalidInput` for a place that pods don't reach; a model may also be the hub's."""
    for name in names:
        value = getattr(args, name)
        of_the_hub = name == "model_id" and not Path(str(value)).exists()
        if value is not None and not is_bucket(value) and not of_the_hub:
            raise InvalidInput(
                f"{flag_of(name)} {value} isn't in a bucket; pods reach gs:// and s3://, not this machine"
            )
