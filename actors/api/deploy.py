"""Start a service on a cluster, and take it down."""

import logging
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation

from actors.api.processes import HEAD, QUIET, list_application_names, make_ingress, make_worker
from actors.api.settings import ServiceSettings
from actors.errors import PipelineError, PipelineExists
from actors.pipeline.pools import POLL_S, OnStatus, deploy, find_spec, list_applications, shut_down
from actors.pipeline_spec import PipelineSpec
from actors.reliability import ReliabilitySettings
from cluster.connect import is_loopback
from cluster.ports import check_port
from cluster.ray_private import serve_client
from wan_tpu.errors import InvalidInput
from wan_tpu.storage.opening import open_storage

log = logging.getLogger(__name__)

_ANSWERS_S = 60.0  # How long the first answer over HTTP may take.


class ServiceStartFailed(PipelineError):
    """The service can't be started, for the reason in the message."""


def start_http(host: str, port: int) -> None:
    """Make Ray Serve listen at an address, with a proxy on the head node, before any application is deployed.

    A running Serve can't change its address, so one that listens elsewhere, or nowhere, is shut down and started again.

    Raises:
        ServiceStartFailed: Such a Serve runs applications.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    client = serve_client()
    if client is not None and _read_address(client) != (host, port) and not serve.status().applications:
        serve.shutdown()
    serve.start(
        proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host=host, port=port), logging_config=QUIET
    )
    if (address := _read_address(serve_client())) == (host, port):
        return
    # Serve runs applications, or another process has started it at the same moment.
    problem, remedy = "runs without HTTP, as wan-tpu pipeline up starts it,", "and have wan-tpu serve bring it up"
    if address is not None:
        at, port_at = address
        problem, remedy = f"listens at {at} port {port_at}", f"or ask for --host {at} --port {port_at}"
    raise ServiceStartFailed(
        f"Ray Serve on this cluster {problem} until it runs no more applications "
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
    on_status: OnStatus = lambda text: None,
) -> None:
    """Start or update pipeline, worker and ingress, and return when the service answers.

    After an error, nothing that this has started keeps running.

    Args:
        on_status: Called with a line of text about each step.

    Raises:
        InvalidInput: Database or secret can't be used, or the host is public and there are no keys.
        PortTaken: Another program has the port. Nothing was started.
        StorageError: The storage can't be used.
        PipelineStartFailed: The pipeline can't be started.
        PipelineExists: A different pipeline with the same name is running.
        ServiceStartFailed: The service's own processes can't be started, or don't answer.
    """
    # If Serve already listens there, what runs is updated, and the port needn't be free.
    new_port = None if (client := serve_client()) is not None and _read_address(client) == (host, port) else port
    if not prepare_on_head(settings, host, new_port):
        log.warning(
            "nothing limits what clients send: put a proxy with limits in front, or on Linux start Ray's nodes with "
            "RAY_SERVE_ENABLE_HA_PROXY=1 and RAY_SERVE_HAPROXY_BINARY_PATH, the path of the command wan-tpu-haproxy"
        )
    if not is_loopback(f"{host}:0"):
        log.warning(
            "the ingresses listen on %s as well, on ports of their own (30000 to 31000 unless set otherwise): they "
            "require API keys, but HAProxy's limits don't apply there. Let a firewall or a NetworkPolicy admit only "
            "port %d",
            host,
            port,
        )
    start_http(host, port)
    name = spec.settings.name
    before = set(serve.status().applications)
    ours = not list_applications(name)
    if ours:
        deploy(spec, on_status=on_status)
    elif (running := find_spec(name)) is None or not running.is_same_as(spec):
        raise PipelineExists(
            f"another pipeline {name!r} runs on this cluster, with another layout, model or settings; take it down "
            "(wan-tpu serve --down), or choose another --name"
        )
    try:
        on_status("starting the service")
        ingress, worker = list_application_names(name)
        answers = make_ingress(settings, spec, replicas=ingresses)
        try:
            serve.run_many(
                [
                    serve.RunTarget(make_worker(settings, spec), name=worker, route_prefix=None),
                    serve.RunTarget(answers, name=ingress, route_prefix="/"),
                ]
            )
        except (RuntimeError, TimeoutError) as error:  # From Serve, if an application or its proxy doesn't start.
            raise ServiceStartFailed(f"the service can't be started: {error}") from None
        _wait_until_answers(host, port)
    except BaseException:
        if not before & set(list_application_names(name)):
            take_down(name, pipeline=ours, drain_s=0)
        raise


def prepare_on_head(settings: ServiceSettings, host: str, new_port: int | None = None) -> bool:
    """Run `prepare` on the head node, where ingress and worker will run if they use files of one machine.

    Args:
        new_port: The port that Serve is to listen on; None if it listens already.

    Returns:
        Whether the proxy on that node limits what clients send.

    Raises:
        InvalidInput: As from `prepare`.
        PortTaken: Another program has the port.
    """

    def prepare_here() -> bool:
        if new_port is not None:
            check_port(host, new_port)
        prepare(settings, host)
        return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and "RAY_SERVE_HAPROXY_BINARY_PATH" in os.environ

    there: Any = ray.remote(prepare_here).options(num_cpus=0, resources={HEAD: 0.001})
    try:
        return bool(ray.get(there.remote()))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def prepare(settings: ServiceSettings, host: str) -> None:
    """Check that database, storage and secret can be used from here, and create what is missing.

    Raises:
        InvalidInput: One of them can't be used, or the host admits other machines and there are no API keys.
    """
    from actors.api.outbound.webhook import read_secret
    from actors.jobs.keys import list_keys
    from actors.jobs.store import open_database

    os.umask(0o077)
    database = open_database(settings.database)
    if not is_loopback(f"{host}:0") and not list_keys(database):
        raise InvalidInput(
            f"--host {host} admits other machines, but {database} has no API keys; create one (wan-tpu keys "
            "add NAME --database ...), or listen on 127.0.0.1"
        )
    database.close()
    storage = open_storage(settings.storage)
    storage.probe()
    if settings.url_s is not None and storage.url("probe", settings.url_s, "probe") is None:
        raise InvalidInput(
            f"--download_s has no effect on {settings.storage}, whose URLs can't be signed; use a bucket as "
            "--storage, and run this as a service account that may sign for itself "
            "(roles/iam.serviceAccountTokenCreator)"
        )
    if settings.webhook_secret_file is not None:
        read_secret(Path(settings.webhook_secret_file), make=True)


def take_down(name: str, *, pipeline: bool = True, drain_s: float = ReliabilitySettings.shutdown_s) -> None:
    """Stop ingress and worker, and the pipeline if wanted. Jobs wait in the database for the next worker."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve_client()
    for application in sorted(set(list_application_names(name)) & set(serve.status().applications)):
        serve.delete(application)
    if pipeline and list_applications(name):
        shut_down(name, drain_s=drain_s)


def _wait_until_answers(host: str, port: int) -> None:
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{near}]' if ':' in near else near}:{port}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # Ignores http_proxy.
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
        f"nothing answers at {address} ({reason}); is the port taken, or does Ray Serve on this cluster already "
        "listen on another one?"
    )


def _read_address(client: Any) -> tuple[str, int] | None:
    """Return the host and port of Serve's proxy, or None if Serve runs without HTTP."""
    if client.get_serve_details()["proxy_location"] == ProxyLocation.Disabled:
        return None
    return client.http_config.host, client.http_config.port
