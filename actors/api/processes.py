"""The service's processes as Serve deployments: ingresses that answer HTTP, and a worker that runs jobs.

The worker is a separate application. An ingress that dies, or is replaced by a newer one, loses no job, and a worker
that dies loses no connection. Each is upgraded on its own, and only the database connects them.

Whoever deploys them imports this module as well. So what only the processes need is imported in them.
"""

import asyncio
import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ray import serve

from actors.api.settings import ServiceSettings
from actors.observe.logs import log_as_json, log_event
from actors.observe.status_actor import ReportedStatus, StatusActor
from actors.pipeline.pools import NO_HTTP
from actors.pipeline_spec import PipelineSpec
from actors.reliability import build_environment
from cluster.footprints import WORKER, Footprint
from cluster.gang.placement import select_off_hosts
from wan_tpu.spec import ModelSpec

if TYPE_CHECKING:
    from fastapi import FastAPI

    from actors.api.core.service import Service
    from actors.api.http.admin import SlicesReader
    from actors.api.predictions import PredictedPool

log = logging.getLogger(__name__)

REQUESTS = 2000  # Concurrent requests of an ingress. Most of them follow the events of a job, and cost nothing.
_PARTING_S = 2.0  # Pause between the end of a worker's jobs and its own, in which it tells its slices to stop.
_THREADS = 32  # Serve's default of five could all be blocked by slow reads of storage.
# Serve would log two lines per request, in its proxy and in the replica, which cost more than the answer to a poll.
QUIET = {"log_level": "WARNING", "enable_access_log": False}
# An ingress blocks only in threads, so its event loop needs none of its own, which saves a poll four thread switches.
_ONE_THREAD = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1"}
HEAD = "node:__internal_head__"  # A resource that Ray gives to the head node only.


@serve.ingress()
class Ingress:
    """Answers HTTP."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: ServiceSettings, spec: ModelSpec, pipeline: str, pools: "tuple[PredictedPool, ...]"
    ) -> None:
        """Open the database and the storage. `/admin` shows the slices of the `pipeline` of this name, and `pools`."""
        from actors.api.core.service import Service

        os.umask(0o077)  # Keeps prompts and videos from other users of the machine.
        log_as_json()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
        self._pipeline, self._pools = pipeline, pools
        self._service = await asyncio.to_thread(Service, settings, spec)

    def __serve_build_asgi_app__(self) -> "FastAPI":
        """Return what Serve runs."""
        return make_served_app(self._service, functools.partial(_read_slices, self._pipeline), self._pools)


def make_served_app(
    service: "Service", read_slices: "SlicesReader" = lambda: None, pools: "tuple[PredictedPool, ...]" = ()
) -> "FastAPI":
    from actors.api.http.app import make_app
    from actors.api.http.middleware import OneRequestId

    app = make_app(service, read_slices, pools)
    app.add_middleware(OneRequestId)
    return app


def _read_slices(pipeline: str) -> ReportedStatus | None:
    """Return what a pipeline's replicas report, or None while that can't be read."""
    actor = StatusActor.find(pipeline)
    return None if actor is None else actor.read_or_none()


class ServiceWorker:
    async def __init__(self, settings: ServiceSettings, spec: PipelineSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        """Open the database and the storage, and start working."""
        from actors.api.worker.context import WorkerContext
        from actors.api.worker.job_worker import JobWorker
        from actors.api.worker.traces import Traces
        from actors.jobs.check_ins import make_process_name
        from actors.pipeline.client import PipelineClient
        from actors.slices.snapshots import Snapshots

        os.umask(0o077)
        log_as_json()
        self._name, self._pipeline = make_process_name("worker"), PipelineClient(spec)
        self._traces = Traces.from_environment()
        snapshots, pictures = Snapshots(spec.settings.snapshots), spec.settings.chips != "simulated"
        tools = await asyncio.to_thread(
            WorkerContext, settings, self._pipeline, snapshots, traces=self._traces, pictures=pictures
        )
        self._work = asyncio.create_task(JobWorker(self._name, tools).run())
        log_event(log, "worker", worker=self._name)

    async def check_health(self) -> None:
        """Raise if the work has ended, which it never should. Serve then starts another worker."""
        if self._work.done():
            self._work.result()
            raise RuntimeError("the worker has stopped working")

    async def __del__(self) -> None:
        log_event(log, "worker ends", worker=self._name)
        self._work.cancel()
        await asyncio.wait([self._work])
        await asyncio.sleep(_PARTING_S)
        self._pipeline.close()
        if self._traces is not None:
            self._traces.close()


def make_ingress(settings: ServiceSettings, spec: PipelineSpec, *, replicas: int = 1) -> Any:
    from actors.api.predictions import predict

    deployment = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=REQUESTS,
        max_surge_percent=100,  # The next version answers before this one ends.
        **_make_options(settings, settings.limits.ingress, _ONE_THREAD),
    )
    return deployment(Ingress).bind(settings, spec.model, spec.settings.name, predict(spec))


def make_worker(settings: ServiceSettings, spec: PipelineSpec) -> Any:
    """Return the application that runs jobs. One worker is enough, since slices are the bottleneck."""
    options = _make_options(settings, WORKER, NO_HTTP)
    return serve.deployment(num_replicas=1, **options)(ServiceWorker).bind(settings, spec)


def list_application_names(pipeline: str) -> tuple[str, str]:
    """Return the names of the two applications, ingress and worker."""
    return f"{pipeline}-http", f"{pipeline}-worker"


def _make_options(settings: ServiceSettings, footprint: Footprint, variables: dict[str, str]) -> dict[str, Any]:
    actor: dict[str, Any] = {
        **footprint.build_ray_options(),
        "label_selector": select_off_hosts(),
        "runtime_env": {"env_vars": variables | build_environment(settings.reliability)},
    }
    if "://" not in settings.database or "://" not in settings.storage or settings.webhook_secret_file is not None:
        actor["resources"] = {HEAD: 0.001}  # Files exist on one machine.
    return {
        "ray_actor_options": actor,
        "logging_config": QUIET,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_timeout_s": settings.reliability.shutdown_s,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
