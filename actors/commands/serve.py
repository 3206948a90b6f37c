"""`wan-tpu serve`: a pipeline behind the `/v1/videos` HTTP API."""

import argparse
import contextlib
import dataclasses
import getpass
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.commands.connection import find_gcs_address, join_cluster, spell_folder
from actors.commands.mounted_layout import MountedLayout
from actors.commands.new_pipeline import build_spec, read_settings
from actors.commands.own_cluster import fill_arguments, start_cluster, wants_own_cluster
from actors.commands.serve_arguments import NONE, build_serve_parser, read_service_settings
from actors.errors import PipelineError, PipelineExists, PipelineNotFound
from actors.observe.console import LiveConsole
from cluster.connect import leave
from cluster.emulation.cluster import EmulatedCluster
from cluster.gang.devices import list_device_files
from wan_tpu.adapters.checking import check
from wan_tpu.commands.importing import heavy_imports
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput

ALL_INTERFACES = "0.0.0.0"  # The default of --host in a config, which is for another cluster.
# Options that only concern this machine and this command. A config omits or replaces them.
_LOCAL_OPTIONS = (
    "address",
    "folder",
    "layout",
    "layout_text",
    "slice",
    "host",
    "port",
    "write_config",
    "detach",
    "down",
    "replace",
)
_LOOK_S = 5  # Pause between two looks at whether the service still runs.


def serve(argv: Sequence[str]) -> None:
    """Serve a pipeline through the `/v1/videos` API until Ctrl-C; unfinished jobs wait for the next start."""
    parser = build_serve_parser(serve.__doc__)
    group = parser.add_group("instead of serving until Ctrl-C").add_alternatives()
    group.add_argument("--detach", action="store_true", help="return when the service is up")
    group.add_argument(
        "--down", action="store_true", help="take the running service down; its jobs wait for the next start"
    )
    group.add_argument(
        "--write_config", type=Path, metavar="FILE", help="write a config for Ray's command serve deploy FILE"
    )
    parser.add_argument("--replace", action="store_true", help="update the service if it runs already")
    args = parser.parse_args(argv)
    if args.write_config is not None:
        _write_config(args, parser)
        return
    os.umask(0o077)
    if args.down:
        _check_running(args)
        _take_down(args)
        return
    if args.model_id is None:
        raise InvalidInput("--model is missing; wan-tpu models lists what there is")
    explicit = parser.non_defaults(args)
    with contextlib.ExitStack() as stack:
        is_own = wants_own_cluster(args)
        if is_own:
            cluster = _start_own_cluster(args)
            stack.callback(cluster.stop)
            stack.callback(leave)
        summary = _bring_up(args)
        if args.detach:
            stack.pop_all()
            location = [
                word for name in ("address", "name") if name in explicit for word in (f"--{name}", explicit[name])
            ]
            down = shlex.join(["wan-tpu", "serve", "--down", *location, *spell_folder(args)])
            and_cluster = shlex.join(["wan-tpu", "cluster", "down", *spell_folder(args)])
            print(f"{summary}; to take it down: {down}{f' && {and_cluster}' if is_own else ''}")
            return
        try:
            print(f"{summary}; Ctrl-C takes it down", flush=True)
            while _is_running(args.name):
                time.sleep(_LOOK_S)
        except BaseException:
            _take_down(args)
            raise
    raise PipelineError("the service was taken down from elsewhere; its jobs wait for the next start")


def _start_own_cluster(args: argparse.Namespace) -> EmulatedCluster:
    """Check the arguments, and start a cluster of this machine alone, on which the service is to run."""
    kind = fill_arguments(args)
    read_service_settings(args, *read_settings(args, ""))  # Starting Ray takes longer.
    is_emulated = not list_device_files()
    with LiveConsole() as live:
        live.tell(f"starting Ray on this machine, {f'whose CPU emulates a {kind}' if is_emulated else f'a {kind}'}")
        return start_cluster(args, kind)


def _bring_up(args: argparse.Namespace) -> str:
    """Bring the service up; return a text with its model and address."""
    with LiveConsole() as live:
        live.tell("joining the cluster")
        with heavy_imports():
            from actors.api.deploy import deploy_service
        args.host = args.host or "127.0.0.1"
        layout, settings = read_settings(args, find_gcs_address(args))
        service = read_service_settings(args, layout, settings)  # Check them before spending time on the checkpoint.
        spec = build_spec(layout, settings)
        service = dataclasses.replace(service, catalogue=service.catalogue.complete_for(spec.model))
        if service.catalogue.files:
            live.tell("reading the adapters")
            warnings = check(settings.checkpoint, service.catalogue.files)
            service = dataclasses.replace(service, catalogue=dataclasses.replace(service.catalogue, warnings=warnings))
        join_cluster(args)
        if not args.replace and _is_running(args.name):
            raise PipelineExists(
                f"a service called {args.name!r} runs on this cluster already; give --replace to update it, another "
                "--name for a second one, or take it down with wan-tpu serve --down"
            )
        deploy_service(service, spec, host=args.host, port=args.port, ingresses=args.ingresses, on_status=live.tell)
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"{service.model} at http://{host}:{args.port} (API: /v1, documentation: /docs){_advise_tunnel(args)}"


def _advise_tunnel(args: argparse.Namespace) -> str:
    """Return the command with which a user who is logged in by ssh reaches a service on the loopback interface."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) != 4 or args.host not in ("127.0.0.1", "localhost", "::1"):
        return ""
    command = f"ssh -L {args.port}:{args.host}:{args.port} {getpass.getuser()}@{connection[2]}"
    return f"; from your own machine, by {command}"


def _check_running(args: argparse.Namespace) -> None:
    """Raise `PipelineNotFound` where --down would take nothing down, as with a misspelt --name."""
    from actors.pipeline.pools import list_applications

    join_cluster(args)
    if not _is_running(args.name) and not list_applications(args.name):
        raise PipelineNotFound(
            f"no service called {args.name!r} runs on this cluster; its --name must be that of wan-tpu serve"
        )


def _is_running(name: str) -> bool:
    """Return whether a service of that name runs on the cluster that this process has joined."""
    from ray import serve as ray_serve

    from actors.api.processes import list_application_names

    return not ray_serve.status().applications.keys().isdisjoint(list_application_names(name))


def _take_down(args: argparse.Namespace) -> None:
    with LiveConsole() as live:
        live.tell("joining the cluster")
        with heavy_imports():
            from actors.api.deploy import take_down
        join_cluster(args)
        live.tell("taking the service down; its jobs wait for the next start")
        take_down(args.name)
    print("stopped")


def build_service_config(
    args: argparse.Namespace, explicit: dict[str, Any], mounted: MountedLayout | None = None
) -> tuple[str, str]:
    """Return a config for Ray Serve, in YAML, of a service on another cluster, and the name of its model.

    Args:
        args: The command's arguments.
        explicit: Those that differ from their defaults, by name. The config gets all except those that only concern
            this machine.
        mounted: The layout file on the cluster's machines; None to put the layout into the config.

    Raises:
        InvalidInput: An argument is missing, or has a value that isn't allowed.
    """
    from actors.commands.serve_config import build_config

    for name in ("snapshots", "database", "results"):
        if getattr(args, name) is None:
            raise InvalidInput(f"--{name} is missing; a config for another cluster has no default for it")
    # Don't read the checkpoint, because it may be only on the cluster's machines.
    layout, settings = read_settings(args, args.address or "cluster:6379")
    service = read_service_settings(args, layout, settings)
    arguments = {name: value for name, value in explicit.items() if name not in _LOCAL_OPTIONS}
    arguments.setdefault("webhook_secret", NONE)  # By default, each new head would create its own.
    arguments |= {"host": args.host or ALL_INTERFACES, "port": args.port}
    if mounted is None:
        arguments["layout_text"] = args.layout_text or Path(layout.source).read_text()
    return build_config(arguments, settings.name, layout, mounted), service.model


def _write_config(args: argparse.Namespace, parser: Parser) -> None:
    from wan_tpu.media.video import check_output

    check_output(args.write_config, overwrite=True)
    text, model = build_service_config(args, parser.non_defaults(args))
    args.write_config.write_text(text)
    print(f"wrote {args.write_config}; start the service of {model} with: serve deploy {args.write_config}")
    host = args.host or ALL_INTERFACES
    print(f"it will listen on {host}:{args.port}; unless that is a loopback address, create a key: wan-tpu keys add")
    if args.webhook_secret in (None, NONE):
        print("it won't call webhooks; to enable them, put a secret in a file on the head node: --webhook_secret")
