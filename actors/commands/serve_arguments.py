"""Arguments of `wan-tpu serve`, and what is made from them; a Serve config holds the same arguments."""

import argparse
import dataclasses
import os
from pathlib import Path

from actors.api.access import Access
from actors.api.keys import ENVIRONMENT
from actors.api.memory import Sizes, derived
from actors.api.settings import LOCAL_NAMES, ServiceSettings
from actors.commands.cluster_arguments import add_cluster_arguments, add_pipeline_arguments
from actors.settings import About
from cluster.connect import is_loopback
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput

PORT = 8000
NONE = "none"
_FOLDER = "service"


def serve_parser(description: str | None = None) -> Parser:
    """Return the parser of all that a service and its pipeline are told."""
    parser = Parser(prog="wan-tpu serve", description=description)
    add_cluster_arguments(parser, 'of the cluster\'s GCS, "host:port"')
    add_pipeline_arguments(parser)
    group = parser.add_argument_group("service")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; default %(default)s")
    group.add_argument("--port", type=int, default=PORT, help="default %(default)s")
    group.add_argument("--keys", type=Path, help="file of API keys (wan-tpu keys add); a public host needs one")
    group.add_argument("--database", help="file of the jobs, or postgresql://...; default: in --folder")
    group.add_argument("--results", help="folder or gs:// of images and videos; default: in --folder")
    group.add_argument("--model_name", help="as clients give it; default: the last part of --model_id")
    group.add_argument(
        "--largest",
        action="append",
        default=[],
        metavar="HEIGHT*WIDTH*FRAMES",
        help="that the slices have memory for; larger ones are refused. Default: derived where the slices are known",
    )
    group.add_argument("--queue_limit", type=int, default=1000, help="jobs that may wait; default %(default)s")
    group.add_argument("--concurrency", type=int, help="jobs in the pipeline at a time; default: two for each slice")
    group.add_argument("--ingresses", type=int, default=1, help="processes that answer HTTP; default %(default)s")
    group.add_argument("--keep_days", type=float, default=7, help="videos are removed after; default %(default)s")
    group.add_argument(
        "--webhook_secret", help=f"file of what webhooks are signed with, or {NONE}; default: a file in --folder"
    )
    group.add_argument(
        "--name_of_host", action="append", default=[], help="a name that a service without keys answers to"
    )
    group.add_argument("--origin", action="append", default=[], help="of web pages that may use the API (CORS)")
    return parser


def service_settings(args: argparse.Namespace, about: About) -> ServiceSettings:
    """Return the settings of a service in front of a pipeline; raises `InvalidInput`."""
    settings, layout = about.settings, about.layout
    folder = (args.folder / _FOLDER).absolute()
    keys_text = os.environ.get(ENVIRONMENT)
    secret = args.webhook_secret or str(folder / "webhook-secret")
    _check(args)
    check_access(args.host, args.keys, keys_text)
    slices = sum(pool.replicas.maximum for pool in layout.pools)
    made = ServiceSettings(
        database=_place(args.database) or str(folder / "jobs.sqlite"),
        storage=_place(args.results) or str(folder / "results"),
        model=args.model_name or Path(settings.checkpoint).name,
        keys_file=None if args.keys is None else str(args.keys.expanduser().absolute()),
        keys_text=keys_text,
        names=(*LOCAL_NAMES, *args.name_of_host),
        room=Sizes(tuple(map(_size, args.largest))) if args.largest else derived(about),
        queue_limit=args.queue_limit,
        concurrency=args.concurrency or max(2, 2 * slices),
        chips={stage: pool.slice.chips for pool in layout.pools for stage in pool.stages},
        webhook_secret_file=None if secret == NONE else _place(secret),
        origins=tuple(args.origin),
    )
    keeping = dataclasses.replace(made.keeping, ended_s=args.keep_days * 86400)
    return dataclasses.replace(made, keeping=keeping)


def check_access(host: str, keys: Path | None, keys_text: str | None) -> None:
    """Raise `InvalidInput` unless the service is on loopback, or there is a key."""
    found = Access(None if keys is None else keys.expanduser(), keys_text or "").keys
    if keys is not None and not found:
        raise InvalidInput(f"there is no key in {keys}; make one with: wan-tpu keys add NAME --file {keys}")
    if not found and not is_loopback(f"{host}:0"):
        raise InvalidInput(
            f"--host {host} lets others than this machine in, and there are no API keys; make one (wan-tpu keys add "
            "NAME) and give its file as --keys, or listen on 127.0.0.1"
        )


def _check(args: argparse.Namespace) -> None:
    for name, lowest in (("queue_limit", 1), ("ingresses", 1), ("keep_days", 0.001)):
        if getattr(args, name) < lowest:
            raise InvalidInput(f"--{name} is {getattr(args, name):g}; allowed are {lowest:g} and more")
    if not 1 <= args.port <= 65535:
        raise InvalidInput(f"--port is {args.port}; allowed are 1 to 65535")
    if args.concurrency is not None and args.concurrency < 1:
        raise InvalidInput(f"--concurrency is {args.concurrency}; allowed are 1 and more")


def _place(text: str | None) -> str | None:
    """Return a folder or file as a path that means the same everywhere on its machine; an address as it is."""
    return text if text is None or "://" in text else str(Path(text).expanduser().absolute())


def _size(text: str) -> tuple[int, int, int]:
    try:
        height, width, frames = (int(part) for part in text.split("*"))
    except ValueError:
        raise InvalidInput(f"--largest {text}: give HEIGHT*WIDTH*FRAMES, such as 720*1280*81") from None
    return height, width, frames
