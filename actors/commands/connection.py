"""Find and join the cluster that a command's arguments choose, and find the pipeline that runs on it."""

import argparse
import contextlib
import importlib
import os
import shlex
from pathlib import Path
from urllib.parse import urlsplit

from actors.errors import PipelineNotFound
from actors.pipeline_spec import PipelineSpec
from cluster.connect import connect, stay_on_loopback
from cluster.emulation.cluster import STATE, EmulatedCluster, find_default_folder
from cluster.errors import ClusterNotFound, LayoutError
from cluster.layout import Layout
from wan_tpu.commands.importing import heavy_imports
from wan_tpu.suggest import did_you_mean


def find_gcs_address(args: argparse.Namespace) -> str:
    """Return the address of the cluster's GCS, "host:port".

    Raises:
        ClusterNotFound: The address has another form, or there is neither an address nor an emulated cluster.
    """
    address, source = args.address, "--address"
    if address is None:
        address, source = os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS"
    if address is None:
        return find_emulated_cluster(args).address
    if "://" in address:
        raise ClusterNotFound(
            f"{source} is {address}, the form of a job server's address. This command joins the cluster itself: run it "
            "on one of the cluster's machines, and give host:port of its GCS (the port is usually 6379)"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ClusterNotFound(f"{source} is {address!r}; give host:port of the cluster's GCS, such as 10.0.0.2:6379")
    return str(address)


def find_jobs_address(args: argparse.Namespace) -> str:
    """Return the URL of the cluster's job server.

    Raises:
        ClusterNotFound: --address is no such URL, or it is omitted and no emulated cluster here accepts jobs.
    """
    if args.address is not None:
        address = args.address if "://" in args.address else f"http://{args.address}"
        if not _is_http_url(address):
            raise ClusterNotFound(f"--address is {args.address!r}; give the job server's URL, such as http://host:8265")
        return address
    cluster = find_emulated_cluster(args)
    if cluster.dashboard is None:
        raise ClusterNotFound(
            f"the emulated cluster of {args.folder} has no job server, because wan-tpu cluster up didn't start it; "
            f"{_advise_start(args)}"
        )
    return f"http://{cluster.dashboard}"


def _is_http_url(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # The port isn't a number, or too large.
        return False


def find_emulated_cluster(args: argparse.Namespace) -> EmulatedCluster:
    """Return the emulated cluster of --folder; raise `ClusterNotFound`, with the command that starts one."""
    if not (args.folder / STATE).exists():
        raise ClusterNotFound(f"there is no emulated cluster in {args.folder}; {_advise_start(args)}")
    cluster = EmulatedCluster.attach(args.folder)
    if not cluster.running:
        raise ClusterNotFound(f"the emulated cluster of {args.folder} has stopped; {_advise_start(args)}")
    return cluster


def is_cluster_running(folder: Path) -> bool:
    """Return whether the cluster of a folder with a state runs."""
    with contextlib.suppress(ClusterNotFound):
        return EmulatedCluster.attach(folder).running
    return False


def _advise_start(args: argparse.Namespace) -> str:
    """Return advice that ends with the command which starts an emulated cluster for a command's arguments."""
    layout = "emulated-demo"
    with contextlib.suppress(LayoutError):
        source = getattr(args, "layout", None)
        if source is not None and Layout.load(source).devices_per_host is not None:
            layout = source
    command = shlex.join(["wan-tpu", "cluster", "up", "--emulate", layout, *spell_folder(args)])
    return f"give the --address of a real cluster, or start an emulated one: {command}"


def spell_folder(args: argparse.Namespace) -> list[str]:
    """Return --folder as another command needs it: not at all if it is the default."""
    return [] if args.folder == find_default_folder() else ["--folder", str(args.folder)]


def is_emulated_here(args: argparse.Namespace, address: str) -> bool:
    """Return whether an address is that of the emulated cluster of --folder.

    A loopback address alone says nothing: it may be forwarded, or be that of a real cluster on its head node.

    Args:
        args: The command's arguments.
        address: "host:port" of a GCS or a job server.
    """
    try:
        cluster = EmulatedCluster.attach(args.folder)
    except ClusterNotFound:
        return False
    return address in (cluster.address, cluster.dashboard)


def join_cluster(args: argparse.Namespace) -> str:
    """Join the cluster as a driver; return the address of its GCS."""
    address = find_gcs_address(args)
    stay_on_loopback(address)
    with heavy_imports():
        importlib.import_module("ray.serve")
    connect(address)
    return address


def find_running_spec(name: str) -> PipelineSpec:
    """Return the specification of the pipeline of that name on the cluster that this process has joined.

    Raises:
        PipelineNotFound: There is none; the message names the pipelines that do run.
    """
    from actors.pipeline.pools import find_spec

    spec = find_spec(name)
    if spec is None:
        raise build_not_found(name)
    return spec


def build_not_found(name: str) -> PipelineNotFound:
    """Return the error for a pipeline that the joined cluster doesn't run; it names the pipelines that do run."""
    from ray import serve

    applications = serve.status().applications  # Each pool is an application, called PIPELINE-POOL.
    running = sorted(
        {
            application.removesuffix(f"-{pool}")
            for application, details in applications.items()
            for pool in details.deployments
            if application.endswith(f"-{pool}")
        }
    )
    if not running:
        return PipelineNotFound(
            "no pipeline runs on this cluster; start one with: wan-tpu pipeline up --layout ... --model ..."
        )
    return PipelineNotFound(
        f"there is no pipeline {name!r} on this cluster{did_you_mean(name, running)}; it runs {', '.join(running)}"
    )
