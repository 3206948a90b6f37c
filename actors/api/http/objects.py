"""What the API returns, in the form of OpenAI's videos API: the video, the list, the model, the error.

Sizes are "WIDTHxHEIGHT", as OpenAI writes them (the command line writes HEIGHT*WIDTH). Times are Unix seconds.
"""

import dataclasses
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.api.intake.create_video import LATER, SETTINGS, Adapter
from actors.api.settings import ServiceSettings
from actors.jobs.tables import Job
from actors.jobs.values import Status
from wan_tpu.request import LIMITS, Preset
from wan_tpu.spec import ModelSpec

Variant = Literal["video", "thumbnail", "spritesheet", "input_reference", "last_frame"]
# Fields of `wan_tpu.request` by their names here.
PICTURES = {"input_reference": "image", "last_frame": "last_image"}
PARAMS = {"frames": "num_frames", "steps": "num_inference_steps"} | {ours: name for name, ours in PICTURES.items()}
# Fields of a video that a job, and a request, have by the same name.
_OF_JOB = ("id", "status", "priority", "attempts", "warnings", "stage_seconds", "chip_seconds")
_OF_REQUEST = (*SETTINGS, "model", "seed", "num_frames", "num_inference_steps")


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VideoError(_Object):
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
    remixed_from_video_id: str | None = None
    error: VideoError | None
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
    preset: str | None = None
    loras: list[Adapter] = []
    sigmas: list[float] | None = None
    switch_step: int | None = None
    cache: str | None = None
    skipped_steps: list[int] = []
    input_size: str | None
    last_frame_size: str | None = None
    queue_position: int | None = None
    eta_seconds: float | None = None
    attempts: int
    warnings: list[str]
    stage_seconds: dict[str, float]
    chip_seconds: float


class Limits(_Object):
    """The lowest and the highest value of a field."""

    minimum: float
    maximum: float


class PresetModel(_Object):
    """A named way to sample: what it is, where its numbers are from, and what it sets, by a request's fields."""

    name: str
    about: str
    source: str
    settings: dict[str, float | str | list[float]]


class Model(_Object):
    """What a model makes, and how: OpenAI's model object, and what stands after `owned_by` is ours.

    tasks     "t2v": videos of a text, "i2v": of an image and a text
    last_frames  whether a video may, or must, end with an image, too: "none", "optional", "required"
    stages    that a video passes, in order
    defaults  of fields of a request that are left open
    sizes     that are usual; others are taken too, in multiples of `size_multiple`
    follows_image  whether a video has its image's shape where no size is asked for
    limits    of fields that are numbers and that the model has; frames are a multiple of `frame_step`, and one
    solvers   its schedulers, the one that is used unless a request names another first
    largest   the largest sizes that the slices have memory for; anything if None
    aliases   other names that a request may give it
    cache     that a request may ask for, with its usual settings; None: there is none
    presets   named ways to sample; loras  names of adapters
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["wan-tpu"] = "wan-tpu"
    tasks: list[str]
    last_frames: str
    stages: list[str]
    defaults: dict[str, float | str]
    sizes: list[str]
    follows_image: bool
    limits: dict[str, Limits]
    size_multiple: int
    frame_step: int
    solvers: list[str]
    largest: list[dict[str, int | str]] | None
    aliases: list[str]
    cache: str | None
    presets: list[PresetModel]
    loras: list[str]


class ModelList(_Object):
    """All models: there is one."""

    object: Literal["list"] = "list"
    data: list[Model]


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


class KeyUsage(_Object):
    """What the jobs of a key that have ended came to; cancelled and failed ones count with what they had computed."""

    object: Literal["usage"] = "usage"
    key: str
    name: str
    videos: int
    failed: int
    chip_seconds: float
    dollars: float


class UsageList(_Object):
    """Usage by key, from a day to another, both included."""

    object: Literal["list"] = "list"
    data: list[KeyUsage]
    first: str
    last: str


class ErrorDetail(_Object):
    """What went wrong: `type` is OpenAI's class of error, `code` says which, `param` where."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(_Object):
    """The body of every answer that isn't a success."""

    error: ErrorDetail


def video(job: Job, eta_s: float | None = None) -> Video:
    """Return a job as OpenAI's video object. Its request is resolved, with the model's name."""
    asked = {PARAMS.get(name, name): value for name, value in job.request.items()}
    running = job.progress if job.status == "in_progress" else None
    return Video(
        **{name: getattr(job, name) for name in _OF_JOB},
        **{name: asked[name] for name in _OF_REQUEST},
        **{name: asked[name] for name in LATER if name in asked},
        skipped_steps=asked.get("skipped", []),
        progress=_percent(job),
        created_at=int(job.created_at),
        completed_at=int(job.ended_at) if job.ended_at is not None and job.status == "completed" else None,
        expires_at=int(job.expires_at) if job.expires_at is not None else None,
        size=f"{asked['width']}x{asked['height']}",
        seconds=asked.get("seconds") or seconds_text(asked["num_frames"] / asked["fps"]),
        remixed_from_video_id=job.remixed_from,
        error=VideoError(code=job.error_code, message=job.error_message or "") if job.error_code is not None else None,
        stage=running.stage if running else None,
        step=running.step if running else None,
        input_size=asked["input_reference"],
        last_frame_size=asked.get("last_frame"),
        queue_position=job.position,
        eta_seconds=None if eta_s is None else round(eta_s, 1),
    )


def model(settings: ServiceSettings, spec: ModelSpec, created: int) -> Model:
    """Return a service's model as the API shows it."""
    defaults = {name: value for name, value in dataclasses.asdict(spec.defaults).items() if name not in spec.unused}
    limits = {name: value for name, value in LIMITS.items() if name not in spec.unused}
    height, width = defaults.pop("height"), defaults.pop("width")
    return Model(
        id=settings.model,
        created=created,
        tasks=list(spec.tasks),
        last_frames=spec.last_images,
        stages=list(spec.stages),
        defaults={"size": f"{width}x{height}"} | {PARAMS.get(field, field): value for field, value in defaults.items()},
        sizes=[f"{w}x{h}" for h, w in spec.usual_sizes],
        follows_image=spec.follows_image,
        limits={PARAMS.get(name, name): Limits(minimum=low, maximum=high) for name, (low, high) in limits.items()},
        size_multiple=spec.size_multiple,
        frame_step=spec.frame_step,
        solvers=list(spec.solvers),
        largest=[{"size": f"{w}x{h}", "num_frames": n} for h, w, n in settings.largest] or None,
        aliases=list(settings.aliases),
        cache=None if spec.curve is None else str(spec.curve.usual),
        presets=[_preset(name, preset) for name, preset in settings.catalogue.presets(spec).items()],
        loras=list(settings.catalogue.adapters),
    )


def _preset(name: str, preset: Preset) -> PresetModel:
    settings = {PARAMS.get(field, field): value for field, value in preset.settings if field != "loras"}
    return PresetModel(name=name, about=preset.about, source=preset.source, settings=settings)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> ErrorBody:
    """Return OpenAI's error body for an HTTP status."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message, param = _encodable(message), None if param is None else _encodable(param)
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def _encodable(text: str) -> str:
    """Return a text with what UTF-8 doesn't have written as an escape: a client may name a field by it."""
    return text.encode(errors="backslashreplace").decode()


def seconds_text(seconds: float) -> str:
    """Return a length as OpenAI writes it: "5", or "5.06" where it isn't whole."""
    return f"{seconds:.2f}".rstrip("0").rstrip(".")


def _percent(job: Job) -> int:
    """Whole percent, 100 only for what has completed."""
    if job.status == "completed":
        return 100
    return min(99, max(0, int(job.progress.percent))) if job.progress is not None else 0
