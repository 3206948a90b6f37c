"""The config for Ray's command `serve deploy`, which contains the arguments of `wan-tpu serve`."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import ray

from actors.api.deploy import prepare_on_head
from actors.api.processes import QUIET, list_application_names, make_ingress, make_worker
from actors.api.settings import ServiceSettings
from actors.commands.mounted_layout import MountedLayout, wait_for_layout
from actors.commands.new_pipeline import build_spec, read_settings
from actors.commands.serve_arguments import build_serve_parser, read_service_settings
from actors.observe.status_actor import StatusActor
from actors.pipeline.pools import build_application, name_application
from actors.pipeline_spec import PipelineSpec
from cluster.layout import Layout
from cluster.readable_yaml import dump_yaml
from wan_tpu.adapters.checking import check_visible
from wan_tpu.commands.parser import as_words


def build_config(arguments: Mapping[str, Any], name: str, layout: Layout, mounted: MountedLayout | None) -> str:
    """Return a config, in YAML, whose applications are all built on the cluster from the same arguments.

    Args:
        arguments: Arguments of the command line, by name, without those that only concern this machine.
        name: The pipeline's name.
        layout: The pipeline's layout.
        mounted: The file with this layout on the cluster's machines; None if the arguments contain the layout.
    """
    ingress_name, worker_name = list_application_names(name)
    builders = [(name_application(name, pool.name), build_pool.__name__, {"pool": pool.name}) for pool in layout.pools]
    builders += [(worker_name, build_worker.__name__, {}), (ingress_name, build_ingress.__name__, {})]
    shared = dict(arguments)  # YAML writes this object once, and aliases to it in the other applications.
    # The arguments of every application have the hash, so that Serve rebuilds all of them when the layout changes.
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
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": arguments["host"], "port": arguments["port"]},
        "logging_config": QUIET,
        "applications": applications,
    }
    return dump_yaml(config, aliases=True)


def build_pool(args: dict[str, Any]) -> Any:
    """Build a pool's application on the cluster."""
    _, spec = _read_args(args)
    status = StatusActor.find(spec.settings.name)
    if status is not None:
        status.replace_spec(spec)
    else:
        with contextlib.suppress(ValueError):  # Another pool's builder has just created the actor.
            StatusActor.create(spec.settings.name, spec)
    [pool_layout] = [pool for pool in spec.layout.pools if pool.name == args["pool"]]
    return build_application(pool_layout, spec.settings)


def build_worker(args: dict[str, Any]) -> Any:
    """Build the worker's application on the cluster; raises `InvalidRequest` for adapters that don't fit the model."""
    settings, spec = _read_args(args)
    check_visible(spec.settings.checkpoint, settings.catalogue.files)
    prepare_on_head(settings, args["arguments"]["host"])
    return make_worker(settings, spec)


def build_ingress(args: dict[str, Any]) -> Any:
    """Build the ingress's application on the cluster; raises as `build_worker`."""
    settings, spec = _read_args(args)
    warnings = check_visible(spec.settings.checkpoint, settings.catalogue.files)
    settings = dataclasses.replace(settings, catalogue=dataclasses.replace(settings.catalogue, warnings=warnings))
    prepare_on_head(settings, args["arguments"]["host"])
    return make_ingress(settings, spec, replicas=int(args["arguments"].get("ingresses", 1)))


def read_service(arguments: Mapping[str, Any], address: str) -> tuple[ServiceSettings, PipelineSpec]:
    """Return the service and the pipeline that a config's arguments describe.

    Args:
        arguments: Arguments of `wan-tpu serve`, by name.
        address: The address of the cluster's GCS, "host:port".

    Raises:
        CheckpointError: The checkpoint's configuration can't be read, or is that of no supported model.
        InvalidInput: An argument is missing, or has a value that isn't allowed.
        LayoutError: The layout can't be read, or doesn't host all stages of the model.
    """
    args = build_serve_parser().parse_args(as_words(arguments))
    spec = build_spec(*read_settings(args, address))
    service = read_service_settings(args, spec.layout, spec.settings)
    return dataclasses.replace(service, catalogue=service.catalogue.complete_for(spec.model)), spec


def _read_args(args: dict[str, Any]) -> tuple[ServiceSettings, PipelineSpec]:
    arguments = args["arguments"]
    if "layout" in args:
        arguments = arguments | {"layout_text": wait_for_layout(args["layout"], args["layout_sha256"])}
    return read_service(arguments, ray.get_runtime_context().gcs_address)
