"""What the API says and is told, in the form of OpenAI's videos API: the video, the list, the error, the request.

Sizes are "WIDTHxHEIGHT", as OpenAI writes them (the command line writes HEIGHT*WIDTH). Times are Unix seconds.
"""

import math
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.jobs.values import Job, Status
from wan_tpu.errors import InvalidRequest
from wan_tpu.request import FRAME_STRIDE, SIZE_MULTIPLE, GenerationRequest

VARIANTS = {"video": "video/mp4", "thumbnail": "image/webp", "spritesheet": "image/jpeg"}  # and their types
Variant = Literal["video", "thumbnail", "spritesheet"]
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6})?", re.ASCII)
_MAX_PROMPT = 32_000  # characters, as OpenAI's


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageReference(_Object):
    """An image that is fetched, or that is in the URL itself."""

    image_url: str = Field(min_length=1, description="an https:// URL, or a data: URL with the image in base64")


class CreateVideo(_Object):
    """A video to be made. `prompt`, `model`, `seconds`, `size` and `input_reference` are OpenAI's; others are ours.

    What is left open takes the model's published settings.
    """

    prompt: str = Field(min_length=1, max_length=_MAX_PROMPT, description="what is seen")
    model: str | None = Field(default=None, max_length=200, description="as GET /v1/models names it")
    seconds: str | None = Field(default=None, description="length of the clip; rounded to whole latent frames")
    size: str | None = Field(default=None, description="WIDTHxHEIGHT in pixels", examples=["1280x720"])
    input_reference: ImageReference | None = Field(default=None, description="the first frame")
    negative_prompt: str | None = Field(default=None, max_length=_MAX_PROMPT, description="what to steer away from")
    num_inference_steps: int | None = Field(default=None, ge=1, le=1000)
    guidance_scale: float | None = Field(default=None, ge=0, le=100, description="of the high-noise expert")
    guidance_scale_2: float | None = Field(default=None, ge=0, le=100, description="of the low-noise expert")
    shift: float | None = Field(default=None, ge=0.01, le=100, description="timestep shift of the flow schedule")
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1, description="of the noise; random when left out")
    num_frames: int | None = Field(default=None, ge=1, le=2001, description="4n + 1; instead of seconds")
    fps: float | None = Field(default=None, ge=0.1, le=240)
    solver: Literal["unipc", "euler"] | None = None
    webhook_url: str | None = Field(default=None, max_length=2000, description="told when the video has ended")
    priority: int = Field(default=0, ge=-100, le=100, description="higher is earlier")
    deadline: float | None = Field(default=None, gt=0, le=1e11, description="the video fails if it isn't done by then")


class Problem(_Object):
    """Why a video failed."""

    code: str
    message: str


class Video(_Object):
    """OpenAI's video object. What stands after `expires_at` is ours."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status
    progress: int = Field(ge=0, le=100)
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    size: str
    seconds: str
    remixed_from_video_id: None = None
    error: Problem | None
    priority: int
    seed: int
    num_frames: int
    fps: float
    stage: str | None = None
    step: int | None = None
    num_inference_steps: int
    negative_prompt: str
    guidance_scale: float
    guidance_scale_2: float
    shift: float
    solver: str
    input_size: str | None
    queue_position: int | None = None
    eta_seconds: float | None = None
    attempts: int
    stage_seconds: dict[str, float]
    chip_seconds: float


class VideoList(_Object):
    """A page of a list, as OpenAI's clients walk through it: `after` of the next is `last_id`."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(_Object):
    """A video and its files are gone."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class ErrorDetail(_Object):
    """What went wrong: `type` is OpenAI's class of error, `code` says which, `param` where."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(_Object):
    """The body of every answer that isn't a success."""

    error: ErrorDetail


def video(job: Job, *, queue_position: int | None = None, eta_s: float | None = None) -> Video:
    """Return a job as OpenAI's video object. Its request is what `resolved` made, with the model's name."""
    asked, progress = job.request, job.progress
    return Video(
        id=job.id,
        model=asked["model"],
        status=job.status,
        progress=_percent(job),
        created_at=int(job.created_at),
        completed_at=int(job.ended_at) if job.ended_at is not None and job.status == "completed" else None,
        expires_at=int(job.expires_at) if job.expires_at is not None else None,
        prompt=asked["prompt"],
        size=f"{asked['width']}x{asked['height']}",
        seconds=seconds_text(asked["frames"] / asked["fps"]),
        error=Problem(code=job.error_code, message=job.error_message or "") if job.error_code is not None else None,
        priority=job.priority,
        seed=asked["seed"],
        num_frames=asked["frames"],
        fps=asked["fps"],
        stage=progress.stage if progress and job.status == "in_progress" else None,
        step=progress.step if progress and job.status == "in_progress" else None,
        num_inference_steps=asked["steps"],
        negative_prompt=asked["negative_prompt"],
        guidance_scale=asked["guidance_scale"],
        guidance_scale_2=asked["guidance_scale_2"],
        shift=asked["shift"],
        solver=asked["solver"],
        input_size=asked["image"],
        queue_position=queue_position,
        eta_seconds=None if eta_s is None else round(eta_s, 1),
        attempts=job.attempts,
        stage_seconds=job.stage_seconds,
        chip_seconds=job.chip_seconds,
    )


def video_list(videos: list[Video], *, more: bool) -> VideoList:
    """Return a page."""
    first, last = (videos[0].id, videos[-1].id) if videos else (None, None)
    return VideoList(data=videos, first_id=first, last_id=last, has_more=more)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> ErrorBody:
    """Return OpenAI's error body for an HTTP status."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def generation_request(asked: CreateVideo, *, fps: float, seed: int) -> GenerationRequest:
    """Return what the pipeline takes, the image still missing; raises `InvalidRequest` in the API's own words.

    fps   of the model, where the request names none
    seed  where the request names none
    """
    width, height = parse_size(asked.size) if asked.size is not None else (None, None)
    frames = asked.num_frames
    if asked.seconds is not None:
        if frames is not None:
            raise InvalidRequest("seconds and num_frames were both given; give one of them")
        frames = frames_for(asked.seconds, asked.fps or fps)
    return GenerationRequest(
        prompt=asked.prompt,
        negative_prompt=asked.negative_prompt,
        width=width,
        height=height,
        frames=frames,
        fps=asked.fps,
        steps=asked.num_inference_steps,
        guidance_scale=asked.guidance_scale,
        guidance_scale_2=asked.guidance_scale_2,
        shift=asked.shift,
        seed=seed if asked.seed is None else asked.seed,
        solver=asked.solver or "unipc",
    )


def parse_size(text: str) -> tuple[int, int]:
    """Read "WIDTHxHEIGHT" into (width, height) in pixels; raises `InvalidRequest` with the nearest size that works."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"size {text[:40]!r} is not WIDTHxHEIGHT; for example 1280x720")
    width, height = (int(part) for part in found.groups())
    near = [max(SIZE_MULTIPLE, round(side / SIZE_MULTIPLE) * SIZE_MULTIPLE) for side in (width, height)]
    if near != [width, height]:
        raise InvalidRequest(
            f"size {text} isn't in multiples of {SIZE_MULTIPLE} pixels; the nearest one is {near[0]}x{near[1]}"
        )
    return width, height


def frames_for(seconds: str, fps: float) -> int:
    """Return the number of frames, 4n + 1, whose length is nearest to `seconds`; raises `InvalidRequest`."""
    value = float(seconds) if _SECONDS.fullmatch(seconds) else math.nan
    if not 0 < value <= 600:
        raise InvalidRequest(f"seconds is {seconds[:20]!r}; give a number of seconds such as '5'")
    return max(1, round((value * fps - 1) / FRAME_STRIDE) * FRAME_STRIDE + 1)


def seconds_text(seconds: float) -> str:
    """Return a length as OpenAI writes it: "5", or "5.06" where it isn't whole."""
    return f"{seconds:.2f}".rstrip("0").rstrip(".")


def _percent(job: Job) -> int:
    """Whole percent, 100 only for what has completed."""
    if job.status == "completed":
        return 100
    return min(99, max(0, int(job.progress.percent))) if job.progress is not None else 0


def with_model(request: GenerationRequest, model: str) -> dict[str, Any]:
    """Return a resolved request as a job keeps it: plain JSON, without the image's pixels."""
    return request.to_json() | {"model": model}
