"""The JSON of a job's request in the database. All versions of the format can be read.

    none  (until November 2026) the fields of a job's images held the images' sizes
    1     the sizes have fields of their own

A new field of requests doesn't need a new version: jobs stored without it are read without it, and earlier versions
leave jobs with it to later ones, as they do with values that `GenerationRequest` refuses. A new value that only a plan
refuses, such as a solver, would fail in an earlier version's worker, so it needs a new field or a new version. So does
a model that begins to take a field that it used to refuse: `without_references` marks jobs with `continue_by` or
`audio_mode` whose model takes no references, because earlier versions can't make them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

VERSION = 1
# Fields of a job's request that `wan_tpu.request.GenerationRequest` doesn't have.
JOB_FIELDS = (
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
    "continue_by",
    "reference_files",
    "redo",
    "end_file",
    "audio_mode",
    "without_references",
)


@dataclasses.dataclass(frozen=True)
class Redo:
    """How a job makes one segment of a finished job again, and which files it takes from that job.

    Attributes:
        segment: The segment's number, counted from 1.
        seed: The seed that it is made with.
        parts: Names of all segments, in order; None for the one that is made again.
        ends: Names of the ends of all segments but the last.
        end: Name of the last segment's end, where it is kept and that segment stays.
    """

    segment: int
    seed: int
    parts: tuple[str | None, ...]
    ends: tuple[str, ...]
    end: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that it takes."""
        return tuple(name for name in (*self.parts, *self.ends, self.end) if name is not None)

    @property
    def begins_with(self) -> str | None:
        """Name of the end that the new segment goes on from; None if it is the first one."""
        return self.ends[self.segment - 2] if self.segment > 1 else None

    @property
    def ends_with(self) -> str | None:
        """Name of the end that the new segment must have too, since the next one begins with it; None if it is last."""
        return self.ends[self.segment - 1] if self.segment <= len(self.ends) else None

    def to_stored(self) -> dict[str, Any]:
        """Return the value of a request's field `redo`."""
        return {**vars(self), "parts": list(self.parts), "ends": list(self.ends)}


def read_redo(request: Mapping[str, Any]) -> Redo | None:
    """Return what a job's request says about making a segment again; None if it makes all of its segments."""
    if (stored := request.get("redo")) is None:
        return None
    return Redo(stored["segment"], stored["seed"], tuple(stored["parts"]), tuple(stored["ends"]), stored.get("end"))


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
    frame, and counts once, if it was made from that frame as its image. If it was made from the other's end, as the
    segments of such a job are, it shares more frames with it. Each segment after the first adds `added_frames`.
    """
    shared = int("input_size" in request)
    if "continue_by" in request and not shared:  # It continues the end of the other one.
        shared = request["frames"] - request["added_frames"]
    frames: int = request["frames"] + max(0, request.get("source_frames", 0) - shared)
    return frames + (count_segments(request) - 1) * request.get("added_frames", 0)


def set_frames(request: Mapping[str, Any], frames: int) -> dict[str, Any]:
    """Return a job's request whose open length has become a number of frames."""
    longer = frames - request["frames"]
    added = {"added_frames": request["added_frames"] + longer} if "added_frames" in request else {}
    return {**request, "frames": frames, **added}


def count_left(request: Mapping[str, Any], finished: int = 0) -> int:
    """Return how many segments are still to be generated for a job's request after the first `finished` ones.

    A job that makes a segment of another one again generates only that.
    """
    if (redo := read_redo(request)) is not None:
        return int(finished < redo.segment)
    return count_segments(request) - finished


def count_segments(request: Mapping[str, Any]) -> int:
    """Return how many segments the video of a job's request has, one after the other."""
    return 1 + len(request.get("next_prompts", ()))
