"""The config for `serve deploy`, which holds the arguments of `wan-tpu serve`."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import ray

from actors.api.deploy import prepare_on_head
from actors.api.processes import QUIET, list_application_names, make_ingress, make_worker
from actors.api.settings import ServiceSettings
from actors.commands.arguments import build_spec, read_settings
from actors.commands.mounted_layout import MountedLayout, wait_for_layout
from actors.commands.serve_arguments import build_serve_parser, read_service_settings
from actors.observe.status_actor import StatusActor
from actors.pipeline.pools import build_application, name_application
from actors.pipeline_spec import PipelineSpec
from cluster.layout import Layout
from cluster.readable_yaml import dump_yaml
from wan_tpu.adapters.checking import check_visible
from wan_tpu.commands.parser import as_words


def build_config(arguments: Mapping[str, Any], name: str, layout: Layout, mounted: MountedLayout | None) -> str:
    """Return a config whose applications are all built on the cluster from the same arguments.

    Args:
        arguments: Arguments of the command line, by name, without those that only concern this machine.
        name: The pipeline's name.
        layout: The pipeline's layout.
        mounted: The file that has this layout on the cluster's machines; without it, the arguments have the layout.
    """
    ingress_name, worker_name = list_application_names(name)
    builders = [(name_application(name, pool.name), "pool", {"pool": pool.name}) for pool in layout.pools]
    builders += [(worker_name, "worker", {}), (ingress_name, "ingress", {})]
    shared = dict(arguments)  # Written once, and referred to by all others.
    # The hash is in every application's arguments, so that Serve builds all of them anew for another layout.
    file = {} if mounted is None else {"layout": mounted.path, "layout_sha256": mounted.sha256}
    applications = [
        {
            "name": application,
            "route_prefix": "/" if application == ingress_name else None,
            "import_path": f"{__name__}:{builder}",
            "args": {"arguments": shared, **file, **args},
        }
        for application, builder, args in builders
    ]
    whole = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": arguments["host"], "port": arguments["port"]},
        "logging_config": QUIET,
        "applications": applications,
    }
    return dump_yaml(whole, aliases=True)


def pool(args: dict[str, Any]) -> Any:
    """Build a pool's application on the cluster."""
    _, spec = _read_args(args)
    status = StatusActor.find(spec.settings.name)
    if status is not None:
        status.replace_spec(spec)
    else:
        with contextlib.suppress(ValueError):  # Another pool's builder starts it at the same moment.
            StatusActor.create(spec.settings.name, spec)
    [pool_layout] = [pool for pool in spec.layout.pools if pool.name == args["pool"]]
    return build_application(pool_layout, spec.settings)


def worker(args: dict[str, Any]) -> Any:
    """Build the worker's application on the cluster; raises `InvalidRequest` for adapters that don't fit the model."""
    settings, spec = _read_args(args)
    check_visible(spec.settings.checkpoint, settings.catalogue.files)
    prepare_on_head(settings, args["arguments"]["host"])
    return make_worker(settings, spec)


def ingress(args: dict[str, Any]) -> Any:
    """Build the ingress's application on the cluster."""
    settings, spec = _read_args(args)
    prepare_on_head(settings, args["arguments"]["host"])
    return make_ingress(settings, spec, replicas=int(args["arguments"].get("ingresses", 1)))


def read_service(arguments: Mapping[str, Any], address: str) -> tuple[ServiceSettings, PipelineSpec]:
    """Return the service and pipeline that a config's arguments describe; raises `InvalidInput`."""
    args = build_serve_parser().parse_args(as_words(arguments))
    spec = build_spec(*read_settings(args, address))
    service = read_service_settings(args, spec.layout, spec.settings)
    return dataclasses.replace(service, catalogue=service.catalogue.complete_for(spec.model)), spec


def _read_args(args: dict[str, Any]) -> tuple[ServiceSettings, PipelineSpec]:
    arguments = args["arguments"]
    if "layout" in args:
        arguments = arguments | {"layout_text": wait_for_layout(args["layout"], args["layout_sha256"])}
    return read_service(arguments, ray.get_runtime_context().gcs_address)
