"""Bring a service up on a cluster, and take it down."""

import logging
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation

from actors.api.outbound.webhook import read_secret
from actors.api.processes import DRAIN_S, HEAD, QUIET, ingress_application, names, worker_application
from actors.api.settings import ServiceSettings
from actors.errors import PipelineError, PipelineExists
from actors.jobs.keys import list_keys
from actors.jobs.store import open_database
from actors.pipeline.pools import POLL_S, Tell, deploy, find_spec, list_applications, shut_down
from actors.pipeline_spec import PipelineSpec
from cluster.connect import is_loopback
from cluster.ports import check_port
from cluster.provision import haproxy
from cluster.ray_private import serve_client
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.opening import open_storage

log = logging.getLogger(__name__)

_ANSWERS_S = 60.0  # until the first answer over HTTP


class ServiceStartFailed(PipelineError):
    """The service can't be started; the message says why."""


def start_http(host: str, port: int) -> None:
    """Have Ray Serve listen there, with a proxy on the head node; before any application.

    A Serve that listens elsewhere, or nowhere, keeps to that for as long as it runs: it is shut down where it has no
    application. Raises `ServiceStartFailed` where it has one.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    client = serve_client()
    if client is not None and _listens_at(client) != (host, port) and not serve.status().applications:
        serve.shutdown()
    serve.start(
        proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host=host, port=port), logging_config=QUIET
    )
    if (found := _listens_at(serve_client())) == (host, port):
        return
    # Something runs there, or another process has started it at the same moment.
    does, remedy = "runs without HTTP, as wan-tpu pipeline up starts it,", "and have wan-tpu serve bring it up"
    if found is not None:
        does, remedy = f"listens at {found[0]} port {found[1]}", f"or ask for --host {found[0]} --port {found[1]}"
    raise ServiceStartFailed(
        f"Ray Serve of this cluster {does} until nothing runs on it any more "
        f"({', '.join(sorted(serve.status().applications))}), so no service can be at {host} port {port}; take down "
        f"what runs (wan-tpu serve --down, wan-tpu pipeline down), {remedy}"
    )


def deploy_service(
    settings: ServiceSettings,
    spec: PipelineSpec,
    *,
    host: str,
    port: int,
    ingresses: int = 1,
    tell: Tell = lambda text: None,
) -> None:
    """Start pipeline, worker and ingress, and return when the service answers. What runs already is updated.

    Raises `InvalidInput` where database or secret can't be used, or the host is public and there are no keys;
    `PortTaken` before anything is started; `StorageError`, `PipelineStartFailed`, `PipelineExists`,
    `ServiceStartFailed`. Nothing that this has started is left then.
    """
    # Where Serve listens there already, what runs is updated.
    new_port = None if (client := serve_client()) is not None and _listens_at(client) == (host, port) else port
    if not prepare_on_head(settings, host, new_port):
        log.warning(
            "Serve's own proxy runs on this cluster, and nothing bounds what its clients send: start Ray's nodes with "
            "RAY_SERVE_ENABLE_HA_PROXY=1, or RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=%s",
            haproxy.INSTEAD,
        )
    if not is_loopback(f"{host}:0"):
        log.warning(
            "the ingresses listen on %s as well, on ports of their own (30000 to 31000 unless set otherwise): keys are "
            "asked for there, but HAProxy's limits don't hold. Let a firewall or a NetworkPolicy pass port %d alone",
            host,
            port,
        )
    start_http(host, port)
    name = spec.settings.name
    before = set(serve.status().applications)
    ours = not list_applications(name)
    if ours:
        deploy(spec, tell=tell)
    elif (found := find_spec(name)) is None or not found.same_as(spec):
        raise PipelineExists(
            f"another pipeline {name!r} runs on this cluster, with another layout, model or settings; take it down "
            "(wan-tpu serve --down), or choose another --name"
        )
    try:
        tell("starting the service")
        ingress, worker = names(name)
        answers = ingress_application(settings, spec, replicas=ingresses)
        try:
            serve.run_many(
                [
                    serve.RunTarget(worker_application(settings, spec), name=worker, route_prefix=None),
                    serve.RunTarget(answers, name=ingress, route_prefix="/"),
                ]
            )
        except (RuntimeError, TimeoutError) as error:  # Serve's: an application, or its proxy, doesn't come up
            raise ServiceStartFailed(f"the service can't be started: {error}") from None
        _wait_until_answers(host, port)
    except BaseException:
        if not before & set(names(name)):
            take_down(name, pipeline=ours, drain_s=0)
        raise


def prepare_on_head(settings: ServiceSettings, host: str, new_port: int | None = None) -> bool:
    """Prepare what is of one machine on the head node, where ingress and worker will find it; raises as `prepare`.

    new_port  that Serve is to listen on, unless it does; raises `PortTaken` where it can't

    Returns whether something bounds what clients send there.
    """

    def prepared() -> bool:
        if new_port is not None:
            check_port(host, new_port)
        prepare(settings, host)
        asked = os.environ.get
        return asked("RAY_SERVE_ENABLE_HA_PROXY") == "1" or bool(asked("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"))

    there: Any = ray.remote(prepared).options(num_cpus=0, resources={HEAD: 0.001})
    try:
        return bool(ray.get(there.remote()))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def prepare(settings: ServiceSettings, host: str) -> None:
    """See that database, storage and secret can be used from here; make them where they are missing.

    Raises `InvalidInput` where one can't be, or the host lets others than this machine in and there are no API keys.
    """
    os.umask(0o077)
    database = open_database(settings.database)
    if not is_loopback(f"{host}:0") and not list_keys(database):
        raise InvalidInput(
            f"--host {host} lets others than this machine in, and {database} has no API keys; make one (wan-tpu keys "
            "add NAME --database ...), or listen on 127.0.0.1"
        )
    database.close()
    storage = open_storage(settings.storage)
    storage.probe()
    if settings.url_s is not None and storage.url("probe", settings.url_s, "probe") is None:
        raise InvalidInput(
            f"--download_s: nothing signs URLs of {settings.storage}; keep results in a bucket, and run this as a "
            "service account that may sign for itself (roles/iam.serviceAccountTokenCreator)"
        )
    if settings.webhook_secret_file is not None:
        read_secret(Path(settings.webhook_secret_file), make=True)


def take_down(name: str, *, pipeline: bool = True, drain_s: float = DRAIN_S) -> None:
    """End ingress and worker, whose jobs wait for the next one; and the pipeline, if wanted."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve_client()
    for found in sorted(set(names(name)) & set(serve.status().applications)):
        serve.delete(found)
    if pipeline and list_applications(name):
        shut_down(name, drain_s=drain_s)


def _wait_until_answers(host: str, port: int) -> None:
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{near}]' if ':' in near else near}:{port}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy says
    until, reason = time.monotonic() + _ANSWERS_S, ""
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


def _listens_at(client: Any) -> tuple[str, int] | None:
    """Return the host and port of Serve's proxy, None where Serve runs without HTTP."""
    if client.get_serve_details()["proxy_location"] == ProxyLocation.Disabled:
        return None
    return client.http_config.host, client.http_config.port
