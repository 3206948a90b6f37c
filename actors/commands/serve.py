"""`wan-tpu serve`: the pipeline behind HTTP."""

import argparse
import threading
from collections.abc import Sequence
from pathlib import Path

from actors.api.deploying import config, deploy_service, take_down
from actors.api.settings import ServiceSettings
from actors.commands.cluster_arguments import gcs_address, join, wanted_from
from actors.commands.serve_arguments import NONE, serve_parser, service_settings
from actors.interrupts import ended_as_by_ctrl_c
from actors.live import Live
from actors.settings import About
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput

# Where a config for another machine may not simply repeat what stands on this command line.
_HERE = ("address", "folder", "layout", "layout_text", "host", "port", "write_config", "detach", "down")


def serve(argv: Sequence[str]) -> None:
    """Bring a pipeline up with OpenAI's videos API in front of it, until Ctrl-C; jobs outlast it."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.write_config is not None:
        _write_config(args, parser)
        return
    with ended_as_by_ctrl_c():
        if args.down:
            _down(args)
            return
        _up(args)
        if args.detach:
            return
        try:
            threading.Event().wait()
        finally:
            _down(args)


def understood(argv: Sequence[str], address: str) -> tuple[ServiceSettings, About]:
    """Return what a command line asks for, on the cluster at an address; raises `InvalidInput`."""
    return _asked(_parser().parse_args(argv), address)


def _parser() -> Parser:
    parser = serve_parser(serve.__doc__)
    group = parser.add_argument_group("instead of serving here until Ctrl-C")
    group.add_argument("--detach", action="store_true", help="return when it is up")
    group.add_argument("--down", action="store_true", help="take down what runs; jobs wait for the next start")
    group.add_argument("--write_config", type=Path, metavar="FILE", help="write a config for: serve deploy FILE")
    return parser


def _asked(args: argparse.Namespace, address: str) -> tuple[ServiceSettings, About]:
    about = wanted_from(args, address, lasting=True, snapshots=None)
    if about is None:
        raise InvalidInput("--layout and --model_id say what to bring up; both are needed")
    return service_settings(args, about), about


def _up(args: argparse.Namespace) -> None:
    with Live() as live:
        live.tell("joining the cluster")
        settings, about = _asked(args, gcs_address(args))
        join(args)
        deploy_service(settings, about, host=args.host, port=args.port, ingresses=args.ingresses, tell=live.tell)
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"{settings.model} at http://{host}:{args.port} (API: /v1, its description: /docs)", flush=True)


def _down(args: argparse.Namespace) -> None:
    with Live() as live:
        live.tell("joining the cluster")
        join(args)
        live.tell("taking the service down; its jobs wait for the next start")
        take_down(args.name)
    print("stopped")


def _write_config(args: argparse.Namespace, parser: Parser) -> None:
    for name in ("snapshots", "database", "results"):
        if getattr(args, name) is None:
            raise InvalidInput(f"--{name} is missing; a config is for a cluster that this command doesn't see")
    settings, about = _asked(args, args.address or "cluster:6379")
    given = {
        name: [str(one) for one in value]
        if isinstance(value, list)
        else value
        if isinstance(value, int)
        else str(value)
        for name, value in vars(args).items()
        if name not in _HERE and value != parser.get_default(name) and value is not None
    }
    given.setdefault("webhook_secret", NONE)  # a file made on each machine would be another secret on each
    given |= {
        "layout_text": args.layout_text or Path(about.layout.source).read_text(),
        "host": args.host,
        "port": args.port,
    }
    args.write_config.write_text(config(given, about, host=args.host, port=args.port))
    print(f"wrote {args.write_config}; {settings.model} starts with: serve deploy {args.write_config}")
