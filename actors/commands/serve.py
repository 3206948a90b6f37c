"""`wan-tpu serve`: the pipeline behind HTTP."""

import argparse
import dataclasses
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.commands.arguments import build_spec, find_gcs_address, join_cluster, read_settings
from actors.commands.mounted_layout import MountedLayout
from actors.commands.serve_arguments import NONE, build_serve_parser, read_service_settings
from actors.observe.console import LiveConsole
from wan_tpu.adapters.checking import check
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput

ANYWHERE = "0.0.0.0"  # The default --host of a config, whose cluster is elsewhere.
# Options that only concern this machine and this command, which a config leaves out or replaces.
_LOCAL_OPTIONS = ("address", "folder", "layout", "layout_text", "host", "port", "write_config", "detach", "down")


def serve(argv: Sequence[str]) -> None:
    """Bring a pipeline up with the `/v1/videos` API in front of it, until Ctrl-C; jobs outlast it."""
    parser = build_serve_parser(serve.__doc__)
    group = parser.add_argument_group("instead of serving here until Ctrl-C")
    group.add_argument("--detach", action="store_true", help="return when it is up")
    group.add_argument("--down", action="store_true", help="take down what runs; jobs wait for the next start")
    group.add_argument("--write_config", type=Path, metavar="FILE", help="write a config for: serve deploy FILE")
    args = parser.parse_args(argv)
    if args.write_config is not None:
        _write_config(args, parser)
        return
    os.umask(0o077)
    if args.down:
        _down(args)
        return
    ready = _up(args)
    if args.detach:
        print(f"{ready}; wan-tpu serve --down takes it down")
        return
    try:
        print(f"{ready}; Ctrl-C takes it down", flush=True)
        threading.Event().wait()
    finally:
        _down(args)


def _up(args: argparse.Namespace) -> str:
    """Bring the service up; return its model and address."""
    from actors.api.deploy import deploy_service

    with LiveConsole() as live:
        live.tell("joining the cluster")
        args.host = args.host or "127.0.0.1"
        layout, settings = read_settings(args, find_gcs_address(args))
        service = read_service_settings(args, layout, settings)  # Before a checkpoint is read, to report errors early.
        spec = build_spec(layout, settings)
        service = dataclasses.replace(service, catalogue=service.catalogue.complete_for(spec.model))
        if service.catalogue.adapters:
            live.tell("reading the adapters")
            check(settings.checkpoint, service.catalogue.files)
        join_cluster(args)
        deploy_service(service, spec, host=args.host, port=args.port, ingresses=args.ingresses, tell=live.tell)
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"{service.model} at http://{host}:{args.port} (API: /v1, its description: /docs)"


def _down(args: argparse.Namespace) -> None:
    from actors.api.deploy import take_down

    with LiveConsole() as live:
        live.tell("joining the cluster")
        join_cluster(args)
        live.tell("taking the service down; its jobs wait for the next start")
        take_down(args.name)
    print("stopped")


def build_service_config(
    args: argparse.Namespace, explicit: dict[str, Any], mounted: MountedLayout | None = None
) -> tuple[str, str]:
    """Return Serve's config of a service on another cluster, and the name of its model.

    Args:
        args: All arguments.
        explicit: Those that aren't their defaults, by name. The config has all that don't only concern this machine.
        mounted: The file with the layout on the cluster's machines; without it, the layout is in the config.

    Raises:
        InvalidInput: An argument is missing, or has a value that isn't allowed.
    """
    from actors.commands.serve_config import build_config

    for name in ("snapshots", "database", "results"):
        if getattr(args, name) is None:
            raise InvalidInput(f"--{name} is missing; a config is for a cluster that this command doesn't see")
    # The checkpoint isn't read, because it may be on the cluster's machines only.
    layout, settings = read_settings(args, args.address or "cluster:6379")
    service = read_service_settings(args, layout, settings)
    arguments = {name: value for name, value in explicit.items() if name not in _LOCAL_OPTIONS}
    arguments.setdefault("webhook_secret", NONE)  # A file created on each machine would hold different secrets.
    arguments |= {"host": args.host or ANYWHERE, "port": args.port}
    if mounted is None:
        arguments["layout_text"] = args.layout_text or Path(layout.source).read_text()
    return build_config(arguments, settings.name, layout, mounted), service.model


def _write_config(args: argparse.Namespace, parser: Parser) -> None:
    from wan_tpu.media.video import check_output

    check_output(args.write_config, overwrite=True)
    text, model = build_service_config(args, parser.non_defaults(args))
    args.write_config.write_text(text)
    print(f"wrote {args.write_config}; {model} starts with: serve deploy {args.write_config}")
    host = args.host or ANYWHERE
    print(f"it listens on {host}:{args.port}; other addresses than loopback want a key: wan-tpu keys add")
    if args.webhook_secret in (None, NONE):
        print("it calls no webhooks: --webhook_secret names a file that all machines have, with the same secret in it")
