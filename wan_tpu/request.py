"""What a caller asks for: one frozen value, validated once, when it is made."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from wan_tpu.errors import InvalidRequest
from wan_tpu.lora import Lora, loras_of
from wan_tpu.media.image import load_image
from wan_tpu.schedules.magcache import Curve, magcache_of

NAMED_SIZES = ("1280x720", "720x1280", "832x480", "480x832")
SIZE_MULTIPLE = 16  # pixels: the VAE's 8 x the transformer's patch of 2 (TI2V 5B: 32, checked by the model)
# What is taken of each field that is a number, both ends included.
LIMITS: dict[str, tuple[float, float]] = {
    "height": (SIZE_MULTIPLE, 8192),
    "width": (SIZE_MULTIPLE, 8192),
    "frames": (1, 2001),
    "fps": (0.1, 240),
    "steps": (1, 1000),
    "guidance_scale": (0, 100),
    "guidance_scale_2": (0, 100),
    "shift": (0.01, 100),
    "seed": (0, 2**63 - 1),
    "switch_step": (0, 1000),
    "strength": (0.001, 1),
}
STRENGTH = 0.8  # of a video, as diffusers has it
IMAGES = ("image", "last_image")  # fields of a request that are pictures
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.ASCII)
FRAME_STRIDE = 4  # pixel frames a latent frame: the VAEs of every family compress time by four


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """The published sampling settings of a model, used where a request leaves a field open."""

    height: int
    width: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float
    shift: float
    solver: str


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named way to sample: what a request that names it takes where it says nothing itself.

    about     what it is, for people; source  where its numbers are from
    settings  fields of a request, by name
    """

    about: str
    source: str
    settings: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class CheckpointOverrides:
    """What a checkpoint itself says of how to sample it, in its wan_tpu.json.

    defaults  fields of `Defaults`, by name; presets  by name; curves  of MagCache
    """

    defaults: tuple[tuple[str, float], ...] = ()
    presets: tuple[tuple[str, Preset], ...] = ()
    curves: tuple[Curve, ...] = ()


NOTHING_OWN = CheckpointOverrides()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One video to make. Fields left `None` take the model's published settings (`resolve`).

    prompt            what is seen; may be empty; cut, with a warning, at the tokenizer's limit
    negative_prompt   what to steer away from; "" when left open; unused without guidance
    image             first frame: a path or a PIL image, resized to (height, width); RGB after construction
    last_image        last frame, likewise: the video leads from one to the other
    video             a file whose first `frames` frames the video begins as: restyled, not continued
    strength          how much of it is made anew: of so large a part of the steps; 0.8 where a video is given alone
    height, width     pixels, multiples of 16 (of 32 for Wan 2.2 TI2V 5B)
    frames            4n + 1, or what else the model takes
    fps               frames per second of the written video
    steps             denoising steps over both experts
    guidance_scale    classifier-free guidance of the high-noise expert, or of the only one; no expert has any when it
                      is at most 1.0
    guidance_scale_2  the same for the low-noise expert; `guidance_scale` when left open but that is given
    shift             timestep shift of the flow schedule
    seed              of the initial noise: `torch.Generator("cpu").manual_seed(seed)`, as diffusers draws it
    solver            one of the model's (`wan_tpu.spec.ModelSpec.solvers`)
    loras             adapters of the experts: `Lora`, its text or its fields (`wan_tpu.lora.lora_of`)
    sigmas            noise level of each step, falling, from at most 1; in place of what steps and shift make
    switch_step       the low-noise expert's first step, from 0; where left out, the boundary of the model says it
    cache             steps that reuse what the one before computed: "magcache" or with settings
                      (`wan_tpu.schedules.magcache`); lossy. None: none
    preset            a named way to sample (`wan_tpu.spec.ModelSpec.presets`): fills what is left open, adapters too

    Raises `InvalidRequest` naming the field, what is allowed and the nearest value that works.
    """

    prompt: str = ""
    negative_prompt: str | None = None
    image: str | Path | Image.Image | None = None
    last_image: str | Path | Image.Image | None = None
    video: str | Path | None = None
    strength: float | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    fps: float | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    shift: float | None = None
    seed: int = 0
    solver: str | None = None
    loras: Sequence[Lora | str | Mapping[str, Any]] | None = None
    sigmas: Sequence[float] | None = None
    switch_step: int | None = None
    cache: str | None = None
    preset: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):  # a numpy scalar is as good as a number
                object.__setattr__(self, field.name, value.item())
        for name in ("prompt", "negative_prompt"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "negative_prompt"):
                raise InvalidRequest(f"{name} is a {type(value).__name__}; give a string (it may be empty)", name)
            if value is not None and not _is_text(value):
                raise InvalidRequest(f"{name} {value!r} is no valid Unicode; is the terminal set to UTF-8?", name)
        for name in ("height", "width"):
            _check_size(name, getattr(self, name))
        for name in ("frames", "steps", "seed", "switch_step"):
            _check_integer(name, getattr(self, name))
        for name in ("fps", "shift", "guidance_scale", "guidance_scale_2", "strength"):
            _check_number(name, getattr(self, name))
        for name in ("solver", "preset", "cache"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest(f"{name} is a {type(getattr(self, name)).__name__}; give a name", name)
        if self.cache is not None:
            object.__setattr__(self, "cache", str(magcache_of(self.cache)))
        if self.sigmas is not None:
            object.__setattr__(self, "sigmas", _sigmas(self.sigmas))
        if self.loras is not None:
            object.__setattr__(self, "loras", loras_of(self.loras))
        if self.video is not None:
            if not isinstance(self.video, str | Path) or not Path(self.video).is_file():
                raise InvalidRequest(f"video {str(self.video)[:200]!r} is not a file; give the path of one", "video")
            object.__setattr__(self, "video", str(Path(self.video).absolute()))
        for name in IMAGES:
            if getattr(self, name) is not None:
                # The one normalisation: decoded here, so that a damaged file fails before any model is loaded.
                object.__setattr__(self, name, load_image(getattr(self, name)))

    def resolve(self, defaults: Defaults, preset: Mapping[str, Any] = MappingProxyType({})) -> "ResolvedRequest":
        """Fill every open field from a preset's, and what that leaves open from `defaults`."""
        filled = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(defaults)}
        filled |= {"negative_prompt": "", "loras": (), **both_scales(preset)}
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        given = both_scales({name: value for name, value in given.items() if value is not None})
        if filled.get("sigmas") is not None:
            filled["steps"] = len(filled["sigmas"])
        # A preset's noise levels and its switch of experts hold for its own schedule alone.
        if any(given.get(name, filled.get(name)) != filled.get(name) for name in ("steps", "shift", "sigmas")):
            filled |= {"sigmas": None, "switch_step": None}
        if self.video is not None:
            filled["strength"] = STRENGTH
        if self.sigmas is not None:
            filled["steps"] = len(self.sigmas)
        return ResolvedRequest(**filled | given)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; the image as its size only (pixels stay out of records)."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in IMAGES:
            if isinstance(image := fields[name], Image.Image):
                fields[name] = f"{image.info.get('source', 'image')}, {image.width}x{image.height}"
        if self.loras is not None:
            fields["loras"] = [dataclasses.asdict(lora) for lora in loras_of(self.loras)]
        return fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedRequest(GenerationRequest):
    """A request with nothing left open: what stages take."""

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
    loras: tuple[Lora, ...] = ()
    sigmas: tuple[float, ...] | None = None

    def loras_for(self, stage: str) -> tuple[Lora, ...]:
        """Return the adapters that change the expert of a stage."""
        return tuple(lora for lora in self.loras if lora.is_for(stage))


def both_scales(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which the first expert's guidance is the second's, too, unless that has its own."""
    scale = {"guidance_scale_2": settings["guidance_scale"]} if "guidance_scale" in settings else {}
    return {**scale, **settings}


def parse_size(text: str) -> tuple[int, int]:
    """Read WIDTHxHEIGHT into (height, width) in pixels; the values are checked by `GenerationRequest`.

    Raises:
        InvalidRequest: It is nothing of the kind, or A*B, which programs read in either order.
    """
    sides = _SIZE.fullmatch(text)
    if sides is None:
        if (starred := _SIZE.fullmatch(text.replace("*", "x"))) is not None:
            first, second = starred.groups()
            raise InvalidRequest(
                f"size {text!r} doesn't say which side is which; write WIDTHxHEIGHT: {first}x{second} or "
                f"{second}x{first}",
                "size",
            )
        raise InvalidRequest(f"size {text[:40]!r} is no WIDTHxHEIGHT; for example 1280x720, or 720x1280", "size")
    return int(sides[2]), int(sides[1])


def nearest_multiple(value: float, multiple: int) -> int:
    """Return the positive multiple of `multiple` that is nearest to `value`."""
    return max(multiple, round(value / multiple) * multiple)


def _sigmas(given: object) -> tuple[float, ...]:
    """Return noise levels as a tuple; raises `InvalidRequest`."""
    form = "give at most 1000 falling numbers from 1 to more than 0"
    if not isinstance(given, list | tuple | np.ndarray) or not 1 <= len(given) <= LIMITS["steps"][1]:
        raise InvalidRequest(f"sigmas is {str(given)[:60]}; {form}", "sigmas")
    values = [one.item() if isinstance(one, np.generic) else one for one in given]
    if any(isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one) for one in values):
        raise InvalidRequest(f"sigmas has something that is no number; {form}", "sigmas")
    for before, here in zip([math.nextafter(1, 2), *values], values, strict=False):
        if not 0 < here < before:
            raise InvalidRequest(f"sigmas has {here:g} after {before:g}; {form}", "sigmas")
    return tuple(map(float, values))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_integer(name: str, value: object) -> None:
    lowest, highest = LIMITS[name]
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {value!r}; give an integer from {lowest} to {highest}", name)
    if not lowest <= value <= highest:
        nearest = min(max(value, lowest), highest)
        raise InvalidRequest(f"{name} is {value}; allowed are {lowest} to {highest}, nearest {nearest}", name)


def _check_number(name: str, value: object) -> None:
    at_least, at_most = LIMITS[name]
    if value is None:
        return
    allowed = f"{at_least:g} to {at_most:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value!r}; give a finite number from {allowed}", name)
    if not at_least <= value <= at_most:
        nearest = min(max(value, at_least), at_most)
        raise InvalidRequest(f"{name} is {value:g}; allowed are {allowed}, nearest {nearest:g}", name)


def _check_size(name: str, value: object) -> None:
    _check_integer(name, value)
    if isinstance(value, int) and value % SIZE_MULTIPLE:
        nearest = nearest_multiple(value, SIZE_MULTIPLE)
        raise InvalidRequest(f"{name} is {value}; it must be a multiple of {SIZE_MULTIPLE}, nearest {nearest}", name)
