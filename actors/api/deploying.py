"""Bring a service up on a cluster, take it down, and write the config with which `serve deploy` does the same."""

import contextlib
import logging
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve import context
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import ApplicationStatus, ProxyStatus

from actors import pools
from actors.api.replicas import DRAIN_S, QUIET, ingress_application, names, worker_application
from actors.api.settings import ServiceSettings
from actors.api.webhook import read_secret
from actors.board import Board
from actors.errors import PipelineError, PipelineExists
from actors.jobs.store import open_database
from actors.pools import POLL_S, Tell, application, deploy, pool_application, running, shut_down
from actors.settings import About
from actors.storage import open_storage

_ANSWERS_S = 60.0  # until the first answer over HTTP
_MODULE = "actors.api.deploying"


class ServiceStartFailed(PipelineError):
    """The service can't be started; the message says why."""


def start_http(host: str, port: int) -> None:
    """Have Ray Serve listen there, with a proxy on the head node; before any application.

    A Serve that listens elsewhere, or nowhere, keeps to that for as long as it runs: it is shut down where it has no
    application. Raises `ServiceStartFailed` where it has one.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    client = _serve()
    if client is not None and (found := _listens_at(client)) != (host, port):
        applications = sorted(serve.status().applications)
        if applications:
            raise ServiceStartFailed(_taken(found, (host, port), applications))
        serve.shutdown()
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=host, port=port),
        logging_config=QUIET,
    )
    if (found := _listens_at(_serve())) != (host, port):  # another process has started it at the same moment
        raise ServiceStartFailed(_taken(found, (host, port), sorted(serve.status().applications)))


def deploy_service(
    settings: ServiceSettings, about: About, *, host: str, port: int, ingresses: int = 1, tell: Tell = lambda text: None
) -> None:
    """Start pipeline, worker and ingress, and return when the service answers. What runs already is updated.

    Raises `InvalidInput` where database, storage or secret can't be used, `PipelineStartFailed`,
    `ServiceStartFailed`; nothing that this has started is left then.
    """
    prepare(settings)
    start_http(host, port)
    name = about.settings.name
    before = set(serve.status().applications)
    ours = not running(name)
    if not ours:
        _check_same(about)
    if ours:
        deploy(about.layout, about.settings, tell=tell)
    try:
        tell("starting the service")
        ingress, worker = names(name)
        serve.run_many(
            [
                serve.RunTarget(worker_application(settings, about), name=worker, route_prefix=None),
                serve.RunTarget(
                    ingress_application(settings, about, replicas=ingresses), name=ingress, route_prefix="/"
                ),
            ],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _wait_until_up((ingress, worker), tell)
        wait_until_answers(host, port)
    except BaseException:
        if not before & set(names(name)):
            take_down(name, pipeline=ours, drain_s=0)
        raise


def _check_same(wanted: About) -> None:
    """Raise `PipelineExists` when the pipeline that runs isn't the wanted one."""
    found = pools.about(wanted.settings.name)
    if found is None or (found.layout.pools, found.settings) != (wanted.layout.pools, wanted.settings):
        raise PipelineExists(
            f"another pipeline {wanted.settings.name!r} runs on this cluster, with another layout, model or settings; "
            "take it down (wan-tpu serve --down), or choose another --name"
        )


def prepare(settings: ServiceSettings) -> None:
    """See that database, storage and secret can be used from here; make them where they are missing."""
    open_database(settings.database).close()
    open_storage(settings.storage).probe()
    if settings.webhook_secret_file is not None:
        read_secret(Path(settings.webhook_secret_file), make=True)


def take_down(name: str, *, pipeline: bool = True, drain_s: float = DRAIN_S) -> None:
    """End ingress and worker, whose jobs wait for the next one; and the pipeline, if told to."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _serve()
    for found in sorted(set(names(name)) & set(serve.status().applications)):
        serve.delete(found)
    if pipeline and running(name):
        shut_down(name, drain_s=drain_s)


def wait_until_answers(host: str, port: int, within_s: float = _ANSWERS_S) -> None:
    """Return when the service answers over HTTP; raises `ServiceStartFailed`."""
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{near}]' if ':' in near else near}:{port}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy says
    until, reason = time.monotonic() + within_s, ""
    while time.monotonic() < until:
        try:
            request = urllib.request.Request(address, headers={"Host": f"localhost:{port}"})
            with opener.open(request, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError as error:
            reason = str(error)
        time.sleep(POLL_S)
    raise ServiceStartFailed(
        f"nothing answers at {address} ({reason}); is the port taken, or does Ray Serve of this cluster listen on "
        "another one already?"
    )


# ---- serve deploy


def config(arguments: Mapping[str, Any], about: About, *, host: str, port: int) -> str:
    """Return the config for `serve deploy`: each application is built on the cluster from the same arguments."""
    name = about.settings.name
    ingress, worker = names(name)
    parts: list[dict[str, Any]] = [
        {"name": application(name, pool.name), "import_path": f"{_MODULE}:pool", "pool": pool.name}
        for pool in about.layout.pools
    ]
    parts += [
        {"name": worker, "import_path": f"{_MODULE}:worker"},
        {"name": ingress, "import_path": f"{_MODULE}:ingress", "route_prefix": "/"},
    ]
    applications = [
        {
            "name": part["name"],
            "route_prefix": part.get("route_prefix"),
            "import_path": part["import_path"],
            "args": {"arguments": dict(arguments)} | ({"pool": part["pool"]} if "pool" in part else {}),
        }
        for part in parts
    ]
    whole = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": host, "port": port},
        "logging_config": QUIET,
        "applications": applications,
    }
    return yaml.safe_dump(whole, sort_keys=False)


def pool(args: dict[str, Any]) -> Any:
    """Build a pool's application on the cluster."""
    _, about = _understood(args)
    name = about.settings.name
    if Board.find(name) is None:
        with contextlib.suppress(ValueError):  # made by another pool's builder at the same moment
            Board.create(name, about)
    [found] = [found for found in about.layout.pools if found.name == args["pool"]]
    return pool_application(found, about.settings)


def worker(args: dict[str, Any]) -> Any:
    """Build the worker's application on the cluster."""
    settings, about = _understood(args)
    prepare(settings)
    return worker_application(settings, about)


def ingress(args: dict[str, Any]) -> Any:
    """Build the ingress's application on the cluster."""
    settings, about = _understood(args)
    prepare(settings)
    return ingress_application(settings, about, replicas=int(args["arguments"].get("ingresses", 1)))


def _understood(args: dict[str, Any]) -> tuple[ServiceSettings, About]:
    from actors.commands.serve import understood  # that module imports this one

    return understood(argv(args["arguments"]), ray.get_runtime_context().gcs_address)


def argv(arguments: Mapping[str, Any]) -> Sequence[str]:
    """Return a config's arguments as a command line's."""
    words: list[str] = []
    for name, value in arguments.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}", str(one)]
    return words


def _serve() -> Any:
    """Return Serve's client for the cluster, None where Serve doesn't run; its public calls use the same one then."""
    context._check_cached_client_alive()  # forgets a Serve that another process has shut down
    return context._get_global_client(raise_if_no_controller_running=False)


def _listens_at(client: Any) -> tuple[str, int] | None:
    """Return the host and port of Serve's proxy, None where Serve runs without HTTP."""
    if client.get_serve_details()["proxy_location"] == ProxyLocation.Disabled:
        return None
    return client.http_config.host, client.http_config.port


def _taken(found: tuple[str, int] | None, wanted: tuple[str, int], applications: Sequence[str]) -> str:
    """Return why a service can't be at the wanted host and port, and what to do."""
    does = "runs without HTTP, as wan-tpu pipeline up starts it," if found is None else "listens at {} port {}"
    remedy = ", and have wan-tpu serve bring it up" if found is None else ", or ask for --host {} --port {}"
    return (
        f"Ray Serve of this cluster {does.format(*found or ())} until nothing runs on it any more "
        f"({', '.join(applications)}), so no service can be at {wanted[0]} port {wanted[1]}; take down what runs "
        f"(wan-tpu serve --down, wan-tpu pipeline down){remedy.format(*found or ())}"
    )


def _wait_until_up(applications: Sequence[str], tell: Tell) -> None:
    while True:
        found = serve.status()
        states = {name: found.applications[name] for name in applications if name in found.applications}
        failed = [state for state in states.values() if state.status == ApplicationStatus.DEPLOY_FAILED]
        if failed:
            raise ServiceStartFailed(f"the service can't be started: {failed[0].message}")
        proxies = found.proxies.values()
        up = len(states) == len(applications) and all(s.status == ApplicationStatus.RUNNING for s in states.values())
        if up and proxies and all(proxy == ProxyStatus.HEALTHY for proxy in proxies):
            return
        tell("starting the service: " + ", ".join(f"{name} {state.status.value}" for name, state in states.items()))
        time.sleep(POLL_S)
