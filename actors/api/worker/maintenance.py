"""Maintenance that every worker does. Several workers may do it at the same time."""

import asyncio
import functools
import logging

from actors.api.worker.context import WorkerContext
from actors.jobs.check_ins import check_in, check_out
from actors.jobs.store import JobStore
from actors.jobs.tables import CheckIn
from actors.jobs.values import is_id
from actors.observe.logs import log_event, repeat
from actors.slices.snapshots import PARTIAL_S, Snapshots
from wan_tpu.errors import WanTpuError

log = logging.getLogger(__name__)

_SWEEP_S = 30.0
_WEBHOOKS_S = 1.0
_ORPHANS_S = 600.0


async def maintain(name: str, context: WorkerContext) -> None:
    """Maintain queue and storage, and check a worker in, until this is cancelled."""
    limits = context.settings.reliability

    def check_queue() -> None:
        for job in context.queue.requeue_lost():
            log_event(log, "taken back", logging.WARNING, job=job)
        for job in context.queue.stop_overdue():
            log_event(log, "deadline", job=job)

    def sweep() -> None:
        jobs, files = context.retention.sweep()
        if jobs or files:
            log_event(log, "removed", jobs=jobs, files=files)

    def report() -> None:
        check_in(context.database, CheckIn(name=name, kind="worker", metrics=context.meters.format_text()))

    def clean_up() -> None:
        if removed := remove_orphans(context.store, context.snapshots):
            log_event(log, "snapshots removed", jobs=removed)
        context.snapshots.clean()
        context.storage.clean(PARTIAL_S)

    try:
        async with asyncio.TaskGroup() as tasks:
            for work, every_s in (
                (check_queue, limits.queue_check_s),
                (sweep, _SWEEP_S),
                (report, limits.check_in_s),
                (clean_up, _ORPHANS_S),
            ):
                tasks.create_task(repeat(log, "maintenance", functools.partial(asyncio.to_thread, work), every_s))
            if context.webhooks is not None:
                tasks.create_task(repeat(log, "maintenance", context.webhooks.call_due, _WEBHOOKS_S))
    finally:
        try:
            await asyncio.to_thread(check_out, context.database, name)
        except WanTpuError as error:
            log_event(log, "check-in stays", logging.WARNING, reason=str(error))


def remove_orphans(store: JobStore, snapshots: Snapshots) -> int:
    """Remove snapshots of jobs that ended without a video or were deleted; return the number of such jobs.

    Snapshots of batches, which have other ids, stay.
    """
    if not (ids := set(filter(is_id, snapshots.list_stems()))):
        return 0
    orphans = ids - {job.id for job in store.look_at_all(ids) if not job.has_ended}
    for job in orphans:
        snapshots.delete_all_of(job)
    return len(orphans)
