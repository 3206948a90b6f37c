"""The objects that the API returns: videos, lists, usage and errors.

Sizes are "WIDTHxHEIGHT", as OpenAI writes them. Times are Unix seconds.
"""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.api.core.create_video import NAMES, SETTINGS, Adapter, add_settings, describe_field
from actors.jobs.stored_request import count_frames, count_segments, read_redo
from actors.jobs.tables import Job
from actors.jobs.values import PREVIEW, Status
from wan_tpu.fields import type_of
from wan_tpu.lengths import format_seconds
from wan_tpu.reference import SOUNDTRACK
from wan_tpu.request import FIELDS, FILLED, ORIGINAL, Defaults

Variant = Literal[
    "video", "thumbnail", "spritesheet", "final_frame", "preview", "input_reference", "last_frame", "input_video"
]
# Fields of a video that a job, or a job's request, has under the same name.
_OF_JOB = ("id", "status", "priority", "attempts", "warnings", "stage_seconds", "chip_seconds")
_OF_REQUEST = ("model", "prompt", "next_prompts", "continue_by", "audio_mode", "loras", "last_frame_size", "video_size")


class Object(BaseModel):
    """What all of them have in common: the texts below fields describe them in /docs."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class VideoError(Object):
    """Why a video failed."""

    code: str
    """`invalid`, `unhealthy` (a stage computed NaN), `broken_video`, `input_lost` (its image is gone), `lost`
    (slices were lost again and again), `cancelled`, `deadline_exceeded` or `internal_error`."""
    message: str
    """What went wrong, for people."""


class _Described(Object):
    """What a video is, in OpenAI's fields and ours."""

    id: str
    """Names the video in every other call."""
    object: Literal["video"] = "video"
    model: str
    """The model that makes it."""
    status: Status
    """`queued`, `in_progress`, `completed` or `failed`."""
    progress: int = Field(ge=0, le=100)
    """Percent of the work, weighted by measured seconds; 100 only for a completed video."""
    created_at: int
    """Unix seconds."""
    completed_at: int | None
    """Unix seconds; null until it has completed."""
    expires_at: int | None
    """Unix seconds, when the video and its files are removed; null until it has ended."""
    prompt: str
    """The prompt of the request."""
    size: str
    """WIDTHxHEIGHT in pixels."""
    seconds: str
    """Length in seconds of what is made, with the video that it continues."""
    remixed_from_video_id: str | None = None
    """The video whose request it repeats with another prompt, or of which it makes one segment again."""
    error: VideoError | None
    """Why it failed; null unless it has."""
    priority: int
    """Higher ones are made first."""


def _declare_setting(name: str) -> tuple[Any, Any]:
    """Return the type and pydantic field of a setting. It is required if every job has it."""
    kind, always = type_of(FIELDS[name]), name in FILLED or FIELDS[name].default is not None
    description = describe_field(name)
    if kind is bool and hasattr(Defaults, name):
        return kind, Field(False, description=description)
    return (kind, Field(description=description)) if always else (kind | None, Field(None, description=description))


if TYPE_CHECKING:

    class _WithSettings(_Described):
        preset: str | None  # The other settings are written by their names.
else:
    _WithSettings = add_settings(_Described, _declare_setting)


class Video(_WithSettings):
    """OpenAI's video object. Fields after `expires_at` are extensions.

    The settings are those that it is made with, those of its preset and of the model included.
    """

    next_prompts: list[str] = Field([])
    """The prompts of the segments after the first one."""
    continue_by: Literal["motion", "frame"] | None = None
    """What each of these segments takes from the one before, where that is its end: `motion`."""
    redo_segment: int | None = None
    """The only segment that is made again, counted from 1; null unless it is another video with a new segment."""
    redo_seed: int | None = None
    """That segment's seed."""
    finished_segments: int | None = None
    """How many of its segments are finished; null if it has only one."""
    stage: str | None = None
    """The stage that computes now: `encoder`, `denoise_high`, `denoise_low`, `denoise`, `denoise_ref`, `refine` or
    `decoder`."""
    step: int | None = None
    """The last finished step of `num_inference_steps`."""
    compiling: bool = False
    """Whether it waits for its slice to compile a program, as the first video of a size does."""
    preview_step: int | None = None
    """The step that the variant `preview` of its content shows; null while there is none."""
    loras: list[Adapter] = Field([])
    """The adapters that it is made with, those of its preset included."""
    skipped_steps: list[int] = Field([])
    """Steps that the cache skips, counted from 1."""
    input_size: str | None
    """WIDTHxHEIGHT of the first frame's file; null without one."""
    last_frame_size: str | None = None
    """WIDTHxHEIGHT of the last frame's file; null without one."""
    video_size: str | None = None
    """WIDTHxHEIGHT of the video's file that it begins as, or continues; null without one."""
    references: list[Literal["image", "video", "audio"]] = Field([])
    """What each of its `input_references` is, in order."""
    audio_mode: Literal["reference", "lock_source"] | None = None
    """`lock_source` if the sound among them is the video's own."""
    extended_from_video_id: str | None = None
    """The video that it continues and shows first; null unless it is one of this service."""
    queue_position: int | None = None
    """How many waiting videos come before it; null unless it waits."""
    eta_seconds: float | None = None
    """Seconds until it is finished; null where nothing is known yet."""
    attempts: int
    """How often a worker has begun it."""
    warnings: list[str]
    """What its owner should know, such as that the prompt was cut."""
    stage_seconds: dict[str, float]
    """Seconds that each stage has computed, over all attempts."""
    inference_time_s: float | None = None
    """Their sum, once it has completed; vLLM-Omni's and SGLang's benchmarks read it."""
    num_outputs: int | None = None
    """1, once it has completed; SGLang's benchmark counts it."""
    chip_seconds: float
    """The same seconds times the chips of the slices, summed."""
    dollars: float | None
    """What they cost; null where the price of the chips isn't known."""


class VideoList(Object):
    """A page of a list, as OpenAI's clients walk through it: `after` of the next is `last_id`."""

    object: Literal["list"] = "list"
    data: list[Video]
    """The videos, in order."""
    first_id: str | None
    """Id of the first of them; null on an empty page."""
    last_id: str | None
    """Id of the last of them: `after` of the next page."""
    has_more: bool
    """Whether others follow."""


class VideoDeleted(Object):
    """A video and its files are gone."""

    id: str
    """The video that was deleted."""
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class KeyUsage(Object):
    """What the jobs of a key that have ended came to; cancelled and failed ones count with what they had computed."""

    object: Literal["usage"] = "usage"
    key: str
    """Id of the API key; empty where the service has none."""
    name: str
    """The key's name."""
    videos: int
    """Videos that have completed."""
    failed: int
    """Videos that failed or were cancelled."""
    chip_seconds: float
    """What all of them computed, in seconds of one chip."""
    dollars: float
    """What that costs, where the price of the chips is known."""
    stored_bytes: int
    """What the files of its jobs and its uploads take, whatever the days; up to a minute old."""


class UsageList(Object):
    """Usage by key, from a day to another, both included."""

    object: Literal["list"] = "list"
    data: list[KeyUsage]
    """Usage by key."""
    first: str
    """The first day that is counted, UTC."""
    last: str
    """The last day that is counted, UTC."""


class ErrorDetail(Object):
    """What went wrong: `type` is OpenAI's class of error, `code` says which, `param` where."""

    message: str
    """What was given, what is allowed, and what works instead."""
    type: str
    """OpenAI's class of the error, such as `invalid_request_error`."""
    param: str | None = None
    """The field that is wrong, where it is one."""
    code: str | None = None
    """Which error it is, for programs."""


class ErrorBody(Object):
    """The body of every answer that isn't a success."""

    error: ErrorDetail
    """What went wrong."""


def to_video(job: Job, eta_s: float | None = None) -> Video:
    """Return a job, whose request is resolved, as OpenAI's video object."""
    request, redo = job.request, read_redo(job.request)
    running, completed = job.progress if job.status == "in_progress" else None, job.status == "completed"
    return Video(
        **{name: getattr(job, name) for name in _OF_JOB},
        **{name: request[name] for name in _OF_REQUEST if name in request},
        **{NAMES.get(name, name): request[name] for name in SETTINGS if name in request and name != "preset"},
        preset=request.get("preset") or ORIGINAL,
        skipped_steps=request.get("skipped", []),
        dollars=round(job.dollars, 4) or None,
        progress=_compute_percent(job),
        created_at=int(job.created_at),
        completed_at=int(job.ended_at) if job.ended_at is not None and completed else None,
        expires_at=int(job.expires_at) if job.expires_at is not None else None,
        size=f"{request['width']}x{request['height']}",
        seconds=format_seconds(count_frames(request) / request["fps"]),
        remixed_from_video_id=job.remixed_from,
        error=VideoError(code=job.error_code, message=job.error_message or "") if job.error_code is not None else None,
        input_size=request.get("input_size"),
        references=["audio" if one["kind"] == SOUNDTRACK else one["kind"] for one in request.get("references") or ()],
        extended_from_video_id=request.get("extended_from"),
        redo_segment=None if redo is None else redo.segment,
        redo_seed=None if redo is None else redo.seed,
        finished_segments=_count_finished(job),
        stage=running.stage if running else None,
        step=running.step if running else None,
        compiling=running is not None and running.compiles,
        preview_step=_read_preview_step(job),
        queue_position=job.position,
        eta_seconds=None if eta_s is None else round(eta_s, 1),
        inference_time_s=round(sum(job.stage_seconds.values()), 3) if completed else None,
        num_outputs=1 if completed else None,
    )


def make_error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> ErrorBody:
    """Return OpenAI's error body for an HTTP status."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message, param = _escape(message), None if param is None else _escape(param)
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def _escape(text: str) -> str:
    """Escape lone surrogates, which UTF-8 can't encode but a client may have put in a field's name."""
    return text.encode(errors="backslashreplace").decode()


def _read_preview_step(job: Job) -> int | None:
    """Return the step in the name of a job's preview, ID.ATTEMPT.step-STEP.DIGEST.jpg; None without one."""
    name = job.results.get(PREVIEW)
    return None if name is None else int(name.split(".")[2].removeprefix("step-"))


def _count_finished(job: Job) -> int | None:
    segments = count_segments(job.request)
    if segments == 1:
        return None
    return segments if job.status == "completed" else len(job.segments)


def _compute_percent(job: Job) -> int:
    """Return whole percent; 100 only if the job has completed."""
    if job.status == "completed":
        return 100
    return min(99, max(0, int(job.progress.percent))) if job.progress is not None else 0
