"""The arguments of `wan-tpu serve`, which a config for Ray Serve contains as well, and the settings they describe."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from actors.commands.arguments import add_cluster_arguments, add_pipeline_arguments, check_range
from actors.pipeline_spec import PipelineSettings
from cluster.costs.prices import Prices
from cluster.footprints import WORKER, Footprint
from cluster.layout import Layout
from wan_tpu.commands.parser import Parser
from wan_tpu.commands.sizes import WITH_FRAMES, read_size_with_frames
from wan_tpu.requested_adapter import FORM
from wan_tpu.storage.addresses import KINDS, absolute

if TYPE_CHECKING:
    from actors.api.settings import ServiceSettings

NONE = "none"  # The value of an option that turns something off.
_EXAMPLES = """
wan-tpu serve --model MODEL    # on this machine's TPU, or without one on its CPU
wan-tpu serve --model MODEL --layout four-pools --address HEAD:6379 --snapshots gs://bucket/s
wan-tpu serve --down
"""
_SERVICE_FOLDER = "service"  # The folder of a service's files inside --folder.


def build_serve_parser(description: str | None = None) -> Parser:
    """Return the parser of the arguments of a service and its pipeline."""
    parser = Parser(prog="wan-tpu serve", description=description, examples=_EXAMPLES)
    add_cluster_arguments(parser)
    add_pipeline_arguments(parser)
    parser.add_argument(
        "--slice",
        help="without --layout: the slice that hosts the whole model, such as v6e-8; default: this machine's TPU",
    )
    group = parser.add_group("service")
    group.add_argument(
        "--host", help="address to listen on; default 127.0.0.1, and 0.0.0.0 in a config for another cluster"
    )
    group.add_argument("--port", type=int, default=8000, help="port to listen on; default %(default)s")
    for name, text in (
        ("database", "database of jobs and API keys: a file, or postgresql://...; default: a file in --folder"),
        ("results", f"where images and videos are stored: a folder, {KINDS}; default: a folder in --folder"),
    ):
        group.add_argument(f"--{name}", type=absolute, help=text)
    group.add_argument(
        "--model_name", help="name by which clients request the model; default: the last part of --model"
    )
    group.add_argument(
        "--alias",
        action="append",
        default=[],
        help="another name by which clients may request the model, such as sora-2; repeat it for several names",
    )
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar=f"NAME={FORM}",
        help="adapter that clients may request by NAME, in files that every host reaches; NAME alone: the published "
        "files of the preset of that name",
    )
    group.add_argument(
        "--largest",
        action="append",
        default=[],
        metavar=WITH_FRAMES,
        help="refuse larger videos; give the sizes of --warm_up, for which the slices have enough memory; default: no "
        "limit",
    )
    group.add_argument(
        "--queue_limit",
        type=int,
        default=1000,
        help="number of segments that may wait (most videos have one); default %(default)s",
    )
    group.add_argument(
        "--concurrency", type=int, help="number of jobs in the pipeline at a time; default: two for each slice"
    )
    group.add_argument(
        "--ingresses", type=int, default=1, help="number of processes that answer HTTP; default %(default)s"
    )
    group.add_argument(
        "--keep_days",
        type=float,
        default=7,
        help="number of days after which jobs that have ended, and their videos, are deleted; default %(default)s",
    )
    group.add_argument(
        "--webhook_secret",
        type=lambda text: text if text == NONE else absolute(text),
        help=f"file with the secret that signs webhooks, or {NONE} to call no webhooks; default: a file in --folder",
    )
    group.add_argument(
        "--local_webhooks",
        action="store_true",
        help="for development: webhooks may also be on this machine or in a private network, over http, on any port",
    )
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="change a limit on what clients may use, such as bodies=32; docs/serving.md lists the names",
    )
    group.add_argument(
        "--download_s",
        type=float,
        help="let clients download videos from the bucket of --results, by signed URLs that are valid for this many "
        "seconds; default: they download from the service",
    )
    group.add_argument(
        "--prices", type=absolute, help="table of chip prices, for the usage report; default: the shipped table"
    )
    group.add_argument(
        "--name_of_host",
        action="append",
        default=[],
        help="host name, besides localhost, by which clients may reach a service without API keys; repeat it for "
        "several names",
    )
    group.add_argument(
        "--origin",
        action="append",
        default=[],
        help="origin of web pages that may use the API (CORS); repeat it for several origins",
    )
    return parser


def choose_database(database: str | None, folder: Path) -> str:
    """Return the database of jobs and API keys: the value of --database, or by default a file in --folder."""
    return database or absolute(str(folder / _SERVICE_FOLDER / "jobs.sqlite"))


def read_service_settings(args: argparse.Namespace, layout: Layout, settings: PipelineSettings) -> "ServiceSettings":
    """Return the settings of a service in front of a pipeline.

    Args:
        args: The command's arguments.
        layout: The pipeline's layout.
        settings: The pipeline's settings.

    Raises:
        InvalidInput: An argument has a value that isn't allowed.
        PriceError: The table of prices can't be read.
    """
    from actors.api.catalogue import Catalogue
    from actors.api.limits import ServiceLimits
    from actors.api.outbound.client import FetchSettings
    from actors.api.settings import LOCAL_NAMES, ServiceSettings

    folder = (args.folder / _SERVICE_FOLDER).absolute()
    secret = args.webhook_secret or str(folder / "webhook-secret")
    _check_ranges(args)
    service = ServiceSettings(
        database=choose_database(args.database, args.folder),
        storage=args.results or str(folder / "results"),
        model=args.model_name or Path(settings.checkpoint).name,
        aliases=tuple(args.alias),
        names=(*LOCAL_NAMES, *args.name_of_host),
        catalogue=Catalogue.parse(args.lora),
        largest=tuple(read_size_with_frames("--largest", size) for size in args.largest),
        queue_limit=args.queue_limit,
        concurrency=args.concurrency or max(2, 2 * layout.slices),
        chips={stage: pool.slice.chips for pool in layout.pools for stage in pool.stages},
        dollars=_read_prices(args, layout),
        url_s=args.download_s,
        limits=ServiceLimits.parse(args.limit),
        webhook_secret_file=None if secret == NONE else secret,
        local_webhooks=args.local_webhooks,
        origins=tuple(args.origin),
        fetch=FetchSettings(timeout_s=settings.reliability.fetch_s),
        reliability=settings.reliability,
    )
    return dataclasses.replace(service, jobs=dataclasses.replace(service.jobs, ended_s=args.keep_days * 86400))


def _read_prices(args: argparse.Namespace, layout: Layout) -> dict[str, float]:
    """Return each stage's hourly price per chip; CPU devices that stand in for chips cost nothing."""
    prices = Prices.load(None if args.prices is None else Path(args.prices)).of_stages(layout)
    return prices if layout.devices_per_host is None else dict.fromkeys(prices, 0.0)


def list_processes(args: argparse.Namespace) -> tuple[Footprint, ...]:
    """Return the footprint of each process of a service, except for the leaders of slices; raises `InvalidInput`."""
    from actors.api.limits import ServiceLimits

    return (*[ServiceLimits.parse(args.limit).ingress] * args.ingresses, WORKER)


def _check_ranges(args: argparse.Namespace) -> None:
    for name, lowest in (("queue_limit", 1), ("ingresses", 1), ("keep_days", 0.001), ("concurrency", 1)):
        check_range(args, name, lowest)
    check_range(args, "download_s", 1, 604_800)  # At most a week, as for Google's and Amazon's signed URLs.
    check_range(args, "port", 1, 65535)
