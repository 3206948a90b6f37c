"""Arguments of `wan-tpu serve`, which a Serve config holds, too, and the settings that they describe."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from actors.commands.arguments import add_cluster_arguments, add_pipeline_arguments
from actors.pipeline_spec import PipelineSettings
from cluster.costs.prices import Prices
from cluster.footprints import WORKER, Footprint
from cluster.layout import Layout
from wan_tpu.commands.parser import Parser
from wan_tpu.commands.sizes import WITH_FRAMES, read_size_with_frames
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.addresses import absolute

if TYPE_CHECKING:
    from actors.api.settings import ServiceSettings

NONE = "none"
_FOLDER = "service"


def build_serve_parser(description: str | None = None) -> Parser:
    """Return the parser of all arguments of a service and its pipeline."""
    parser = Parser(prog="wan-tpu serve", description=description)
    add_cluster_arguments(parser)
    add_pipeline_arguments(parser)
    group = parser.add_argument_group("service")
    group.add_argument(
        "--host", help="address to listen on; default 127.0.0.1, and 0.0.0.0 in a config for another cluster"
    )
    group.add_argument("--port", type=int, default=8000, help="to listen on; default %(default)s")
    for name, text in (
        ("database", "file of jobs and API keys, or postgresql://...; default: in --folder"),
        ("results", "folder, gs:// or s3:// of images and videos; default: in --folder"),
    ):
        group.add_argument(f"--{name}", type=absolute, help=text)
    group.add_argument("--model_name", help="as clients give it; default: the last part of --model")
    group.add_argument(
        "--alias", action="append", default=[], help="another name of the model that clients may give, such as sora-2"
    )
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=PATH[:SCALE][@high|low]",
        help="an adapter that clients may name, where every host finds it; NAME alone: the preset's published files",
    )
    group.add_argument(
        "--largest",
        action="append",
        default=[],
        metavar=WITH_FRAMES,
        help="refuse larger ones: what --warm_up has proven that the slices have memory for; default: no limit",
    )
    group.add_argument("--queue_limit", type=int, default=1000, help="jobs that may wait; default %(default)s")
    group.add_argument("--concurrency", type=int, help="jobs in the pipeline at a time; default: two for each slice")
    group.add_argument("--ingresses", type=int, default=1, help="processes that answer HTTP; default %(default)s")
    group.add_argument("--keep_days", type=float, default=7, help="videos are removed after; default %(default)s")
    group.add_argument(
        "--webhook_secret",
        type=lambda text: text if text == NONE else absolute(text),
        help=f"file of what webhooks are signed with, or {NONE}; default: a file in --folder",
    )
    group.add_argument(
        "--limit", action="append", default=[], metavar="NAME=NUMBER", help="what a client can cost: docs/serving.md"
    )
    group.add_argument(
        "--download_s", type=float, help="clients download from the bucket of --results, by URLs signed for so long"
    )
    group.add_argument("--prices", type=absolute, help="table of what chips cost, for usage; default: the shipped one")
    group.add_argument(
        "--name_of_host", action="append", default=[], help="a name that a service without keys answers to"
    )
    group.add_argument("--origin", action="append", default=[], help="of web pages that may use the API (CORS)")
    return parser


def choose_database(database: str | None, folder: Path) -> str:
    """Return where jobs and API keys are: as the arguments say, or a file in the folder of the cluster's state."""
    return database or absolute(str(folder / _FOLDER / "jobs.sqlite"))


def read_service_settings(args: argparse.Namespace, layout: Layout, settings: PipelineSettings) -> "ServiceSettings":
    """Return the settings of a service in front of a pipeline; raises `InvalidInput`."""
    from actors.api.catalogue import Catalogue
    from actors.api.limits import ServiceLimits
    from actors.api.outbound.client import FetchSettings
    from actors.api.settings import LOCAL_NAMES, ServiceSettings

    folder = (args.folder / _FOLDER).absolute()
    secret = args.webhook_secret or str(folder / "webhook-secret")
    _check(args)
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
        dollars=Prices.load(None if args.prices is None else Path(args.prices)).of_stages(layout),
        url_s=args.download_s,
        limits=ServiceLimits.parse(args.limit),
        webhook_secret_file=None if secret == NONE else secret,
        origins=tuple(args.origin),
        fetch=FetchSettings(timeout_s=settings.reliability.fetch_s),
        reliability=settings.reliability,
    )
    return dataclasses.replace(service, jobs=dataclasses.replace(service.jobs, ended_s=args.keep_days * 86400))


def list_processes(args: argparse.Namespace) -> tuple[Footprint, ...]:
    """Return what each process of a service takes, besides the leaders of slices; raises `InvalidInput`."""
    from actors.api.limits import ServiceLimits

    return (*[ServiceLimits.parse(args.limit).ingress] * args.ingresses, WORKER)


def _check(args: argparse.Namespace) -> None:
    for name, lowest in (("queue_limit", 1), ("ingresses", 1), ("keep_days", 0.001), ("concurrency", 1)):
        value = getattr(args, name)
        if value is not None and not lowest <= value < math.inf:
            raise InvalidInput(f"--{name} is {value:g}; allowed are {lowest:g} and more")
    if args.download_s is not None and not 1 <= args.download_s <= 604_800:
        raise InvalidInput(f"--download_s is {args.download_s:g}; allowed are 1 to 604800, a week")
    if not 1 <= args.port <= 65535:
        raise InvalidInput(f"--port is {args.port}; allowed are 1 to 65535")
