"""The config with which `serve deploy` brings a service up: it holds the arguments of `wan-tpu serve`."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import ray
import yaml

from actors.api.deploy import prepare_on_head
from actors.api.processes import QUIET, ingress_application, names, worker_application
from actors.api.settings import ServiceSettings
from actors.commands.arguments import pipeline_spec, settings_from
from actors.commands.serve_arguments import serve_parser, service_settings
from actors.observe.status_actor import StatusActor
from actors.pipeline.pools import application_name, build_application
from actors.pipeline_spec import PipelineSpec
from cluster.layout import Layout
from wan_tpu.adapters.checking import check_visible
from wan_tpu.commands.parser import as_words


def config(arguments: Mapping[str, Any], name: str, layout: Layout) -> str:
    """Return the config: each application is built on the cluster from the same arguments.

    arguments  of the command line, by name; without those that say what only the writing machine has
    name       of the pipeline
    """
    ingress_name, worker_name = names(name)
    builders = [(application_name(name, pool.name), "pool", {"pool": pool.name}) for pool in layout.pools]
    builders += [(worker_name, "worker", {}), (ingress_name, "ingress", {})]
    applications = [
        {
            "name": built,
            "route_prefix": "/" if built == ingress_name else None,
            "import_path": f"{__name__}:{builder}",
            "args": {"arguments": dict(arguments), **args},
        }
        for built, builder, args in builders
    ]
    whole = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": arguments["host"], "port": arguments["port"]},
        "logging_config": QUIET,
        "applications": applications,
    }
    return yaml.safe_dump(whole, sort_keys=False)


def pool(args: dict[str, Any]) -> Any:
    """Build a pool's application on the cluster."""
    _, spec = _service(args)
    status = StatusActor.find(spec.settings.name)
    if status is not None:
        status.replace_spec(spec)
    else:
        with contextlib.suppress(ValueError):  # made by another pool's builder at the same moment
            StatusActor.create(spec.settings.name, spec)
    [found] = [found for found in spec.layout.pools if found.name == args["pool"]]
    return build_application(found, spec.settings)


def worker(args: dict[str, Any]) -> Any:
    """Build the worker's application on the cluster; raises `InvalidRequest` for adapters that don't fit the model."""
    settings, spec = _service(args)
    check_visible(spec.settings.checkpoint, settings.catalogue.files)
    prepare_on_head(settings, args["arguments"]["host"])
    return worker_application(settings, spec)


def ingress(args: dict[str, Any]) -> Any:
    """Build the ingress's application on the cluster."""
    settings, spec = _service(args)
    prepare_on_head(settings, args["arguments"]["host"])
    return ingress_application(settings, spec, replicas=int(args["arguments"].get("ingresses", 1)))


def service_from(arguments: Mapping[str, Any], address: str) -> tuple[ServiceSettings, PipelineSpec]:
    """Return what a config's arguments ask for, on the cluster at an address; raises `InvalidInput`."""
    args = serve_parser().parse_args(as_words(arguments))
    spec = pipeline_spec(*settings_from(args, address))
    service = service_settings(args, spec.layout, spec.settings)
    return dataclasses.replace(service, catalogue=service.catalogue.for_model(spec.model)), spec


def _service(args: dict[str, Any]) -> tuple[ServiceSettings, PipelineSpec]:
    return service_from(args["arguments"], ray.get_runtime_context().gcs_address)
