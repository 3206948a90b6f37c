"""The service's processes as Serve deployments: ingresses that answer HTTP, and a worker that has videos made.

The worker is an application of its own. An ingress that dies, or is replaced by a newer one, takes no job with it, and
a worker that dies takes no connection; each is upgraded alone. Between them is only the database.
"""

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI
from ray import serve

from actors.api.http.app import make_app
from actors.api.http.service import Service
from actors.api.settings import ServiceSettings
from actors.api.worker.context import WorkerContext
from actors.api.worker.job_worker import JobWorker
from actors.api.worker.traces import Traces
from actors.jobs.heartbeats import process_name
from actors.observe.logs import log_as_json, log_event
from actors.pipeline.client import PipelineClient
from actors.pipeline.pools import NO_HTTP
from actors.pipeline_spec import PipelineSpec
from actors.slices.snapshots import Snapshots
from cluster.gang.placement import off_hosts
from wan_tpu.spec import ModelSpec

log = logging.getLogger(__name__)

REQUESTS = 2000  # at an ingress at a time: most of them follow the events of a job, and cost nothing
DRAIN_S = 30.0  # that an ingress which is replaced may go on answering, and a worker may take to give its jobs back
_PARTING_S = 2.0  # between the end of a worker's jobs and its own: its slices are asked to stop meanwhile
_THREADS = 32  # of Serve's five, slow reads of storage could keep all
# Of Serve itself: two lines a request, of its proxy and of the replica, cost more than the answer to a poll.
QUIET = {"log_level": "WARNING", "enable_access_log": False}
# An ingress waits for nothing but in threads, so that it needs none of its own: a poll changes threads four times less.
_ONE_THREAD = {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1"}}
HEAD = "node:__internal_head__"  # a resource that Ray gives the head node alone


@serve.ingress()
class Ingress:
    """Answers HTTP."""

    async def __init__(self, settings: ServiceSettings, spec: ModelSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        """Open the database and the storage."""
        os.umask(0o077)  # prompts and videos are for no other user of the machine
        log_as_json()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
        self._service = await asyncio.to_thread(Service, settings, spec)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return what Serve runs."""
        return make_app(self._service)


class ServiceWorker:
    """Has videos made."""

    async def __init__(self, settings: ServiceSettings, spec: PipelineSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        """Open the database and the storage, and begin to work."""
        os.umask(0o077)
        log_as_json()
        self._name, self._pipeline = process_name("worker"), PipelineClient(spec)
        self._traces = Traces.from_environment()
        snapshots, previews = Snapshots(spec.settings.snapshots), spec.settings.chips != "simulated"
        tools = await asyncio.to_thread(
            WorkerContext, settings, self._pipeline, snapshots, traces=self._traces, previews=previews
        )
        self._work = asyncio.create_task(JobWorker(self._name, tools).run())
        log_event(log, "worker", worker=self._name)

    async def check_health(self) -> None:
        """Raise when the work has ended, which it never should: Serve then starts another worker."""
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


def ingress_application(settings: ServiceSettings, spec: PipelineSpec, *, replicas: int = 1) -> Any:
    """Return the application that answers HTTP."""
    made = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=REQUESTS,
        max_surge_percent=100,  # the next version answers before this one goes
        **_options(settings, _ONE_THREAD),
    )
    return made(Ingress).bind(settings, spec.model)


def worker_application(settings: ServiceSettings, spec: PipelineSpec) -> Any:
    """Return the application that has videos made: one worker, since what limits it are slices."""
    return serve.deployment(num_replicas=1, **_options(settings, NO_HTTP))(ServiceWorker).bind(settings, spec)


def names(pipeline: str) -> tuple[str, str]:
    """Return the names of the two applications, ingress and worker."""
    return f"{pipeline}-http", f"{pipeline}-worker"


def _options(settings: ServiceSettings, runtime_env: dict[str, Any]) -> dict[str, Any]:
    actor: dict[str, Any] = {"num_cpus": 0.1, "label_selector": off_hosts(), "runtime_env": runtime_env}
    if "://" not in settings.database or "://" not in settings.storage or settings.webhook_secret_file is not None:
        actor["resources"] = {HEAD: 0.001}  # files are of one machine
    return {
        "ray_actor_options": actor,
        "logging_config": QUIET,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_timeout_s": DRAIN_S,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
