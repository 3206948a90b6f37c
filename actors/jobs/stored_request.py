"""The JSON of a job's request in the database. All versions of the format can be read.

    none  (until November 2026) the fields of a job's images held the images' sizes
    1     the sizes have fields of their own

A new field of requests doesn't need a new version: jobs stored without it are read without it.
"""

from collections.abc import Mapping
from typing import Any

VERSION = 1
# Fields of a job's request that `wan_tpu.request.GenerationRequest` doesn't have.
BESIDE = (
    "model",
    "seconds",
    "skipped",
    "input_size",
    "last_frame_size",
    "video_size",
    "extended_from",
    "source_frames",
    "next_prompts",
    "added_frames",
)


def to_stored(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request in the form in which it is stored."""
    return {"version": VERSION, **request}


def read_stored(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored request in the current form, without its version. A newer form is returned unchanged."""
    request = dict(stored)
    if "version" not in request:
        for image, size in (("image", "input_size"), ("last_image", "last_frame_size")):
            if (value := request.pop(image, None)) is not None:
                request[size] = value
    elif request["version"] <= VERSION:
        del request["version"]
    return request


def count_frames(request: Mapping[str, Any]) -> int:
    """Return how many frames the finished video of a job's request has.

    A video that continues another one contains the other's frames as well. The other's last frame is also its own first
    frame, and counts once, if it was made from that frame as its image. Each segment after the first adds
    `added_frames`.
    """
    frames: int = request["frames"] + max(0, request.get("source_frames", 0) - ("input_size" in request))
    return frames + (count_segments(request) - 1) * request.get("added_frames", 0)


def count_segments(request: Mapping[str, Any]) -> int:
    """Return how many segments, one after the other, are generated for a job's request."""
    return 1 + len(request.get("next_prompts", ()))
