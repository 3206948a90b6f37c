"""Arguments of the commands that use a cluster, and what is made from them."""

import argparse
import os
from pathlib import Path

from actors.settings import About, PipelineSettings
from cluster.connect import connect, is_loopback
from cluster.emulated import EmulatedCluster, default_folder
from cluster.errors import ClusterNotFound
from cluster.layout import Layout, shipped
from wan_tpu.errors import InvalidInput
from wan_tpu.expert import STAGES, TOGETHER
from wan_tpu.request import GenerationRequest

DEFAULT_NAME = PipelineSettings.name


def add_cluster_arguments(parser: argparse.ArgumentParser, address: str) -> None:
    """Which cluster, and which pipeline on it. `address` says which address is meant."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--address", help=f"{address}; default: the emulated cluster of this machine")
    group.add_argument(
        "--folder", type=Path, default=default_folder(), help="of the emulated cluster's state; default %(default)s"
    )
    group.add_argument("--name", default=DEFAULT_NAME, help="of the pipeline; default %(default)s")


def add_pipeline_arguments(parser: argparse.ArgumentParser, about: str = "") -> None:
    """What a pipeline is brought up with."""
    group = parser.add_argument_group("pipeline", about or None)
    group.add_argument("--layout", help=f"layout file, or a shipped one: {', '.join(shipped())}")
    group.add_argument("--layout_text", metavar="YAML", help="the layout itself, in place of a file")
    group.add_argument("--model_id", help="diffusers directory, the same path on every host, or hub id")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default %(default)s")
    group.add_argument("--executables", help="folder of compiled programs, the same path on every host")
    group.add_argument(
        "--snapshots", help="folder or gs:// that every host reaches, for the states of unfinished requests"
    )
    group.add_argument("--snapshot_every", type=int, default=5, help="steps between two; default %(default)s")
    group.add_argument(
        "--warm_up",
        action="append",
        default=[],
        metavar="HEIGHT*WIDTH*FRAMES",
        help="compile for this size before the first request; more than once for several",
    )


def gcs_address(args: argparse.Namespace) -> str:
    """Return "host:port" of the cluster's GCS."""
    address = args.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        return emulated(args.folder).address
    if "://" in address:
        raise ClusterNotFound(
            f"{address} is where jobs are sent to; this command joins the cluster: give host:port of its GCS (usually "
            "port 6379), on one of its machines"
        )
    return address


def jobs_address(args: argparse.Namespace) -> str:
    """Return the URL that takes jobs."""
    if args.address is not None:
        return args.address if "://" in args.address else f"http://{args.address}"
    running = emulated(args.folder)
    if running.dashboard is None:
        raise ClusterNotFound(f"the emulated cluster of {args.folder} takes no jobs; start it with wan-tpu cluster up")
    return f"http://{running.dashboard}"


def emulated(folder: Path) -> EmulatedCluster:
    """Return the emulated cluster that runs there; raises `ClusterNotFound`."""
    found = EmulatedCluster.attach(folder)
    if not found.running:
        raise ClusterNotFound(f"the emulated cluster of {folder} is not running any more; wan-tpu cluster down")
    return found


def join(args: argparse.Namespace) -> str:
    """Join the cluster as a driver; return its address."""
    address = gcs_address(args)
    connect(address)
    return address


def layout_from(args: argparse.Namespace) -> Layout | None:
    """Return the layout that was given."""
    if args.layout_text is not None:
        return Layout.parse(args.layout_text, args.layout or "--layout_text", STAGES, TOGETHER)
    return None if args.layout is None else Layout.load(args.layout, STAGES, TOGETHER)


def wanted_from(args: argparse.Namespace, address: str, *, lasting: bool, snapshots: str | None) -> About | None:
    """Return the pipeline that the arguments describe, None where they don't describe one.

    snapshots  where states are kept unless told; without it a folder of this machine, if the cluster is there too
    """
    layout = layout_from(args)
    if layout is None or args.model_id is None:
        if layout is not None:
            raise InvalidInput("--layout without --model_id; a pipeline needs both")
        return None
    return About(layout, _settings(args, address, snapshots), lasting)


def _settings(args: argparse.Namespace, address: str, snapshots: str | None) -> PipelineSettings:
    snapshots = args.snapshots or snapshots
    if snapshots is None:
        if not is_loopback(address):
            raise InvalidInput("--snapshots is missing; give a folder or gs://bucket/prefix that every host reaches")
        snapshots = str(args.folder / "snapshots")
    if args.snapshot_every < 1:
        raise InvalidInput(f"--snapshot_every is {args.snapshot_every}; allowed are 1 and more")
    return PipelineSettings(
        checkpoint=_everywhere(args.model_id),
        snapshots=_everywhere(snapshots) if "://" not in snapshots else snapshots,
        dtype=args.dtype,
        executables=args.executables and str(Path(args.executables).absolute()),
        snapshot_every=args.snapshot_every,
        warm_up=tuple(_of_size(size) for size in args.warm_up),
        name=args.name,
    )


def _everywhere(path: str) -> str:
    """Return a path that means the same in every working folder; a hub id as it is."""
    return str(Path(path).absolute()) if os.path.isdir(path) or path.startswith(("./", "../")) else path


def _of_size(size: str) -> GenerationRequest:
    try:
        height, width, frames = (int(part) for part in size.split("*"))
    except ValueError:
        raise InvalidInput(f"--warm_up {size}: give HEIGHT*WIDTH*FRAMES, such as 720*1280*81") from None
    return GenerationRequest(prompt="", height=height, width=width, frames=frames)
