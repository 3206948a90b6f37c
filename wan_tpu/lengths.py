"""Lengths of videos in seconds, which become numbers of frames."""

import math
import re

from wan_tpu.errors import InvalidRequest
from wan_tpu.request import LIMITS, ResolvedRequest
from wan_tpu.spec import ModelSpec

MAX_SECONDS = 600
_SECONDS = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6})?", re.ASCII)


def count_frames(seconds: str, fps: float, spec: ModelSpec) -> int:
    """Return the number of frames, of those that a model can make, nearest to a number of seconds.

    Raises:
        InvalidRequest: The text is no length, or the model's shortest or longest video is more than a step away.
    """
    value = read_seconds(seconds)
    limit = int(LIMITS["frames"][1])
    longest = min(spec.nearest_frames(limit), limit - (limit - spec.frame_offset) % spec.frame_step)
    frames = min(spec.nearest_frames(value * fps), longest)
    if abs(value * fps - frames) > spec.frame_step:
        least, most = (format_seconds(count / fps) for count in (spec.nearest_frames(0), longest))
        raise InvalidRequest(
            f"seconds is {seconds!r}; at {fps:g} frames a second {spec.name} makes videos of {least} to {most} s, "
            f"nearest {format_seconds(frames / fps)}",
            "seconds",
        )
    return frames


def describe_length(seconds: str | None, request: ResolvedRequest, spec: ModelSpec) -> list[str]:
    """Return a warning if a video's length differs from the one that was asked for by more than rounding."""
    if seconds is None or abs(float(seconds) * request.fps - request.frames) <= spec.frame_step / 2:
        return []
    made = format_seconds(request.frames / request.fps)
    return [f"seconds is {seconds!r}, but the video lasts {made} s, since it has {request.frames} frames"]


def read_seconds(text: str) -> float:
    """Return a length above 0 and at most `MAX_SECONDS`; raises `InvalidRequest`."""
    value = float(text) if _SECONDS.fullmatch(text) else math.nan
    if math.isnan(value):
        raise InvalidRequest(f"seconds is {text[:20]!r}; give a number of seconds, such as '5'", "seconds")
    if not 0 < value <= MAX_SECONDS:
        nearest = f", nearest {MAX_SECONDS}" if value else ""
        raise InvalidRequest(f"seconds is {text!r}; allowed: above 0, at most {MAX_SECONDS}{nearest}", "seconds")
    return value


def format_seconds(seconds: float) -> str:
    """Format a length as OpenAI does: "5", or "5.06" if it isn't a whole number."""
    return f"{seconds:.2f}".rstrip("0").rstrip(".")
