"""What a worker's process holds: the database, the storage, what makes the videos."""

from pathlib import Path
from typing import Protocol

from actors.api.estimates import Pace
from actors.api.metrics import Meters
from actors.api.outbound.webhook import Webhooks, read_secret
from actors.api.settings import ServiceSettings
from actors.api.worker.traces import Traces
from actors.engine import Engine
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore, open_database
from actors.jobs.work import WorkQueue
from actors.slices.snapshots import Snapshots
from wan_tpu.storage.opening import open_storage

_RECENT = 20  # jobs that completed before, from which is known what sizes take


class WorkerEngine(Engine, Protocol):
    """An engine that may be away for a while: `actors.pipeline.client.PipelineClient`."""

    async def check_ready(self) -> None:
        """Raise when it can't be used now; asked before the first job, and after it has failed."""


class WorkerContext:
    """Opened once in a worker's process.

    snapshots  what the engine has stored of unfinished jobs
    traces     of the jobs that end, if they are wanted
    previews   whether pictures are made of the videos: of simulated ones, which are no mp4, they can't be
    """

    def __init__(
        self,
        settings: ServiceSettings,
        engine: WorkerEngine,
        snapshots: Snapshots,
        *,
        traces: Traces | None = None,
        previews: bool = True,
    ) -> None:
        """Open everything; raises `InvalidInput` where something can't be used."""
        self.settings, self.engine, self.snapshots = settings, engine, snapshots
        self.traces, self.previews, self.meters = traces, previews, Meters()
        self.database = open_database(settings.database)
        self.store = JobStore(self.database)
        self.storage = open_storage(settings.storage)
        self.queue = WorkQueue(self.database, settings.jobs)
        self.retention = Retention(self.database, self.storage, settings.jobs)
        self.pace = Pace(self.store.list_recent(_RECENT))
        self.webhooks: Webhooks | None = None
        if settings.webhook_secret_file is not None:
            secret = read_secret(Path(settings.webhook_secret_file))
            self.webhooks = Webhooks(self.database, secret, settings.webhooks, self.meters, settings.limits)
