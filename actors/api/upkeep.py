"""What has to be done now and then, by whichever worker gets to it: all of it is safe to be done by several at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from actors.api.logs import told
from actors.api.metrics import Meters
from actors.api.webhook import Webhooks
from actors.jobs.errors import JobNotFound
from actors.jobs.notices import Notices
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.values import is_id
from actors.jobs.work import WorkQueue
from actors.snapshots import Snapshots
from wan_tpu.errors import WanTpuError

log = logging.getLogger(__name__)

QUEUE_S = 2.0  # between two looks for deadlines that passed, and for workers that are silent
_TELL_S = 5.0
_SWEEP_S = 30.0
_WEBHOOKS_S = 1.0
_ORPHANS_S = 3600.0


class Orphans:
    """Snapshots of jobs that nobody will go on with: deleted, or ended while no worker had them."""

    def __init__(self, store: JobStore, snapshots: Snapshots) -> None:
        self._store, self._snapshots = store, snapshots

    def remove(self) -> int:
        """Remove them; return of how many jobs. Snapshots of batches, which have other ids, stay."""
        removed = 0
        for job in filter(is_id, self._snapshots.ids()):
            try:
                needed = not self._store.get(job).ended
            except JobNotFound:
                needed = False
            if not needed:
                self._snapshots.delete(job)
                removed += 1
        return removed


async def upkeep(
    name: str,
    queue: WorkQueue,
    retention: Retention,
    notices: Notices,
    meters: Meters,
    webhooks: Webhooks | None = None,
    orphans: Orphans | None = None,
) -> None:
    """Keep queue, storage and figures in order under a worker's name, until this is cancelled."""

    async def look_after_queue() -> None:
        for job in await asyncio.to_thread(queue.take_back):
            told(log, "taken back", logging.WARNING, job=job)
        for job in await asyncio.to_thread(queue.stop_overdue):
            told(log, "deadline", job=job)

    async def sweep() -> None:
        jobs, files = await asyncio.to_thread(retention.sweep)
        if jobs or files:
            told(log, "removed", jobs=jobs, files=files)

    async def tell() -> None:
        await asyncio.to_thread(notices.tell, name, "worker", meters.text())

    async def call_webhooks() -> None:
        if webhooks is not None:
            await webhooks.call_due()

    async def remove_orphans() -> None:
        if orphans is not None and (removed := await asyncio.to_thread(orphans.remove)):
            told(log, "snapshots removed", jobs=removed)

    try:
        async with asyncio.TaskGroup() as tasks:
            for work, every_s in (
                (look_after_queue, QUEUE_S),
                (sweep, _SWEEP_S),
                (tell, _TELL_S),
                (call_webhooks, _WEBHOOKS_S),
                (remove_orphans, _ORPHANS_S),
            ):
                tasks.create_task(_repeat(work, every_s))
    finally:
        try:
            notices.remove(name)
        except WanTpuError as error:
            told(log, "notice stays", logging.WARNING, reason=str(error))


async def _repeat(work: Callable[[], Awaitable[None]], every_s: float) -> None:
    while True:
        try:
            await work()
        except WanTpuError as error:  # the database or the storage: they come back
            told(log, "upkeep", logging.WARNING, reason=str(error))
        except Exception:
            log.exception("upkeep")
        await asyncio.sleep(every_s)
