"""Arguments that several commands share, and the addresses, layouts and pipelines that they describe."""

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path

from actors.commands.timeouts import add_reliability, read_reliability
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.reliability import build_environment
from cluster.connect import connect
from cluster.emulation.cluster import STATE, EmulatedCluster, find_default_folder
from cluster.errors import ClusterNotFound, LayoutError
from cluster.layout import Layout, list_shipped
from wan_tpu.commands.parser import add_model, add_precision, add_switches
from wan_tpu.commands.sizes import WITH_FRAMES, read_size_with_frames
from wan_tpu.errors import CheckpointError, InvalidInput, Unavailable
from wan_tpu.families import open_spec
from wan_tpu.licences import show_licence
from wan_tpu.request import GenerationRequest
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.addresses import FORMS, absolute
from wan_tpu.storage.opening import open_storage

PER_SLICE = 2  # Requests in flight for each slice: one that computes, and one whose inputs arrive meanwhile.


def make_model_absolute(model_id: str) -> str:
    """Return a checkpoint's folder as an absolute path, and a hub id unchanged."""
    return absolute(model_id) if os.path.isdir(model_id) or model_id.startswith(("./", "../")) else model_id


def add_cluster_arguments(parser: argparse.ArgumentParser, address: str = 'of the cluster\'s GCS, "host:port"') -> None:
    """Add options that choose a cluster and a pipeline on it; `address` says what the address is of."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--address", help=f"{address}; default: the emulated cluster of this machine")
    group.add_argument(
        "--folder",
        type=Path,
        default=find_default_folder(),
        help="of the emulated cluster's state; default %(default)s",
    )
    group.add_argument("--name", default=PipelineSettings.name, help="of the pipeline; default %(default)s")


def add_pipeline_arguments(parser: argparse.ArgumentParser, description: str = "") -> None:
    """Add the options that a pipeline is brought up with."""
    group = parser.add_argument_group("pipeline", description or None)
    group.add_argument("--layout", help=f"layout file, or a shipped one: {', '.join(list_shipped())}")
    group.add_argument("--layout_text", metavar="YAML", help="the layout itself, in place of a file")
    add_model(
        group,
        type=make_model_absolute,
        help="diffusers directory, the same path on every host, one in gs:// or s3://, or hub id",
    )
    add_precision(group)
    group.add_argument(
        "--executables", type=absolute, help="gs://, or a folder at the same path on every host, of programs"
    )
    add_switches(group)
    group.add_argument(
        "--snapshots", type=absolute, help="folder, gs:// or s3:// that every host reaches, for unfinished requests"
    )
    group.add_argument("--snapshot_every", type=int, default=5, help="steps between two; default %(default)s")
    group.add_argument(
        "--warm_up",
        action="append",
        default=[],
        metavar=WITH_FRAMES,
        help="compile for this size before the first request; more than once for several",
    )
    add_reliability(group)


def add_batch_arguments(
    parser: argparse.ArgumentParser,
    in_flight: int | None = 2,
    in_flight_help: str = "%(default)s",
    *,
    required: bool = True,
) -> None:
    """Add the options of a batch.

    Args:
        parser: The command's parser.
        in_flight: The default of --in_flight.
        in_flight_help: The default in words.
        required: Whether the manifest and the output must be given.
    """
    group = parser.add_argument_group("batch")
    for name, text in (
        ("manifest", "one JSON line a request: a path, gs:// or s3:// (docs/batch.md)"),
        ("output", "folder, gs://bucket/prefix or s3://bucket/prefix of videos and results"),
    ):
        group.add_argument(f"--{name}", type=absolute, required=required, help=text)
    group.add_argument("--in_flight", type=int, default=in_flight, help=f"requests at a time; default {in_flight_help}")
    group.add_argument("--remake_changed", action="store_true", help="make again whose line or model has changed since")
    group.add_argument("--timeline", action="store_true", help="write timeline.png and its trace to the output")


def add_drive_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options of a batch, and of the pipeline that it runs on."""
    add_batch_arguments(parser, None, f"{PER_SLICE} for each slice of the pipeline", required=required)
    add_pipeline_arguments(parser, "of its own, brought up when none of that name runs on the cluster")
    parser.set_defaults(dtype=None)  # A running pipeline is used whatever its precision, unless one is asked for.
    parser.add_argument("--keep", action="store_true", help="leave the pipeline up that this has brought up")


def find_gcs_address(args: argparse.Namespace) -> str:
    """Return the address of the cluster's GCS, "host:port"."""
    address = args.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        return find_emulated(args).address
    if "://" in address:
        raise ClusterNotFound(
            f"{address} is where jobs are sent to; this command joins the cluster: give host:port of its GCS (usually "
            "port 6379), on one of its machines"
        )
    return address


def find_jobs_address(args: argparse.Namespace) -> str:
    """Return the URL of the cluster's job server."""
    if args.address is not None:
        return args.address if "://" in args.address else f"http://{args.address}"
    cluster = find_emulated(args)
    if cluster.dashboard is None:
        raise ClusterNotFound(f"the emulated cluster of {args.folder} takes no jobs: no wan-tpu cluster up started it")
    return f"http://{cluster.dashboard}"


def find_emulated(args: argparse.Namespace) -> EmulatedCluster:
    """Return the emulated cluster of --folder; raise `ClusterNotFound`, with the command that starts one."""
    if not (args.folder / STATE).exists():
        raise ClusterNotFound(f"no emulated cluster in {args.folder}; {_start_advice(args)}")
    cluster = EmulatedCluster.attach(args.folder)
    if not cluster.running:
        raise ClusterNotFound(f"the emulated cluster of {args.folder} doesn't run any more; {_start_advice(args)}")
    return cluster


def _start_advice(args: argparse.Namespace) -> str:
    """Return the command that starts a cluster which suits the arguments of a command."""
    layout = "emulated-demo"
    with contextlib.suppress(LayoutError):
        source = getattr(args, "layout", None)
        if source is not None and Layout.load(source).devices_per_host is not None:
            layout = source
    folder = [] if args.folder == find_default_folder() else ["--folder", str(args.folder)]
    command = shlex.join(["wan-tpu", "cluster", "up", "--emulate", layout, *folder])
    return f"give the --address of a real one, or start one here: {command}"


def is_here(args: argparse.Namespace, address: str) -> bool:
    """Return whether an address ("host:port" of a GCS or job server) is that of the emulated cluster here.

    A loopback address alone says nothing: it may be forwarded, or be that of a real cluster on its head node.
    """
    try:
        cluster = EmulatedCluster.attach(args.folder)
    except ClusterNotFound:
        return False
    return address in (cluster.address, cluster.dashboard)


def join_cluster(args: argparse.Namespace) -> str:
    """Join the cluster as a driver; return its address."""
    address = find_gcs_address(args)
    connect(address)
    return address


def read_layout(args: argparse.Namespace) -> Layout | None:
    """Return the layout of the arguments, or None."""
    if args.layout_text is not None:
        return Layout.parse(args.layout_text, args.layout or "--layout_text")
    return None if args.layout is None else Layout.load(args.layout)


def read_checked_layout(args: argparse.Namespace) -> Layout | None:
    """Return the layout of the arguments, checked against the model if its configuration can be read from here."""
    layout = read_layout(args)
    if layout is not None and args.model_id is not None:
        try:
            model = open_spec(args.model_id)
            show_licence(model)
            check_layout(layout, model)
        except (CheckpointError, Unavailable) as error:
            print(f"not checked whether the layout fits the model: {error}", file=sys.stderr)
    return layout


def check_layout(layout: Layout, model: ModelSpec) -> None:
    """Raise `LayoutError`, with the shipped layouts that fit, unless a layout hosts all stages of a model."""
    try:
        layout.check_stages(model.stages)
    except LayoutError as error:
        fitting = []
        for name in list_shipped():
            with contextlib.suppress(LayoutError):
                Layout.load(name).check_stages(model.stages)
                fitting.append(name)
        raise LayoutError(f"{error}; shipped layouts for {model.name}: {', '.join(fitting)}") from None


def build_spec(layout: Layout, settings: PipelineSettings, *, lasting: bool = True) -> PipelineSpec:
    """Return a pipeline's specification; raise `CheckpointError` or `LayoutError` where the parts don't fit."""
    model = open_spec(settings.checkpoint)
    show_licence(model)
    check_layout(layout, model)
    return PipelineSpec(layout, settings, model, lasting)


def read_settings(
    args: argparse.Namespace, address: str, snapshots: str | None = None
) -> tuple[Layout, PipelineSettings]:
    """Return layout and settings of a pipeline, without reading its checkpoint.

    Args:
        args: The command's arguments.
        address: The cluster's address.
        snapshots: Where snapshots go unless the arguments say so. Without it that is a folder of this machine, if the
            cluster runs here.

    Raises:
        InvalidInput: An argument is missing, or has a value that isn't allowed.
        LayoutError: The layout can't be read.
        StorageError: A folder of this machine for snapshots can't be written to.
    """
    reliability = read_reliability(args)
    os.environ.update(build_environment(reliability))  # What this process stores follows them, too.
    layout = read_layout(args)
    if layout is None or args.model_id is None:
        alone = "--layout alone" if layout is not None else "--model alone" if args.model_id is not None else "neither"
        raise InvalidInput(f"--layout and --model say what to bring up; both are needed, and {alone} was given")
    snapshots = args.snapshots or snapshots
    if snapshots is None:
        if not is_here(args, address):
            raise InvalidInput(f"--snapshots is missing; give a folder, {FORMS}, that every host reaches")
        snapshots = absolute(str(args.folder / "snapshots"))
    if args.snapshots is not None and "://" not in snapshots and is_here(args, address):
        open_storage(snapshots).probe()
    if args.snapshot_every < 1:
        raise InvalidInput(f"--snapshot_every is {args.snapshot_every}; allowed are 1 and more")
    sizes = [read_size_with_frames("--warm_up", size) for size in args.warm_up]
    settings = PipelineSettings(
        checkpoint=args.model_id,
        snapshots=snapshots,
        dtype=args.dtype or PipelineSettings.dtype,
        executables=args.executables,
        kernels=args.kernels or PipelineSettings.kernels,
        collectives=args.collectives or PipelineSettings.collectives,
        snapshot_every=args.snapshot_every,
        warm_up=tuple(GenerationRequest(prompt="", height=h, width=w, frames=frames) for h, w, frames in sizes),
        reliability=reliability,
        name=args.name,
    )
    return layout, settings
