"""Snapshots that nobody resumes: of a driver that was killed between a video's record and the end of its snapshots."""

import logging
from collections.abc import Callable, Mapping

from actors.pipeline_spec import PipelineSettings
from actors.slices.snapshots import Snapshots, name_of, stem_of
from wan_tpu.errors import WanTpuError
from wan_tpu.plan import RequestPlan
from wan_tpu.storage.base import StorageError

log = logging.getLogger(__name__)


def delete_leftovers(settings: PipelineSettings, done: Callable[[], Mapping[str, Callable[[], RequestPlan]]]) -> int:
    """Delete the snapshots of requests whose videos are durable.

    Snapshots of another request of the same id stay: it may be under way. What can't be read or deleted stays, too.

    Args:
        settings: Of the pipeline that the requests went through.
        done: Returns, by id, what plans a request that is done, its images included; called when there are snapshots.

    Returns:
        How many requests had snapshots.
    """
    deleted = 0
    try:
        snapshots = Snapshots(settings.snapshots)
        if not (stems := set(snapshots.stems())):
            return 0
        for id_, plan in done().items():
            if stem_of(id_) in stems:
                deleted += _delete(snapshots, id_, plan, settings)
    except StorageError as error:
        log.warning("left-over snapshots stay: %s", error)
    return deleted


def _delete(snapshots: Snapshots, id_: str, plan: Callable[[], RequestPlan], settings: PipelineSettings) -> bool:
    try:
        name = name_of(id_, plan().request, f"{settings.checkpoint} {settings.dtype}")
    except WanTpuError:  # an image has gone since: nobody knows whose snapshots they are
        return False
    found = False
    while (step := snapshots.newest(name)) is not None:
        snapshots.forget(name, step)
        found = True
    return found
