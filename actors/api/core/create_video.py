"""The fields of a client's request, and their validation.

Sizes are "WIDTHxHEIGHT", as OpenAI writes them. Times are Unix seconds.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from actors.api.untrusted.references import IMAGE, LAST, REFERENCES
from wan_tpu.fields import describe, type_of
from wan_tpu.request import FIELDS, MAX_STEPS, SIZE_MULTIPLE
from wan_tpu.requested_adapter import MOST, SCALES

# Fields of a request that have another name in the API: that of OpenAI or of other servers.
NAMES = {
    "frames": "num_frames",
    "steps": "num_inference_steps",
    "image": IMAGE,
    "last_image": LAST,
    "references": REFERENCES,
}
# Fields that have another form in the API, or that name a file on this machine, which clients may not.
_OTHERWISE = ("prompt", "image", "last_image", "height", "width", "loras", "video", "references")
# All other fields: bodies and answers have them as `GenerationRequest` declares them.
SETTINGS = tuple(name for name in FIELDS if name not in _OTHERWISE)
_OMITTED = {"seed": " Random if omitted."}
_MAX_URL = 8192  # Characters.
_MAX_PROMPT = 32_000  # Characters, as in OpenAI's API.
_MAX_NAME = 80  # Characters.
_MOST_SEGMENTS = 30
# Characters of all prompts of a request, which every answer about it repeats. It is what `prompt` and `negative_prompt`
# may have together, or 30 prompts of 2,100; other services take 1,000 (Runway) to 2,500 (Kling) a video.
_MAX_PROMPTS = 2 * _MAX_PROMPT

# What a client writes for a reference; `read_references` has brought it to `MediaReference`.
_REFERENCE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"const": key},
                key: {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]},
                **({"with_sound": {"type": "boolean"}} if key == "video_url" else {}),
            },
            "required": [key],
        }
        for key in ("image_url", "video_url", "audio_url")
    ]
}

_Prompt = Annotated[str, Field(min_length=1, max_length=_MAX_PROMPT)]


def find_text_problem(text: str) -> str | None:
    """Return why a text can't be stored, or None if it can."""
    if "\0" in text:
        return "the text has a NUL character; remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "the text has an unpaired surrogate, which isn't a character; remove it"
    return None


def describe_field(name: str) -> str:
    """Return the description of a request's field, with the API's names of other fields."""
    return re.sub("`(\\w+)`", lambda field: f"`{NAMES.get(field[1], field[1])}`", describe(FIELDS[name]))


def add_settings(base: type[BaseModel], setting: Callable[[str], tuple[Any, Any]]) -> Any:
    """Return a subclass of a model with an additional field for each of `SETTINGS`.

    Args:
        setting: Returns the type and the pydantic field of a setting, by its name in a request.
    """
    fields: dict[str, Any] = {NAMES.get(name, name): setting(name) for name in SETTINGS}
    return create_model(f"{base.__name__}WithSettings", __base__=base, **fields)


def _list_types(annotation: Any) -> tuple[Any, ...]:
    """Return the types that values of a field may have."""
    return get_args(annotation) or (annotation,)


class _Sent(BaseModel):
    """Something a client sends. Texts with NUL (for PostgreSQL) or a lone surrogate (for UTF-8) are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check_value(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        may_be_boolean = bool in _list_types(cls.model_fields[info.field_name].annotation)
        for inner in value if isinstance(value, list) else (value,):
            if isinstance(inner, bool) and not may_be_boolean:  # In Python it would pass as 0 or 1.
                raise PydanticCustomError("boolean", "true and false are not allowed; give a number or a string")
            if isinstance(inner, str) and (problem := find_text_problem(inner)) is not None:
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
        if len(url) > _MAX_URL:  # By now, the content of data: URLs has become files.
            raise PydanticCustomError("url", "the URL has more than {most} characters", {"most": _MAX_URL})
        return url


class VideoReference(_Sent):
    """A video of this service, or one that is fetched; exactly one of the two."""

    id: str | None = Field(
        default=None, min_length=1, max_length=80, description="The id of a finished video of yours."
    )
    video_url: str | None = Field(
        default=None,
        min_length=1,
        max_length=_MAX_URL,
        description="A public `https://` URL of at most 8,192 characters, or `data:video/mp4;base64,...`.",
        examples=["https://example.com/cat.mp4"],
    )

    @model_validator(mode="after")
    def _check_one(self) -> "VideoReference":
        if (self.id is None) == (self.video_url is None):
            raise PydanticCustomError("video", "give the id of a video, or a video_url")
        return self


class MediaReference(_Sent):
    """A reference, whose file came with the body unless it has a URL.

    Bodies have it in OpenRouter's form, {"type": "image_url", "image_url": {"url": "https://..."}}, or the same with
    video_url or audio_url. A video may have "with_sound": false.
    """

    kind: Literal["image", "video", "audio"] | None = None
    with_sound: bool = True
    url: str | None = Field(default=None, min_length=1, max_length=_MAX_URL)


class Adapter(_Sent):
    """An adapter (LoRA) of the model, and what its changes are multiplied by."""

    name: str = Field(min_length=1, max_length=80, description="Its name, as GET /v1/models lists it.")
    scale: float = Field(
        default=1.0, ge=SCALES[0], le=SCALES[1], description="What its changes are multiplied by; 0 changes nothing."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_name(cls, value: Any) -> Any:
        """Accept a plain name, as forms send it."""
        return {"name": value} if isinstance(value, str) else value


class _Described(_Sent):
    """What a video shows, in OpenAI's fields."""

    prompt: str = Field(
        min_length=1,
        max_length=_MAX_PROMPT,
        description="What the video shows. `truncate_prompt` says what becomes of one that is too long for the model.",
        examples=["a red ball rolls to the right over a brown floor"],
    )
    model: str | None = Field(
        default=None, max_length=200, description="The model, as GET /v1/models names it; a service has one."
    )
    seconds: str | None = Field(
        default=None,
        description="Length in seconds, above 0 and at most 600, as a text or a number. It is rounded to a number of "
        "frames that the model makes, and the answer says how long that is. `num_frames` has precedence.",
        examples=["5"],
    )
    size: str | None = Field(
        default=None,
        description=f"WIDTHxHEIGHT in pixels, multiples of {SIZE_MULTIPLE}; a few models need multiples of more, and "
        "GET /v1/models says so. Without it the video has the model's own size, or the shape of its first image where "
        "`follows_image` says so.",
        examples=["1280x720"],
    )
    input_reference: ImageReference | None = Field(default=None, description="The first frame.")
    last_frame: ImageReference | None = Field(
        default=None,
        description='The last frame, for models whose `last_frames` isn\'t "none". `input_reference` may be omitted '
        'where that is "alone".',
    )
    input_references: list[Annotated[MediaReference, WithJsonSchema(_REFERENCE_SCHEMA)]] | None = Field(
        default=None,
        description="Images, videos and sounds that the prompt is about, for models whose `references` says how many "
        "they take: the model reads them in this order, and a prompt calls them Picture 1, Video 1 and Audio 1, each "
        "counted by itself. A video brings its sound, which counts as an Audio, unless `with_sound` beside its "
        "`video_url` is false. A form has them as files, in JSON each "
        'is {"type": "image_url", "image_url": {"url": "https://..."}}, or the same with video_url or audio_url; data: '
        "URLs are accepted. Where `follows_sound` is true, one sound may be the video's own: `audio_mode`.",
    )
    video: VideoReference | None = Field(
        default=None,
        description="A video whose first `num_frames` frames the new one begins as, for models whose `takes_video` is "
        "true: it is restyled, not continued. Where `continues_video` is true, the new one goes on after its end.",
    )


def _declare_setting(name: str) -> tuple[Any, Any]:
    """Return the type and limits of a body's field for a setting, and its default."""
    field, kind = FIELDS[name], type_of(FIELDS[name])
    shortest, longest = {str: (None, _MAX_NAME), list[float]: (1, MAX_STEPS)}.get(kind, (None, None))
    more = Field(
        min_length=shortest,
        max_length=_MAX_PROMPT if name == "negative_prompt" else longest,
        description=describe_field(name) + _OMITTED.get(name, ""),
        examples=field.examples,
    )
    return Annotated[kind | None, more, *field.metadata], None


if TYPE_CHECKING:

    class _WithSettings(_Described):
        preset: str | None  # The other settings are read by their names.
else:
    _WithSettings = add_settings(_Described, _declare_setting)


class CreateVideo(_WithSettings):
    """A video to be made. Anything you omit, or send as null, uses the model's published settings.

    `prompt`, `model`, `seconds`, `size` and `input_reference` are the fields that OpenAI defined; the others are this
    service's. GET /v1/models says which of them the model has, with its defaults and limits.
    """

    next_prompts: list[_Prompt] | None = Field(
        default=None,
        max_length=_MOST_SEGMENTS - 1,
        description="Prompts of further segments. Each one continues the video so far, and is as long as the first: "
        "`seconds` and `num_frames` are the length of one segment. For models that can continue a video. All prompts "
        f"of a request have at most {_MAX_PROMPTS:,} characters together.",
        examples=[["the ball falls off the table", "a cat catches it"]],
    )
    continue_by: Literal["motion", "frame"] | None = Field(
        default=None,
        description="What a segment of `next_prompts`, or an extension, takes from the video before: its end, with "
        "motion and sound, or its last frame alone. If omitted, the end where the model, the preset and the length of "
        "that video allow it; GET /v1/models says so in `continues_motion`.",
        examples=["frame"],
    )
    audio_mode: Literal["reference", "lock_source"] | None = Field(
        default=None,
        description="What the sound among the `input_references` is: one of the things that the prompt is about, or, "
        "with `lock_source`, the video's own sound, which the video follows. There must be just one then. It is cut "
        "to the video's length, or ends in silence, with a warning. Where `follows_sound_from_image` is true, the "
        "`input_reference` may be the first frame of a video that follows a sound.",
        examples=["lock_source"],
    )
    loras: list[Adapter] | None = Field(
        default=None, max_length=MOST, description="Adapters in place of those that the preset brings."
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

    @field_validator("next_prompts")
    @classmethod
    def _check_prompts(cls, prompts: list[str] | None, info: ValidationInfo) -> list[str] | None:
        all_prompts = [info.data.get("prompt"), info.data.get("negative_prompt"), *(prompts or ())]
        characters = sum(len(prompt) for prompt in all_prompts if prompt is not None)
        if characters > _MAX_PROMPTS:
            raise PydanticCustomError(
                "prompts",
                "all prompts together have {characters} characters; at most {most} are allowed, of which a model reads "
                "about 2000 a prompt",
                {"characters": characters, "most": _MAX_PROMPTS},
            )
        return prompts

    @field_validator("seconds", mode="before")
    @classmethod
    def _as_text(cls, seconds: Any) -> Any:
        """Accept 4 as well as "4": OpenAI's clients send a text, SGLang's and OpenRouter's a number."""
        return str(seconds).removesuffix(".0") if isinstance(seconds, int | float) else seconds
