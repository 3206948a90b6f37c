"""Decide whether a job is to blame for the error that ended an attempt at it."""

import asyncio

from actors.api.worker.thumbnails import BrokenVideo
from actors.errors import RequestFailed
from actors.jobs.values import BROKEN_VIDEO, INPUT_LOST, INTERNAL_ERROR, INVALID
from wan_tpu.errors import InvalidRequest, WanTpuError


class InputGone(Exception):
    """Storage works but doesn't have an input of the job, so another attempt wouldn't find it either."""

    def __init__(self) -> None:
        super().__init__("an image or a video that it uses is no longer in storage; send the request again")


def blame(error: BaseException) -> tuple[str | None, str]:
    """Return the error code if the job is to blame, or None if it isn't, and the reason."""
    match error:
        case RequestFailed(code="invalid" | "unhealthy"):
            return error.code, str(error)
        case RequestFailed(code="lost") | asyncio.CancelledError():
            return None, str(error)
        case RequestFailed():
            return INTERNAL_ERROR, str(error)
        case BrokenVideo():
            return BROKEN_VIDEO, str(error)
        case InputGone():
            return INPUT_LOST, str(error)
        case InvalidRequest():
            return INVALID, str(error)
        case WanTpuError():  # Something that all jobs share failed, such as the pipeline, storage or a hub.
            return None, str(error)
    if type(error).__module__.split(".")[0] == "ray":  # The slices can't be reached, for which no job is to blame.
        return None, f"{type(error).__name__}: {error}"
    return INTERNAL_ERROR, f"{type(error).__name__}: {error}"
