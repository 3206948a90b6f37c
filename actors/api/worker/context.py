"""What a worker's process shares: database, storage, metrics, and the engine that makes videos."""

from pathlib import Path
from typing import Protocol

from actors.api.estimates import Pace
from actors.api.metrics import Meters
from actors.api.outbound.webhook import Webhooks, read_secret
from actors.api.settings import ServiceSettings
from actors.api.worker.held_bytes import HeldBytes
from actors.api.worker.traces import Traces
from actors.engine import Engine
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore, open_database
from actors.jobs.work import WorkQueue
from actors.slices.snapshots import Snapshots
from wan_tpu.storage.opening import open_storage

_RECENT = 20  # The number of completed jobs from which a new worker learns the durations by size.


class WorkerEngine(Engine, Protocol):
    """An engine that may be unavailable for a while: `actors.pipeline.client.PipelineClient`."""

    async def check_ready(self) -> None:
        """Raise if the engine can't be used now. This is called before the first job, and after a failure."""


class WorkerContext:
    """Opened once in a worker's process.

    Attributes:
        snapshots: The snapshots of unfinished jobs that the engine has stored.
        traces: Exports traces of jobs that have ended; None if traces are off.
        held: Counts the bytes of videos that the process holds.
        pictures: Whether to make pictures of the videos. A simulated service makes none, for speed.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        engine: WorkerEngine,
        snapshots: Snapshots,
        *,
        traces: Traces | None = None,
        pictures: bool = True,
    ) -> None:
        """Open everything; raises `InvalidInput` if something can't be used."""
        self.settings, self.engine, self.snapshots = settings, engine, snapshots
        self.traces, self.pictures, self.meters = traces, pictures, Meters()
        self.database = open_database(settings.database)
        self.store = JobStore(self.database)
        self.storage = open_storage(settings.storage)
        self.held = HeldBytes()
        self.queue = WorkQueue(self.database, settings.jobs, settings.reliability)
        self.retention = Retention(self.database, self.storage, settings.jobs)
        self.pace = Pace(self.store.list_recent(_RECENT))
        self.webhooks: Webhooks | None = None
        if settings.webhook_secret_file is not None:
            secret = read_secret(Path(settings.webhook_secret_file))
            self.webhooks = Webhooks(self.database, secret, settings.webhooks, self.meters, settings.limits)
