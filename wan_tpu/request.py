"""A request for a video: one frozen value, validated once, when it is created.

`GenerationRequest` is the only list of a request's fields. The command line's options, the keys of a manifest's line,
the fields of an HTTP body with their limits, a job's JSON and the fields of an answer are derived from it.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from PIL import Image
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs

from wan_tpu.errors import InvalidRequest
from wan_tpu.fields import explain_refusal, limits_of, list_values
from wan_tpu.media.image import load_image
from wan_tpu.media.video_content import VideoContent
from wan_tpu.reference import Reference, parse_references
from wan_tpu.requested_adapter import RequestedAdapter, parse_adapters
from wan_tpu.schedules.magcache import FORM, Curve, parse_magcache
from wan_tpu.suggest import did_you_mean
from wan_tpu.tail import Tail

NAMED_SIZES = ("1280x720", "720x1280", "832x480", "480x832")
SIZE_MULTIPLE = 16  # Pixels: the VAE's 8 times the transformer's patch of 2. Models that need more check it.
STRENGTH = 0.8  # The default strength of a video, as in diffusers.
IMAGES = ("image", "last_image")  # Fields of a request that are pictures.
MATCH = "match"  # Reference images have at most the video's number of pixels.
REFERENCE_SIZES = ("max", MATCH)
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.ASCII)
MAX_STEPS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """Sampling settings of a model, used where a request leaves a field open."""

    height: int
    width: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float
    shift: float
    solver: str
    # Whether a video has sound; None where the model makes none, so that records and digests of requests omit it.
    generate_audio: bool | None = None
    negative_prompt: str = ""


ORIGINAL = "original"  # The preset with a model's own settings, those of its authors' program; the default.
DIFFUSERS = "diffusers"  # The preset with the settings of diffusers' pipeline.


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named set of sampling settings. It fills the fields that a request which names it leaves open."""

    about: str  # What it is, for people.
    source: str  # Where its numbers are from.
    settings: tuple[tuple[str, Any], ...]
    text_only: bool = False  # Whether it is only for requests without images.
    with_references: bool = False  # Whether it is only for requests with references.

    @property
    def takes_images(self) -> bool:
        """Whether a video can begin with an image, as one that continues another does."""
        return not (self.text_only or self.with_references)


@dataclasses.dataclass(frozen=True)
class CheckpointOverrides:
    """A checkpoint's own sampling settings, from its wan_tpu.json."""

    defaults: tuple[tuple[str, float], ...] = ()
    presets: tuple[tuple[str, Preset], ...] = ()
    curves: tuple[Curve, ...] = ()


NO_OVERRIDES = CheckpointOverrides()
# The fields that `GenerationRequest.resolve` always fills, for all models.
FILLED = (
    *(field.name for field in dataclasses.fields(Defaults) if field.default is dataclasses.MISSING),
    "negative_prompt",
)


_LEAST_NOISE = 1e-6  # Schedules divide by noise levels in float32, which can't hold much smaller ones.


def _check_text(text: str, info: ValidationInfo) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{info.field_name} {text!r} isn't valid Unicode; is the terminal set to UTF-8?"
        raise InvalidRequest(message, info.field_name) from None
    return text


def _check_sigmas(sigmas: object) -> tuple[float, ...]:
    """Return noise levels as a tuple; raises `InvalidRequest`."""
    form = f"give at most 1000 decreasing numbers from 1 to {_LEAST_NOISE:f}"
    if not isinstance(sigmas, list | tuple | np.ndarray) or not 1 <= len(sigmas) <= MAX_STEPS:
        raise InvalidRequest(f"sigmas is {str(sigmas)[:60]}; {form}", "sigmas")
    values = [sigma.item() if isinstance(sigma, np.generic) else sigma for sigma in sigmas]
    if any(
        isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) for value in values
    ):
        raise InvalidRequest(f"sigmas has an element that isn't a finite number; {form}", "sigmas")
    for before, sigma in zip([math.nextafter(1, 2), *values], values, strict=False):
        if not _LEAST_NOISE <= sigma < before:
            raise InvalidRequest(f"sigmas has {sigma:g} after {before:g}; {form}", "sigmas")
    return tuple(map(float, values))


def _read_picture(picture: Any, info: ValidationInfo) -> Image.Image:
    return load_image(picture, info.field_name or "image")


def _check_video(video: object) -> str | VideoContent:
    if isinstance(video, VideoContent):
        return video
    if not isinstance(video, str | Path) or not Path(video).is_file():
        raise InvalidRequest(f"video {str(video)[:200]!r} is not a file; give the path of a video file", "video")
    return str(Path(video).absolute())


def _check_reference_size(size: str) -> str:
    if size not in REFERENCE_SIZES:
        hint = did_you_mean(size, REFERENCE_SIZES)
        raise InvalidRequest(
            f"reference_size is {size!r}{hint}; choose one of {', '.join(REFERENCE_SIZES)}", "reference_size"
        )
    return size


Number = int | float  # An integer stays an integer, so that digests and records show it as it was written.
Text = Annotated[str, AfterValidator(_check_text)]
# Decoded when the request is created, so that a damaged file fails before any model is loaded.
Picture = Annotated[str | Path | Image.Image | np.ndarray, PlainValidator(_read_picture)]
References = Annotated[Sequence[Reference | Tail | str | Mapping[str, Any]], PlainValidator(parse_references)]
Adapters = Annotated[Sequence[RequestedAdapter | str | Mapping[str, Any]], PlainValidator(parse_adapters)]


@dataclass(
    frozen=True,
    kw_only=True,
    config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True),
)
class GenerationRequest:
    """One video to make. Any field left `None` uses the model's published setting (`resolve`).

    The string below a field is its description on the command line, over HTTP and in answers. A name in backticks is
    another field, which each of these spells in its own way.

    In Python an image is a path or a `PIL.Image`; it becomes RGB here and is resized to the video's size later. An
    adapter is a `RequestedAdapter`, its text or its fields (`wan_tpu.requested_adapter.parse_adapter`).

    Raises:
        InvalidRequest: It names the field, what is allowed and the nearest value that works.
    """

    prompt: Text = ""
    """What the video shows; an empty text means nothing in particular. `truncate_prompt` says what becomes of one
    that is too long for the model."""
    negative_prompt: Text | None = None
    """What to steer away from; an empty text means nothing. The model's authors' if omitted; unused without
    guidance."""
    image: Picture | None = None
    """The first frame, for models that begin with an image."""
    last_image: Picture | None = None
    """The last frame, for models that lead from one image to another; some take it without `image`, too."""
    video: Annotated[str | Path | VideoContent, PlainValidator(_check_video)] | None = None
    """A video file, which the model restyles, or continues after its last frame."""
    strength: Number | None = Field(default=None, ge=0.001, le=1)
    """How much `video` changes: the share of the steps that are run. 0.8 if omitted. Models that continue
    a video don't have it."""
    references: References | None = None
    """Images, videos and sounds that the prompt is about, for models that take them: the model reads them in this
    order, and a prompt calls them Picture 1, Video 1 and Audio 1, each counted by itself. A video brings its sound,
    which counts as an Audio. Not counted are, where a model takes them: the end of a video that the new one continues,
    which comes last, and a soundtrack."""
    reference_size: Annotated[str, AfterValidator(_check_reference_size)] | None = Field(
        default=None,
        description="How large the model sees images among the `references`: max, a short side of 2048 pixels as "
        "published, or match, at most the video's number of pixels, with which few-step adapters are trained and which "
        "takes much less time. max if omitted.",
        examples=["match"],
    )
    height: int | None = Field(default=None, ge=SIZE_MULTIPLE, le=8192, multiple_of=SIZE_MULTIPLE)
    """In pixels, a multiple of 16; some models need one of 32 or 64."""
    width: int | None = Field(default=None, ge=SIZE_MULTIPLE, le=8192, multiple_of=SIZE_MULTIPLE)
    """In pixels, a multiple as for `height`."""
    frames: int | None = Field(default=None, ge=1, le=2001)
    """Length in frames: one more than a multiple of 4 for most models, or of 8 for some."""
    max_seconds: Number | None = Field(default=None, ge=1, le=60)
    """The longest video that may come of a request without `frames`, for models that then choose the length by the
    prompt; 20 if omitted."""
    fps: Number | None = Field(default=None, ge=0.1, le=240)
    """Frames per second of the file. Some models fit motion and sound to it; others assume their own rate."""
    generate_audio: bool | None = None
    """Whether the video has sound, for models that can make it; true for those if omitted."""
    steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Number of denoising steps, over all experts. Time grows in proportion to it."""
    guidance_scale: Number | None = Field(default=None, ge=0, le=100)
    """How closely to follow the prompt, from the first step on. At most 1 turns guidance off, which halves the
    work, or leaves less of it where guidance takes more than two evaluations."""
    guidance_scale_2: Number | None = Field(default=None, ge=0, le=100)
    """The same for the low-noise expert of models with two experts; `guidance_scale` if only that is given."""
    shift: Number | None = Field(default=None, ge=0.01, le=100)
    """Timestep shift of the schedule: a higher one spends more of the steps at high noise."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the initial noise, drawn as in diffusers: the same seed and fields make the same video."""
    solver: str | None = Field(default=None, examples=["unipc"])
    """One of the model's solvers; the published one if omitted."""
    loras: Adapters | None = None
    """Adapters to apply to the experts, instead of the preset's."""
    sigmas: Annotated[Sequence[float], PlainValidator(_check_sigmas)] | None = Field(
        default=None, examples=[[1.0, 0.75, 0.5, 0.25]]
    )
    """The noise level of each step, falling from at most 1 to at least a millionth, instead of `steps` and `shift`."""
    switch_step: int | None = Field(default=None, ge=0, le=MAX_STEPS)
    """The low-noise expert's first step, counted from 0, of models with two experts."""
    cache: Annotated[str, AfterValidator(lambda cache: str(parse_magcache(cache)))] | None = Field(
        default=None,
        description=f"Skip steps whose result changes little, which costs quality: {FORM}.",
        examples=["magcache"],
    )
    preset: str | None = None
    """One of the model's presets, which sets omitted fields, adapters too. `original`, the default, is what the
    model's authors' program makes; `diffusers` has the defaults of diffusers' pipeline."""
    truncate_prompt: bool | None = None
    """Whether a prompt that is longer than the model reads is cut, with a warning, instead of refused. If omitted,
    it is the model's choice; most cut it."""

    __pydantic_fields__: ClassVar[Mapping[str, FieldInfo]]

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, arguments: ArgsKwargs, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Accept NumPy's numbers, and raise errors with their remedies."""
        values = arguments.kwargs or {}
        if any(isinstance(value, np.generic) for value in values.values()):
            plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
            arguments = ArgsKwargs(arguments.args, plain)
        try:
            return validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            if name not in cls.__pydantic_fields__:
                hint = did_you_mean(name, cls.__pydantic_fields__)
                raise TypeError(f"{cls.__name__} has no field {name!r}{hint}") from None
            raise InvalidRequest(explain_refusal(name, cls.__pydantic_fields__[name], first["input"]), name) from None

    def resolve(self, defaults: Defaults, preset: Mapping[str, Any] = MappingProxyType({})) -> "ResolvedRequest":
        """Fill every open field from a preset's settings, or from `defaults` where the preset leaves it open."""
        settings = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(defaults)}
        settings |= {"loras": (), **fill_second_scale(preset)}
        fields = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}
        if defaults.generate_audio is None and self.generate_audio is False:
            del fields["generate_audio"]  # False for a model without sound is the same as leaving the field out.
        if self.video is not None:
            settings["strength"] = STRENGTH
        return ResolvedRequest(**override(settings, fields))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values. Images are given by their sizes: pixels stay out of records."""
        fields = list_values(self)
        if isinstance(self.video, VideoContent):
            fields["video"] = str(self.video)
        for name in IMAGES:
            if isinstance(image := fields[name], Image.Image):
                fields[name] = f"{image.info.get('source', 'image')}, {image.width}x{image.height}"
        if self.references is not None:
            fields["references"] = [reference.to_json() for reference in parse_references(self.references) or ()]
        if self.loras is not None:
            # Fetched ones have their files' content, too.
            names = [field.name for field in dataclasses.fields(RequestedAdapter)]
            fields["loras"] = [{name: getattr(lora, name) for name in names} for lora in parse_adapters(self.loras)]
        return fields


@dataclass(frozen=True, kw_only=True)
class ResolvedRequest(GenerationRequest):
    """A request with no field left open, as stages take it.

    Attributes:
        hidden_frames: How many frames at the beginning aren't written, because the continued video ends with them.
        blended_frames: How many frames at the end aren't written, because the next segment shows them, blended with its
            own.
        keeps_tail: Whether the end of the video is kept (`wan_tpu.tail.Tail`), for the next segment.
        origin: Where its first frame, hidden or not, is in the video of all segments.

    Raises:
        TypeError: A field that `resolve` fills is missing.
    """

    # These are never None, which type checkers couldn't know otherwise.
    if TYPE_CHECKING:
        negative_prompt: str
        height: int
        width: int
        frames: int
        fps: float
        steps: int
        guidance_scale: float
        guidance_scale_2: float
        shift: float
        solver: str
        sigmas: tuple[float, ...] | None
    references: Annotated[tuple[Reference, ...], PlainValidator(parse_references)] | None = None
    loras: Annotated[tuple[RequestedAdapter, ...], PlainValidator(parse_adapters)] = ()
    hidden_frames: int = 0
    blended_frames: int = 0
    keeps_tail: bool = False
    origin: int = 0

    def __post_init__(self) -> None:
        if missing := [name for name in FILLED if getattr(self, name) is None]:
            raise TypeError(f"a resolved request leaves {', '.join(missing)} open")

    @property
    def written_frames(self) -> int | None:
        """How many frames are written at most; None for all that follow the hidden ones."""
        return self.frames - self.hidden_frames - self.blended_frames if self.blended_frames else None

    def without_files(self) -> Self:
        """Return the request without the content of images and videos; of references, their measures stay."""
        references = self.references and tuple(reference.without_source() for reference in self.references)
        return dataclasses.replace(self, image=None, last_image=None, video=None, references=references)

    def adapters_for(self, stage: str) -> tuple[RequestedAdapter, ...]:
        """Return the adapters that change the expert of a stage."""
        return tuple(adapter for adapter in self.loras if adapter.is_for(stage))


def fill_second_scale(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which the second expert has the first one's guidance, unless it has its own."""
    scale = {"guidance_scale_2": settings["guidance_scale"]} if "guidance_scale" in settings else {}
    return {**scale, **settings}


def override(settings: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with some of them overridden, and the rest of the schedule adjusted to match.

    Args:
        settings: Fields of a request, such as a preset's.
        fields: The fields that override them, as `GenerationRequest` has them.
    """
    merged, fields = dict(settings), fill_second_scale(fields)
    if merged.get("sigmas") is not None:
        merged["steps"] = len(merged["sigmas"])
    # A preset's noise levels and its switch of experts hold only for its own schedule.
    if any(fields.get(name, merged.get(name)) != merged.get(name) for name in ("steps", "shift", "sigmas")):
        merged |= {"sigmas": None, "switch_step": None}
    if fields.get("sigmas") is not None:
        merged["steps"] = len(fields["sigmas"])
    return merged | fields


def parse_size(text: str) -> tuple[int, int]:
    """Read WIDTHxHEIGHT into (height, width) in pixels; `GenerationRequest` checks the values.

    Raises:
        InvalidRequest: The text has another form, such as A*B, which programs read in either order.
    """
    sides = _SIZE.fullmatch(text)
    if sides is None:
        if (match := _SIZE.fullmatch(text.replace("*", "x"))) is not None:
            first, second = match.groups()
            raise InvalidRequest(
                f"size {text!r} doesn't say which side is which; write WIDTHxHEIGHT: {first}x{second} or "
                f"{second}x{first}",
                "size",
            )
        raise InvalidRequest(f"size {text[:40]!r} isn't WIDTHxHEIGHT; give one such as 1280x720 or 720x1280", "size")
    return int(sides[2]), int(sides[1])


def nearest_multiple(value: float, multiple: int) -> int:
    """Return the positive multiple of `multiple` that is nearest to `value`."""
    return max(multiple, round(value / multiple) * multiple)


FIELDS: Mapping[str, FieldInfo] = GenerationRequest.__pydantic_fields__
# The lowest and the highest value of each field that is a number.
LIMITS = {name: limits for name, field in FIELDS.items() if (limits := limits_of(field)) is not None}
