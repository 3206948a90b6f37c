"""The API's description of the model: what it makes, and what requests may contain."""

import dataclasses
from typing import Literal

from actors.api.core.create_video import NAMES
from actors.api.http.objects import Object
from actors.api.settings import ServiceSettings
from wan_tpu.families import family_of_spec
from wan_tpu.request import LIMITS, Preset
from wan_tpu.spec import ModelSpec


class Limits(Object):
    """The lowest and the highest value of a field."""

    minimum: int | float
    """The lowest value that is taken."""
    maximum: int | float
    """The highest value that is taken."""


class PresetModel(Object):
    """A named way to sample: what it is, where its numbers are from, and what it sets, by a request's fields."""

    name: str
    """What a request writes in `preset`."""
    about: str
    """What it is for."""
    source: str
    """Where its numbers are from."""
    settings: dict[str, bool | float | str | list[float]]
    """What it sets, by a request's fields."""
    with_references: bool
    """Whether it is only for requests with `input_references`."""


class Model(Object):
    """What a model makes, and how: OpenAI's model object; fields after `owned_by` are extensions."""

    id: str
    """What a request writes in `model`."""
    alias_of: str | None
    """The model for which this name stands; null where it is the model's own."""
    object: Literal["model"] = "model"
    created: int
    """Unix seconds, when this process began to offer it."""
    owned_by: Literal["wan-tpu"] = "wan-tpu"
    display_name: str | None
    """The name that the licence of its weights asks user interfaces to show; null where it asks for none."""
    tasks: list[str]
    """`t2v`: videos of a text; `i2v`: of an image and a text."""
    last_frames: str
    """Whether a video may end with an image: `none`; `optional` or `required` beside a first frame; `alone`, too."""
    takes_video: bool
    """Whether a video may begin as another one, with `video` and, unless `continues_video`, `strength`."""
    continues_video: bool
    """Whether it then goes on after that one, with its motion, instead of changing its frames."""
    continues_motion: bool
    """Whether segments of `next_prompts` go on with the motion and the sound of the one before (`continue_by`)."""
    references: dict[str, int]
    """How many `input_references` of each kind a video may have: `image`, `video`, `audio`; empty if it takes none.

    The sound of `follows_sound` isn't counted.
    """
    most_references: int
    """How many it may have in all."""
    follows_sound: bool
    """Whether one sound among the `input_references` may become the video's, with `audio_mode` `lock_source`."""
    follows_sound_from_image: bool
    """Whether such a video may also begin with an image, the `input_reference`."""
    stages: list[str]
    """The stages that a video passes, in order."""
    defaults: dict[str, bool | float | str]
    """What fields have that a request omits."""
    sizes: list[str]
    """Sizes that are usual; others are taken too."""
    follows_image: bool
    """Whether a video without `size` has its image's shape."""
    limits: dict[str, Limits]
    """The lowest and highest value of each field that is a number and that the model has."""
    size_multiple: int
    """Both sides are multiples of this many pixels."""
    frame_step: int
    """A video has `frame_offset` frames more than a multiple of this."""
    frame_offset: int
    """Frames of the shortest video."""
    audio_rate: int | None
    """Samples per second of its videos' sound; null where they have none."""
    solvers: list[str]
    """What `solver` may be; the first is used unless a request names another."""
    largest: list[dict[str, int | str]] | None
    """The largest sizes that the slices have memory for; null where any is taken."""
    aliases: list[str]
    """Other names that `model` may have."""
    cache: str | None
    """What `cache` may be, with its usual settings; null where the model has none. It may need a preset."""
    presets: list[PresetModel]
    """Named ways to sample."""
    loras: list[str]
    """Names of adapters."""


class ModelList(Object):
    """All names that `model` may have."""

    object: Literal["list"] = "list"
    data: list[Model]
    """The model, of which a service has one, and then its aliases."""


def describe_model(settings: ServiceSettings, spec: ModelSpec, created: int, name: str = "") -> Model:
    """Return the API's description of a service's model, or of the `name` that is its alias."""
    # Videos have a rate of frames also where a request can't choose it.
    unused = {*spec.unused} - {"fps"}
    defaults = {name: value for name, value in dataclasses.asdict(spec.defaults).items() if name not in unused}
    limits = {name: value for name, value in LIMITS.items() if name not in unused}
    if "fps" in spec.unused:
        limits["fps"] = spec.defaults.fps, spec.defaults.fps
    longest = limits["frames"][1]
    limits["frames"] = spec.frame_offset, min(longest, spec.nearest_frames(longest))
    height, width = defaults.pop("height"), defaults.pop("width")
    family = family_of_spec(spec)
    return Model(
        id=name or settings.model,
        alias_of=settings.model if name not in ("", settings.model) else None,
        created=created,
        display_name=None if family is None else family.display_name or None,
        tasks=list(spec.tasks),
        last_frames=spec.last_images,
        takes_video=spec.takes_video,
        continues_video=spec.continues_video,
        continues_motion=spec.continues_video or spec.overlap is not None,
        references=dict(spec.reference_counts),
        most_references=spec.most_references,
        follows_sound=spec.follows_sound,
        follows_sound_from_image=spec.follows_sound_from_image,
        stages=list(spec.stages),
        defaults={"size": f"{width}x{height}"} | {NAMES.get(field, field): value for field, value in defaults.items()},
        sizes=[f"{w}x{h}" for h, w in spec.usual_sizes],
        follows_image=spec.follows_image,
        limits={NAMES.get(name, name): Limits(minimum=low, maximum=high) for name, (low, high) in limits.items()},
        size_multiple=spec.size_multiple,
        frame_step=spec.frame_step,
        frame_offset=spec.frame_offset,
        audio_rate=spec.audio_rate,
        solvers=list(spec.solvers),
        largest=[{"size": f"{w}x{h}", "num_frames": n} for h, w, n in settings.largest] or None,
        aliases=list(settings.aliases),
        cache=next((str(curve.defaults) for curve in spec.curves), None),
        presets=[_preset(name, preset) for name, preset in settings.catalogue.list_presets(spec).items()],
        loras=list(settings.catalogue.adapters),
    )


def _preset(name: str, preset: Preset) -> PresetModel:
    settings = {NAMES.get(field, field): value for field, value in preset.settings if field != "loras"}
    return PresetModel(
        name=name, about=preset.about, source=preset.source, settings=settings, with_references=preset.with_references
    )
