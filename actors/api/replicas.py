"""The service's processes as Serve deployments: ingresses that answer HTTP, and a worker that has videos made.

The worker is an application of its own. An ingress that dies, or is replaced by a newer one, takes no job with it, and
a worker that dies takes no connection; each is upgraded alone. Between them is only the database.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve

from actors.api.app import make_app
from actors.api.attempt import Tools, WorkerSettings
from actors.api.engine import LastingPipeline, RememberingPlanner
from actors.api.logs import log_as_json, told
from actors.api.metrics import Meters
from actors.api.previews import previews
from actors.api.progress import Pace
from actors.api.service import Service, process_name, webhook_fetching
from actors.api.settings import ServiceSettings
from actors.api.traces import Traces
from actors.api.upkeep import Orphans, upkeep
from actors.api.webhook import Webhooks, read_secret
from actors.api.worker import Worker
from actors.jobs.deliveries import Deliveries
from actors.jobs.notices import Notices
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore, open_database
from actors.jobs.work import WorkQueue
from actors.pools import NO_HTTP
from actors.settings import About
from actors.snapshots import Snapshots
from actors.storage import open_storage
from cluster.placement import off_hosts

log = logging.getLogger(__name__)

REQUESTS = 2000  # at an ingress at a time: most of them follow the events of a job, and cost nothing
DRAIN_S = 30.0  # that an ingress which is replaced may go on answering, and a worker may take to give its jobs back
_RECENT = 20
_PARTING_S = 2.0  # between the end of a worker's jobs and its own: what they had running is told to stop meanwhile
# Of Serve itself: two lines a request, of its proxy and of the replica, cost more than the answer to a poll.
QUIET = {"log_level": "WARNING", "enable_access_log": False}
# An ingress waits for nothing but in threads, so that it needs none of its own: a poll changes threads four times less.
_ONE_THREAD = {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1"}}
_HEAD = "node:__internal_head__"  # a resource that Ray gives the head node alone


@serve.ingress()
class Ingress:
    """Answers HTTP."""

    async def __init__(self, settings: ServiceSettings, about: About) -> None:  # type: ignore[misc]  # Serve awaits it
        """Open the database and the storage; the pipeline is asked when there is something to ask."""
        log_as_json()
        self._pipeline = LastingPipeline(about)
        database = await asyncio.to_thread(open_database, settings.database)
        planner = RememberingPlanner(self._pipeline, Notices(database))
        self._learning = asyncio.create_task(planner.learn())
        self._service = await asyncio.to_thread(Service, settings, planner)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return what Serve runs."""
        return make_app(self._service)

    async def __del__(self) -> None:
        self._learning.cancel()
        self._pipeline.close()


class ServiceWorker:
    """Has videos made."""

    async def __init__(self, settings: ServiceSettings, about: About) -> None:  # type: ignore[misc]  # Serve awaits it
        """Open the database and the storage, and begin to work."""
        log_as_json()
        self._name = process_name("worker")
        self._pipeline, self._traces = LastingPipeline(about), Traces.from_environment()
        self._database = database = await asyncio.to_thread(open_database, settings.database)
        storage, meters = open_storage(settings.storage), Meters()
        store, snapshots = JobStore(database), Snapshots(about.settings.snapshots)
        queue = WorkQueue(database, settings.leases, settings.keeping)
        recent = await asyncio.to_thread(store.recent, _RECENT)
        tools = Tools(
            queue=queue,
            storage=storage,
            engine=self._pipeline,
            settings=WorkerSettings(concurrency=settings.concurrency, chips=settings.chips),
            pace=Pace(recent),
            meters=meters,
            traces=self._traces,
            ready=self._pipeline.ready,
            # A simulated video is no mp4.
            make_previews=previews if about.settings.chips != "simulated" else lambda mp4, **size: {},
            forget=snapshots.delete,
        )
        self._worker = Worker(self._name, tools)
        webhooks = None
        if settings.webhook_secret_file is not None:
            secret = read_secret(Path(settings.webhook_secret_file))
            webhooks = Webhooks(Deliveries(database), secret, webhook_fetching(settings), meters)
        retention = Retention(database, storage, settings.keeping)
        self._tasks = [
            asyncio.create_task(self._worker.run()),
            asyncio.create_task(
                upkeep(self._name, queue, retention, Notices(database), meters, webhooks, Orphans(store, snapshots))
            ),
        ]
        told(log, "worker", worker=self._name)

    async def check_health(self) -> None:
        """Raise when the work has ended, which it never should: Serve then starts another worker."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("the worker has stopped working")

    async def __del__(self) -> None:
        told(log, "worker leaves", worker=self._name)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await asyncio.sleep(_PARTING_S)
        self._pipeline.close()
        if self._traces is not None:
            self._traces.close()


def ingress_application(settings: ServiceSettings, about: About, *, replicas: int = 1) -> Any:
    """Return the application that answers HTTP."""
    options: dict[str, Any] = {"max_ongoing_requests": REQUESTS, "num_replicas": replicas}
    options["max_surge_percent"] = 100  # the next version answers before this one goes
    options |= _options(settings)
    options["ray_actor_options"]["runtime_env"] = _ONE_THREAD
    return serve.deployment(**options)(Ingress).bind(settings, about)


def worker_application(settings: ServiceSettings, about: About) -> Any:
    """Return the application that has videos made: one worker, since what limits it are slices."""
    options = _options(settings)
    options["ray_actor_options"]["runtime_env"] = NO_HTTP
    return serve.deployment(num_replicas=1, **options)(ServiceWorker).bind(settings, about)


def names(pipeline: str) -> tuple[str, str]:
    """Return the names of the two applications, ingress and worker."""
    return f"{pipeline}-http", f"{pipeline}-worker"


def _options(settings: ServiceSettings) -> dict[str, Any]:
    actor: dict[str, Any] = {"num_cpus": 0.1, "label_selector": off_hosts()}
    if "://" not in settings.database or "://" not in settings.storage:
        actor["resources"] = {_HEAD: 0.001}  # files are of one machine
    return {
        "ray_actor_options": actor,
        "logging_config": QUIET,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_timeout_s": DRAIN_S,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
