"""What an ingress process opens once, and how it looks at jobs."""

import asyncio
import functools
import logging
from collections.abc import Mapping

from actors.api.core.access import REFRESH_S, Access
from actors.api.core.following import EstimatedJob, Streams, follow_jobs, follow_watched
from actors.api.core.intake import Intake
from actors.api.core.presence import Presence
from actors.api.estimates import Estimator
from actors.api.fair_semaphore import Work
from actors.api.settings import ServiceSettings
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore, open_database
from actors.jobs.tables import Job
from actors.jobs.usage import StoredBytes
from actors.jobs.watching import find_unchanged, look_at_watched
from actors.observe.logs import log_event, repeat
from wan_tpu.errors import WanTpuError
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.opening import open_storage

log = logging.getLogger(__name__)

_WORKERS = 2  # Threads for work that takes processor time, such as planning a request.


class Service:
    """Everything that an ingress process opens once. `look` and `look_at_all` block on the database."""

    def __init__(self, settings: ServiceSettings, spec: ModelSpec) -> None:
        """Open everything; raises `InvalidInput` if something can't be used."""
        self.settings, self.spec = settings, spec
        self.database = open_database(settings.database)
        self.store = JobStore(self.database, settings.jobs)
        self.storage = open_storage(settings.storage)
        self.stored = StoredBytes(self.database)
        self.access = Access(self.database, settings.queue_limit, settings.limits)
        self.forecast = Estimator(self.store, settings.concurrency, settings.model)
        self.work = Work(_WORKERS)
        retention = Retention(self.database, self.storage, settings.jobs)
        self.intake = Intake(settings, spec, self.store, self.storage, retention, self.access, self.forecast, self.work)
        self.streams = Streams(settings.limits.followers)
        self.following = follow_jobs(self.look_at_all, self.access)
        self.watching = follow_watched(functools.partial(look_at_watched, self.database), self.access)
        self.presence = Presence(settings, self.database, self.store, self.storage)

    def look(self, job: str, owner: str | None) -> EstimatedJob:
        """Return a job with an estimate of its end; raises `JobNotFound`."""
        job_now = self.store.look(job, owner)
        return job_now, self.forecast.estimate_eta_s(job_now)

    def look_at_all(self, seen: Mapping[str, EstimatedJob]) -> dict[str, EstimatedJob]:
        """Return jobs that were seen as they are now, except those that don't exist. Only changed ones are read."""
        unchanged = find_unchanged(self.database, {id_: job for id_, (job, _) in seen.items()})
        changed = self.store.look_at_all(seen.keys() - unchanged)
        return {id_: seen[id_] for id_ in unchanged} | {
            job.id: (job, self.forecast.estimate_eta_s(job)) for job in changed
        }

    async def look_at_accepted(self, job: Job) -> EstimatedJob:
        """Return an accepted job's current state. Errors are suppressed, since the job has been accepted anyway."""
        try:
            return await asyncio.to_thread(self.look, job.id, job.owner)
        except WanTpuError as error:
            log_event(log, "not looked at", logging.WARNING, job=job.id, reason=str(error))
            return job, None

    async def stay_current(self) -> None:
        """Check this process in with its metrics, and keep the keys up to date, until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for work, every_s in (
                (self.presence.check_in, self.settings.reliability.check_in_s),
                (self.access.refresh, REFRESH_S),
            ):
                in_thread = functools.partial(asyncio.to_thread, work)
                tasks.create_task(repeat(log, "check-in and keys", in_thread, every_s))
