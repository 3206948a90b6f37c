"""What a client may ask for, checked field by field, and the pipeline's request that it becomes.

Sizes are "WIDTHxHEIGHT", as OpenAI writes them (the command line writes HEIGHT*WIDTH). Times are Unix seconds.
"""

import math
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
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


def _limited(name: str, description: str | None = None) -> Any:
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

    image_url: str = Field(min_length=1, description="an https:// URL, or a data: URL with the image in base64")

    @field_validator("image_url")
    @classmethod
    def _check_length(cls, url: str) -> str:
        if len(url) > _MAX_URL:  # what is in a data: URL has become a file by now
            raise PydanticCustomError("url", "the URL has more than {most} characters", {"most": _MAX_URL})
        return url


class Adapter(_Sent):
    """An adapter (LoRA) of the model's experts, and what its changes are multiplied by."""

    name: str = Field(min_length=1, max_length=80, description="as GET /v1/models names it")
    scale: float = Field(default=1.0, ge=SCALES[0], le=SCALES[1])


class CreateVideo(_Sent):
    """A video to be made. `prompt`, `model`, `seconds`, `size` and `input_reference` are OpenAI's; others are ours.

    What is left open takes the model's published settings.
    """

    prompt: str = Field(min_length=1, max_length=_MAX_PROMPT, description="what is seen")
    model: str | None = Field(default=None, max_length=200, description="as GET /v1/models names it")
    seconds: str | None = Field(default=None, description="length of the clip; rounded to whole latent frames")
    size: str | None = Field(default=None, description="WIDTHxHEIGHT in pixels", examples=["1280x720"])
    input_reference: ImageReference | None = Field(default=None, description="the first frame")
    last_frame: ImageReference | None = Field(default=None, description="the last frame, for models that lead to one")
    negative_prompt: str | None = Field(default=None, max_length=_MAX_PROMPT, description="what to steer away from")
    num_inference_steps: int | None = _limited("steps")
    guidance_scale: float | None = _limited("guidance_scale", "of the high-noise expert, or of the only one")
    guidance_scale_2: float | None = _limited("guidance_scale_2", "of the low-noise expert")
    shift: float | None = _limited("shift", "timestep shift of the flow schedule")
    seed: int | None = _limited("seed", "of the noise; random when left out")
    num_frames: int | None = _limited("frames", "such as the model makes (its frame_step n + 1); instead of seconds")
    fps: float | None = _limited("fps")
    solver: str | None = Field(default=None, max_length=40, description="one of the model's solvers")
    preset: str | None = Field(
        default=None, max_length=80, description="a named way to sample, as GET /v1/models has it"
    )
    loras: list[Adapter] | None = Field(default=None, max_length=MOST, description="adapters; a preset has its own")
    sigmas: list[float] | None = Field(
        default=None, min_length=1, max_length=1000, description="noise level of each step; steps and shift make others"
    )
    switch_step: int | None = _limited("switch_step", "the low-noise expert's first step, from 0")
    cache: str | None = Field(default=None, max_length=80, description=f"skipped steps, which is lossy: {FORM}")
    webhook_url: str | None = Field(default=None, max_length=_MAX_URL, description="called when the video has ended")
    priority: int = Field(default=0, ge=-100, le=100, description="higher is earlier")
    deadline: float | None = Field(default=None, gt=0, le=1e11, description="the video fails if it isn't done by then")

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
    if "*" in text:  # HEIGHT*WIDTH on our command line, WIDTH*HEIGHT in Wan's own program: nobody can tell.
        sides = " or ".join("x".join(pair) for pair in (text.split("*")[:2], text.split("*")[1::-1]))[:40]
        raise InvalidRequest(f"size {text[:20]!r} doesn't say which side is which; write WIDTHxHEIGHT: {sides}", "size")
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
