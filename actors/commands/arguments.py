"""Options that several commands share."""

import argparse
import math
import os
from pathlib import Path

from actors.commands.timeouts import add_reliability
from actors.pipeline_spec import PipelineSettings
from cluster.emulation.cluster import find_default_folder
from wan_tpu.commands.parser import (
    ActionParsers,
    OptionGroup,
    Parser,
    add_model,
    add_precision,
    add_switches,
    flag_of,
)
from wan_tpu.commands.sizes import WITH_FRAMES
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.addresses import FORMS, KINDS, absolute

GCS_ADDRESS_HELP = (
    "address of the cluster's GCS, HOST:PORT; default: the environment's RAY_ADDRESS, or else the emulated cluster of "
    "this machine"
)
JOBS_ADDRESS_HELP = (
    "address of the cluster's job server, http://HOST:8265; default: the emulated cluster of this machine"
)
LAYOUT_HELP = "layout file, or the name of a shipped one: wan-tpu layouts"
REQUESTS_PER_SLICE = 2  # The default of --in_flight: one request computes while the next one's inputs arrive.
MAX_IN_FLIGHT = 10_000  # The largest --in_flight that `actors.batch.run.open_batch` accepts.


def make_model_absolute(model_id: str) -> str:
    """Return a checkpoint's folder as an absolute path, and a hub id unchanged."""
    return absolute(model_id) if os.path.isdir(model_id) or model_id.startswith(("./", "../")) else model_id


def add_actions(parser: Parser) -> ActionParsers:
    """Add the argument ACTION, by which a command such as `wan-tpu cluster up` says what to do."""
    return parser.add_actions(
        dest="action", required=True, metavar="ACTION", parser_class=Parser, help="what to do; each has a --help"
    )


def add_folder(group: OptionGroup, owner: str = "emulated cluster") -> None:
    """Add the option for the folder with the state of an emulated cluster, or of a service that runs on this machine.

    Args:
        group: What the option is added to.
        owner: Whose state it is, for the help.
    """
    group.add_argument(
        "--folder",
        type=Path,
        default=find_default_folder(),
        help=f"folder with the state of the {owner}; default %(default)s",
    )


def add_cluster_arguments(parser: Parser, address_help: str = GCS_ADDRESS_HELP) -> None:
    """Add the options that choose a cluster and a pipeline on it.

    Args:
        parser: The command's parser.
        address_help: The help of --address, which says what listens there.
    """
    group = parser.add_group("cluster")
    group.add_argument("--address", help=address_help)
    add_folder(group)
    group.add_argument("--name", default=PipelineSettings.name, help="name of the pipeline; default %(default)s")


def add_pipeline_arguments(parser: Parser, description: str = "") -> None:
    """Add the options that describe a new pipeline."""
    group = parser.add_group("pipeline", description or None)
    group.add_argument("--layout", help=LAYOUT_HELP)
    group.add_argument("--layout_text", metavar="YAML", help="content of a layout file, in place of --layout")
    add_model(
        group,
        type=make_model_absolute,
        help="a name that wan-tpu models lists, a hub id, or a diffusers directory, at the same path on every host or "
        "in a bucket",
    )
    add_precision(group)
    group.add_argument(
        "--executables",
        type=absolute,
        help="where compiled programs are kept: gs://, or a folder at the same path on every host",
    )
    add_switches(group)
    group.add_argument(
        "--preview_decoder",
        type=absolute,
        metavar="FILE",
        help="the model's file of github.com/madebyollin/taehv/safetensors, at the same path on every host, for "
        "previews with details",
    )
    group.add_argument(
        "--snapshots",
        type=absolute,
        help=f"where unfinished videos are saved: {KINDS}, or a folder that every host reaches",
    )
    group.add_argument(
        "--snapshot_every", type=int, default=5, help="steps between two snapshots of a video; default %(default)s"
    )
    group.add_argument(
        "--warm_up",
        action="append",
        default=[],
        metavar=f"{WITH_FRAMES}[:PRESET]",
        help="compile for this size, and with this preset, before the first request; repeat it for several",
    )
    add_reliability(group)


def add_batch_arguments(
    parser: Parser,
    in_flight: int | None = 2,
    in_flight_help: str = "%(default)s",
    *,
    required: bool = True,
) -> None:
    """Add the options of a batch.

    Args:
        parser: The command's parser.
        in_flight: The default of --in_flight.
        in_flight_help: That default in words.
        required: Whether --manifest and --output are required.
    """
    group = parser.add_group("batch")
    for name, text in (
        ("manifest", f"file with one request per line, in JSON (docs/batch.md): a path, {KINDS}"),
        ("output", f"where videos and results are written: a folder, {FORMS}"),
    ):
        group.add_argument(f"--{name}", type=absolute, required=required, help=text)
    group.add_argument(
        "--in_flight", type=int, default=in_flight, help=f"requests under way at a time; default {in_flight_help}"
    )
    group.add_argument(
        "--remake_changed", action="store_true", help="make those videos again whose line or model has changed"
    )
    group.add_argument(
        "--previews",
        action="store_true",
        help="show each unfinished video beside where it will be, as NAME.preview.jpg, until it is there",
    )
    group.add_argument("--timeline", action="store_true", help="write timeline.png and its trace to the output")


def add_drive_arguments(parser: Parser, *, required: bool = True) -> None:
    """Add the options of a batch, and of the pipeline that it runs on."""
    add_batch_arguments(parser, None, f"{REQUESTS_PER_SLICE} for each slice of the pipeline", required=required)
    add_pipeline_arguments(parser, "The batch brings this pipeline up unless one of that name runs on the cluster.")
    parser.set_defaults(dtype=None)  # Without --precision, a running pipeline of any precision is used.
    parser.add_argument(
        "--keep", action="store_true", help="don't take the pipeline down after the batch that brought it up"
    )


def check_range(args: argparse.Namespace, name: str, lowest: float, highest: float = math.inf) -> None:
    """Raise `InvalidInput` if a number option is outside its range, infinite or NaN. None, an omitted option, passes.

    Args:
        args: The command's arguments.
        name: The option, by its name in the arguments.
        lowest: The least value that is allowed.
        highest: The greatest value that is allowed.
    """
    value = getattr(args, name)
    if value is None or (lowest <= value <= highest and math.isfinite(value)):
        return
    allowed = f"{lowest:g} or more" if highest == math.inf else f"{lowest:g} to {highest:g}"
    raise InvalidInput(f"{flag_of(name)} is {value:g}; give {allowed}")
