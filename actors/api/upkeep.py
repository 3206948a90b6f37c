"""What has to be done now and then, by whichever worker gets to it: all of it is safe to be done by several at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from actors.api.logs import told
from actors.api.metrics import Meters
from actors.api.webhook import Webhooks
from actors.jobs.notices import Notices
from actors.jobs.retention import Retention
from actors.jobs.work import WorkQueue
from wan_tpu.errors import WanTpuError

log = logging.getLogger(__name__)

QUEUE_S = 2.0  # between two looks for deadlines that passed, and for workers that are silent
_TELL_S = 5.0
_SWEEP_S = 30.0
_WEBHOOKS_S = 1.0


async def upkeep(
    name: str,
    queue: WorkQueue,
    retention: Retention,
    notices: Notices,
    meters: Meters,
    webhooks: Webhooks | None,
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

    try:
        async with asyncio.TaskGroup() as tasks:
            for work, every_s in (
                (look_after_queue, QUEUE_S),
                (sweep, _SWEEP_S),
                (tell, _TELL_S),
                (call_webhooks, _WEBHOOKS_S),
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
