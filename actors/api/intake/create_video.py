"""What a client may ask for, checked field by field, and the pipeline's request that it becomes.

Sizes are "WIDTHxHEIGHT", as OpenAI writes them. Times are Unix seconds.
"""

import math
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from actors.api.catalogue import Catalogue
from wan_tpu.errors import InvalidRequest
from wan_tpu.lora import MOST, SCALES
from wan_tpu.request import LIMITS, SIZE_MULTIPLE, GenerationRequest, nearest_multiple, parse_size
from wan_tpu.schedules.magcache import FORM
from wan_tpu.spec import ModelSpec

SETTINGS = ("prompt", "negative_prompt", "fps", "guidance_scale", "guidance_scale_2", "shift", "solver")
LATER = ("loras", "preset", "sigmas", "switch_step", "cache")  # which jobs of an earlier version don't have
_SECONDS = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6})?", re.ASCII)
_EMPTY = Catalogue()
_MAX_URL = 8192  # characters
_MAX_PROMPT = 32_000  # characters, as OpenAI's


def text_problem(text: str) -> str | None:
    """Return what keeps a text from being stored, None where nothing does."""
    if "\0" in text:
        return "the text has a NUL character; leave it out"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "the text has half of a surrogate pair, which is no character; leave it out"
    return None


def _limited(name: str, description: str) -> Any:
    """Return a field that may be left out, with the limits of the request's own."""
    lowest, highest = LIMITS[name]
    return Field(default=None, ge=lowest, le=highest, description=description)


class _Sent(BaseModel):
    """What a client sends. PostgreSQL stores no NUL and UTF-8 has no half of a surrogate pair: no text has either."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, value: Any) -> Any:
        for inner in value if isinstance(value, list) else (value,):
            if isinstance(inner, bool):  # Python would take it for 0 or 1.
                raise PydanticCustomError("boolean", "no field is true or false; give a number or a text")
            if isinstance(inner, str) and (problem := text_problem(inner)) is not None:
                raise PydanticCustomError("text", "{problem}", {"problem": problem})
        return value


class ImageReference(_Sent):
    """An image that is fetched, or that is in the URL itself."""

    image_url: str = Field(
        min_length=1,
        description="A public `https://` URL of at most 8,192 characters, or `data:image/png;base64,...`.",
        examples=["https://example.com/cat.png"],
    )

    @field_validator("image_url")
    @classmethod
    def _check_length(cls, url: str) -> str:
        if len(url) > _MAX_URL:  # what is in a data: URL has become a file by now
            raise PydanticCustomError("url", "the URL has more than {most} characters", {"most": _MAX_URL})
        return url


class Adapter(_Sent):
    """An adapter (LoRA) of the model, and what its changes are multiplied by."""

    name: str = Field(min_length=1, max_length=80, description="Its name, as GET /v1/models lists it.")
    scale: float = Field(
        default=1.0, ge=SCALES[0], le=SCALES[1], description="What its changes are multiplied by; 0 changes nothing."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_name(cls, value: Any) -> Any:
        """Take a name alone, as forms send it."""
        return {"name": value} if isinstance(value, str) else value


class CreateVideo(_Sent):
    """A video to be made. Anything you omit, or send as null, uses the model's published settings.

    `prompt`, `model`, `seconds`, `size` and `input_reference` are the fields that OpenAI defined; the others are this
    service's. GET /v1/models says which of them the model has, with its defaults and limits.
    """

    prompt: str = Field(
        min_length=1,
        max_length=_MAX_PROMPT,
        description="What the video shows. What is longer than the model reads is cut, and `warnings` says so.",
        examples=["a red ball rolls to the right over a brown floor"],
    )
    model: str | None = Field(
        default=None, max_length=200, description="The model, as GET /v1/models names it; a service has one."
    )
    seconds: str | None = Field(
        default=None,
        description="Length in seconds, above 0 and at most 600, as a text or a number. It is rounded to a number of "
        "frames that the model makes. Use this or `num_frames`.",
        examples=["5"],
    )
    size: str | None = Field(
        default=None,
        description=f"WIDTHxHEIGHT in pixels, multiples of {SIZE_MULTIPLE}; a few models need multiples of more, and "
        "GET /v1/models says so. Without it the video has the model's own size, or the shape of its image where "
        "`follows_image` says so.",
        examples=["1280x720"],
    )
    input_reference: ImageReference | None = Field(default=None, description="The first frame.")
    last_frame: ImageReference | None = Field(
        default=None, description='The last frame, for models whose `last_frames` isn\'t "none".'
    )
    negative_prompt: str | None = Field(
        default=None, max_length=_MAX_PROMPT, description="What to steer away from; an empty text for nothing."
    )
    num_inference_steps: int | None = _limited("steps", "Denoising steps. The video takes that much longer to make.")
    guidance_scale: float | None = _limited(
        "guidance_scale", "How closely to follow the prompt, from the first step on. At most 1 halves the work."
    )
    guidance_scale_2: float | None = _limited(
        "guidance_scale_2", "The same for the low-noise expert, of models with two."
    )
    shift: float | None = _limited(
        "shift", "Timestep shift of the schedule: a higher one spends more of the steps at high noise."
    )
    seed: int | None = _limited(
        "seed", "Of the noise: the same seed and fields make the same video. Random if omitted."
    )
    num_frames: int | None = _limited(
        "frames", "Length in frames: one more than a multiple of the model's `frame_step`. Use this or `seconds`."
    )
    fps: float | None = _limited("fps", "Frames per second of the file. Motion is computed for the model's own rate.")
    solver: str | None = Field(
        default=None, max_length=40, description="One of the model's `solvers`.", examples=["unipc"]
    )
    preset: str | None = Field(
        default=None, max_length=80, description="One of the model's `presets`, which sets the fields that you omit."
    )
    loras: list[Adapter] | None = Field(
        default=None, max_length=MOST, description="Adapters in place of those that the preset brings."
    )
    sigmas: list[float] | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="The noise level of each step, falling from at most 1 to above 0, in place of "
        "`num_inference_steps` and `shift`.",
        examples=[[1.0, 0.75, 0.5, 0.25]],
    )
    switch_step: int | None = _limited(
        "switch_step", "The low-noise expert's first step, counted from 0, of models with two experts."
    )
    cache: str | None = Field(
        default=None,
        max_length=80,
        description=f"Skip steps whose result changes little, which costs quality: {FORM}.",
        examples=["magcache"],
    )
    webhook_url: str | None = Field(
        default=None,
        max_length=_MAX_URL,
        description="An `https://` URL that is called, with a signature, when the video has completed or failed.",
    )
    priority: int = Field(
        default=0, ge=-100, le=100, description="Higher ones are made first. The API key says how high it may be."
    )
    deadline: float | None = Field(
        default=None,
        gt=0,
        le=1e11,
        description="Unix time in seconds. A video that isn't finished by then fails with code `deadline_exceeded`.",
    )

    @field_validator("seconds", mode="before")
    @classmethod
    def _as_text(cls, seconds: Any) -> Any:
        """OpenAI's clients write "4", SGLang's and OpenRouter's 4."""
        return str(seconds).removesuffix(".0") if isinstance(seconds, int | float) else seconds


def adapters_of(asked: CreateVideo, spec: ModelSpec, catalogue: Catalogue) -> list[dict[str, Any]]:
    """Return the adapters of a request, by name: its own, or those that its preset wants; raises `InvalidRequest`."""
    wanted = [] if asked.preset is None else catalogue.of_preset(asked.preset, spec)
    return wanted if asked.loras is None else [one.model_dump() for one in asked.loras]


def generation_request(
    asked: CreateVideo, spec: ModelSpec, catalogue: Catalogue = _EMPTY, *, seed: int
) -> GenerationRequest:
    """Return what the pipeline of a model takes; raises `InvalidRequest`. seed: where the request names none."""
    height, width = _size(asked.size) if asked.size is not None else (None, None)
    frames = asked.num_frames
    if asked.seconds is not None:
        if frames is not None:
            raise InvalidRequest("seconds and num_frames were both given; give one of them", "seconds")
        frames = frames_for(asked.seconds, asked.fps or spec.defaults.fps, spec)
    taken = {name: getattr(asked, name) for name in (*SETTINGS, *LATER)}
    taken["loras"] = catalogue.loras(adapters_of(asked, spec, catalogue))
    return GenerationRequest(
        **taken,
        width=width,
        height=height,
        frames=frames,
        steps=asked.num_inference_steps,
        seed=seed if asked.seed is None else asked.seed,
    )


def _size(text: str) -> tuple[int, int]:
    """Return (height, width) in pixels; raises `InvalidRequest` with the nearest size that works."""
    height, width = parse_size(text)
    near = [nearest_multiple(side, SIZE_MULTIPLE) for side in (width, height)]
    if near != [width, height]:
        raise InvalidRequest(
            f"size {text} isn't in multiples of {SIZE_MULTIPLE} pixels; the nearest one is {near[0]}x{near[1]}", "size"
        )
    return height, width


def frames_for(seconds: str, fps: float, spec: ModelSpec) -> int:
    """Return the number of frames that a model makes whose length is nearest to `seconds`; raises `InvalidRequest`."""
    value = float(seconds) if _SECONDS.fullmatch(seconds) else math.nan
    if not 0 < value <= 600:
        raise InvalidRequest(f"seconds is {seconds[:20]!r}; give a number of seconds such as '5'", "seconds")
    return spec.nearest_frames(value * fps)
