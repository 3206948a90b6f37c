"""Read the layout and the settings of a new pipeline from a command's arguments."""

import argparse
import contextlib
import dataclasses
import os
import sys

from actors.commands.arguments import check_range
from actors.commands.connection import is_emulated_here
from actors.commands.timeouts import read_reliability
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.reliability import build_environment
from cluster.errors import LayoutError
from cluster.layout import Layout, list_shipped
from wan_tpu.commands.sizes import read_size_with_frames
from wan_tpu.errors import CheckpointError, InvalidInput, Unavailable
from wan_tpu.families import open_spec
from wan_tpu.licences import show_licence
from wan_tpu.request import GenerationRequest
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.addresses import FORMS, absolute
from wan_tpu.storage.opening import open_storage


def read_layout(args: argparse.Namespace) -> Layout | None:
    """Return the layout of --layout or --layout_text, or None if both are omitted; raises `LayoutError`."""
    if args.layout_text is not None:
        return Layout.parse(args.layout_text, args.layout or "--layout_text")
    return None if args.layout is None else Layout.load(args.layout)


def read_checked_layout(args: argparse.Namespace) -> Layout | None:
    """Return the layout, after comparing it with the model if this machine can read the model's configuration.

    Raises:
        LayoutError: The layout can't be read, or doesn't host all stages of the model.
    """
    layout = read_layout(args)
    if layout is not None and args.model_id is not None:
        try:
            model = open_spec(args.model_id)
            show_licence(model)
            check_layout(layout, model)
        except (CheckpointError, Unavailable) as error:
            print(f"warning: not checked whether the layout fits the model: {error}", file=sys.stderr)
    return layout


def check_layout(layout: Layout, model: ModelSpec) -> None:
    """Raise `LayoutError`, with the shipped layouts that fit, unless a layout hosts all stages of a model."""
    try:
        layout.check_stages(tuple(model.components), model.optional_stages)
    except LayoutError as error:
        fitting_layouts = []
        for name in list_shipped():
            with contextlib.suppress(LayoutError):
                Layout.load(name).check_stages(tuple(model.components), model.optional_stages)
                fitting_layouts.append(name)
        raise LayoutError(f"{error}; shipped layouts for {model.name}: {', '.join(fitting_layouts)}") from None


def build_spec(layout: Layout, settings: PipelineSettings, *, lasting: bool = True) -> PipelineSpec:
    """Return a pipeline's specification.

    Args:
        layout: The layout.
        settings: The pipeline's settings.
        lasting: Whether the pipeline stays up when this command has ended.

    Raises:
        CheckpointError: The checkpoint's configuration can't be read, or is that of no supported model.
        LayoutError: The layout doesn't host all stages of the model.
    """
    model = open_spec(settings.checkpoint)
    show_licence(model)
    check_layout(layout, model)
    hosted = model.limit_to(layout.stages)
    warm_up = tuple(typical for request in settings.warm_up for typical in hosted.typical_requests(request))
    return PipelineSpec(layout, dataclasses.replace(settings, warm_up=warm_up), model, lasting)


def read_settings(
    args: argparse.Namespace, address: str, snapshots: str | None = None
) -> tuple[Layout, PipelineSettings]:
    """Return the layout and settings of a pipeline, without reading its checkpoint.

    Args:
        args: The command's arguments.
        address: The address of the cluster's GCS, "host:port".
        snapshots: Where snapshots go if --snapshots is omitted. Without it they go to a folder of this machine if the
            cluster is emulated here, and --snapshots is required otherwise.

    Raises:
        InvalidInput: An argument is missing, or has a value that isn't allowed.
        LayoutError: The layout can't be read.
        StorageError: A folder of this machine for snapshots can't be written to.
    """
    reliability = read_reliability(args)
    os.environ.update(build_environment(reliability))  # This process, too, waits that long for storage.
    layout = read_layout(args)
    if layout is None or args.model_id is None:
        missing = [flag for flag, value in (("--layout", layout), ("--model", args.model_id)) if value is None]
        raise InvalidInput(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; a new pipeline needs both "
            "(wan-tpu layouts and wan-tpu models list what there is)"
        )
    check_range(args, "snapshot_every", 1)
    settings = PipelineSettings(
        checkpoint=args.model_id,
        snapshots=_choose_snapshots(args, address, snapshots),
        dtype=args.dtype or PipelineSettings.dtype,
        executables=args.executables,
        kernels=args.kernels or PipelineSettings.kernels,
        collectives=args.collectives or PipelineSettings.collectives,
        preview_decoder=args.preview_decoder,
        snapshot_every=args.snapshot_every,
        warm_up=tuple(_read_warm_up(size) for size in args.warm_up),
        reliability=reliability,
        name=args.name,
    )
    return layout, settings


def _choose_snapshots(args: argparse.Namespace, address: str, default: str | None) -> str:
    """Return where snapshots go, as an address or an absolute path; raise `InvalidInput` or `StorageError`."""
    is_local = is_emulated_here(args, address)
    if args.snapshots is not None:
        if is_local and "://" not in args.snapshots:
            open_storage(args.snapshots).probe()
        return str(args.snapshots)
    if default is None and not is_local:
        raise InvalidInput(f"--snapshots is missing; give a folder that every host reaches, {FORMS}")
    return default or absolute(str(args.folder / "snapshots"))


def _read_warm_up(text: str) -> GenerationRequest:
    size, _, preset = text.partition(":")
    height, width, frames = read_size_with_frames("--warm_up", size)
    try:
        return GenerationRequest(prompt="", height=height, width=width, frames=frames, preset=preset or None)
    except InvalidInput as error:
        raise InvalidInput(f"--warm_up {text}: {error}") from None
