"""Delete leftover snapshots: their driver recorded the video, but was killed before it could delete them."""

import logging
from collections.abc import Callable, Mapping

from actors.pipeline_spec import PipelineSettings
from actors.slices.snapshots import Snapshots, build_stem, name_of
from wan_tpu.errors import WanTpuError
from wan_tpu.plan import RequestPlan
from wan_tpu.storage.base import StorageError

log = logging.getLogger(__name__)


def delete_leftovers(
    settings: PipelineSettings, done: Callable[[], Mapping[str, Callable[[], RequestPlan] | None]]
) -> int:
    """Delete the snapshots of requests whose videos are durable.

    Snapshots of another request with the same id stay, because it may be under way. So do those that can't be read or
    deleted.

    Args:
        settings: The settings of the pipeline that the requests went through.
        done: Returns, by id of each finished request, a function that plans the request, including its images; None
            for an id that no other request can have. It is called only if there are snapshots.

    Returns:
        How many requests had snapshots.
    """
    deleted = 0
    try:
        snapshots = Snapshots(settings.snapshots)
        if not (stems := set(snapshots.list_stems())):
            return 0
        for id_, plan in done().items():
            if build_stem(id_) in stems:
                deleted += _delete(snapshots, id_, plan, settings)
    except StorageError as error:
        log.warning("left-over snapshots can't be deleted: %s", error)
    return deleted


def _delete(snapshots: Snapshots, id_: str, plan: Callable[[], RequestPlan] | None, settings: PipelineSettings) -> bool:
    if plan is None:
        snapshots.delete_all_of(id_)
        return True
    try:
        name = name_of(id_, plan().request, f"{settings.checkpoint} {settings.dtype}")
    except WanTpuError:  # An input image no longer exists, so the names of the request's snapshots can't be computed.
        return False
    deleted = False
    while (step := snapshots.find_newest(name)) is not None:
        snapshots.forget(name, step)
        deleted = True
    return deleted
