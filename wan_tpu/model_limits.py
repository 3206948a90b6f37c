"""The limits of what a model can make, and the checks that refuse other requests. Imports no JAX and no torch."""

import abc
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from wan_tpu.errors import InvalidRequest
from wan_tpu.media.image import describe_fit, size_at_area
from wan_tpu.reference import BEGINNINGS, ENDS, GOAL, SOUNDTRACK, UNREAD, Reference
from wan_tpu.request import NAMED_SIZES, Defaults, ResolvedRequest, nearest_multiple, parse_size
from wan_tpu.suggest import did_you_mean
from wan_tpu.tail import Overlap, Tail

# Returns all published models. `wan_tpu.families` sets it, whose files import this one.
list_models: Callable[[], Iterable["ModelLimits"]] = tuple
FULL_STRENGTH = 1.0  # The strength when a video is continued: every step runs.


class ModelLimits(abc.ABC):
    """The sizes, lengths, inputs and settings that a model takes."""

    name: str  # Name of the published model, or a description of a model that isn't one of them.
    tasks: tuple[str, ...]  # Which of "t2v" (text to video) and "i2v" (image and text to video) the model supports.
    defaults: Defaults  # The model's published sampling settings.
    solvers: tuple[str, ...]  # Names of the model's schedulers, the published one first.
    frame_stride: int = 4  # Video frames per latent frame.
    frame_offset: int = 1  # Frames of the shortest video; longer ones have a multiple of `frame_step` more.
    audio_rate: int | None = None  # Samples per second of the model's sound; None for models without sound.
    # Whether a request may or must have a last frame as well as a first one, or may have a last frame only.
    last_images: Literal["none", "optional", "required", "alone"] = "none"
    adapts_text: bool = False  # Whether a request's adapters may change how its prompts are encoded.
    # Whether a prompt that is longer than the model reads is cut, unless a request says otherwise.
    cuts_prompts: bool = True
    takes_video: bool = False  # Whether a request may start from a video's frames.
    # Whether the new video then continues after those frames instead of changing them. Such a request has no strength.
    continues_video: bool = False
    # How many references of each kind a request may have; empty if the model takes none.
    reference_counts: Mapping[str, int] = MappingProxyType({})
    most_references: int = 0  # How many it may have in all.
    chooses_length: bool = False  # Whether the model chooses the length of a video whose request leaves it open.
    # How a video overlaps with the one that it continues with its motion and sound; None if the model can't do that.
    overlap: Overlap | None = None
    vae: str = ""  # Tells its VAE from others of the family whose latents have the same shape; never changed.
    follows_sound: bool = False  # Whether a sound may be given that becomes the video's.
    follows_sound_from_image: bool = False  # Whether such a video may also begin with an image.

    @property
    def takes_references(self) -> bool:
        """Whether a request may have references."""
        return bool(self.reference_counts)

    @property
    @abc.abstractmethod
    def denoise_stages(self) -> tuple[str, ...]:
        """The stages between encoder and decoder."""

    @property
    @abc.abstractmethod
    def expert_stages(self) -> tuple[str, ...]:
        """The stages of all experts, also of those that only some requests need."""

    @property
    @abc.abstractmethod
    def size_multiple(self) -> int:
        """The number of pixels that heights and widths must be multiples of."""

    @property
    def makes_sound(self) -> bool:
        """Whether videos may have sound."""
        return self.audio_rate is not None

    @property
    def unused(self) -> tuple[str, ...]:
        """Settings of a request that this model doesn't have."""
        of_two_experts = ("guidance_scale_2", "switch_step") if len(self.denoise_stages) == 1 else ()
        of_sound = () if self.audio_rate is not None else ("generate_audio",)
        return *of_two_experts, *of_sound, *(() if self.chooses_length else ("max_seconds",))

    @property
    def frame_step(self) -> int:
        """The difference between one valid video length and the next, in frames."""
        return self.frame_stride

    @property
    def follows_image(self) -> bool:
        """Whether a video takes the shape of its image unless the request sets another."""
        return "i2v" in self.tasks

    @property
    def image_counts(self) -> tuple[int, ...]:
        """The numbers of images that a request may have; the first is the usual number, or 0 without image support."""
        if "i2v" not in self.tasks:
            return (0,)
        if self.last_images == "required":
            return (2,)
        return (1, *((0,) if "t2v" in self.tasks else ()), *(() if self.last_images == "none" else (2,)))

    @property
    def shape_slack(self) -> int:
        """How many pixels a side may differ from the image's shape before the image is cropped.

        Rounding to multiples causes differences of up to that much; such an image is stretched, as in diffusers'
        examples and in Wan's program.
        """
        return self.size_multiple

    @property
    def usual_sizes(self) -> list[tuple[int, int]]:
        """Suggested (height, width) pairs: the model's own, and common ones that it can make and that are no larger."""
        height, width = self.defaults.height, self.defaults.width
        usual = [(h, w) for h, w in map(parse_size, NAMED_SIZES) if h * w <= height * width]
        sizes = dict.fromkeys([(height, width), (width, height), *usual])
        return [(h, w) for h, w in sizes if not h % self.size_multiple and not w % self.size_multiple]

    def size_like(self, picture: tuple[int, int], preset: str | None = None) -> tuple[int, int]:
        """Return the (height, width) of a video that takes the shape of an image.

        Args:
            picture: (height, width) of the image.
            preset: The request's, as families whose authors compute it otherwise than diffusers need.
        """
        return size_at_area(self.defaults.height * self.defaults.width, picture, self.size_multiple)

    def size_to_extend(self, picture: tuple[int, int]) -> tuple[int, int]:
        """Return the (height, width) of a clip that continues a video, given that video's (height, width).

        It is the video's own size, so that its frames needn't be encoded again, or the nearest size that the model can
        make. A video with larger frames than the model's own is shrunk to the model's number of pixels.
        """
        height, width = (nearest_multiple(side, self.size_multiple) for side in picture)
        is_larger = height * width > self.defaults.height * self.defaults.width
        return self.size_like(picture) if is_larger else (height, width)

    def nearest_frames(self, frames: float) -> int:
        """Return the video length, in frames, that this model makes and that is nearest to `frames`."""
        steps = max(0, round((frames - self.frame_offset) / self.frame_step))
        return self.frame_offset + steps * self.frame_step

    def latent_frames(self, frames: int) -> int:
        """Return how many latent frames a video of that many frames has."""
        return (frames - self.frame_offset) // self.frame_stride + 1

    def may_have_image(self, references: Sequence[Reference] | None) -> bool:
        """Return whether a request with these references may also begin with an image."""
        is_sound_alone = all(reference.kind == SOUNDTRACK for reference in references or ())
        return is_sound_alone and (self.follows_sound_from_image or not references)

    def first_step(self, request: ResolvedRequest) -> int:
        """Return the first step that is run; the strength of a request's video skips the steps before it."""
        return 0 if request.strength is None else request.steps - int(request.steps * request.strength)

    def may_cut(self, request: ResolvedRequest) -> bool:
        """Return whether a request's prompt is cut if it is longer than the model reads; otherwise it is refused."""
        return self.cuts_prompts if request.truncate_prompt is None else request.truncate_prompt

    def describe_fit(self, request: ResolvedRequest, name: str, picture: tuple[int, int]) -> list[str]:
        """Return a warning if an image or a video of a (height, width) is stretched or cropped to the video's shape."""
        warning = describe_fit(name, picture, (request.height, request.width), self.shape_slack)
        return [] if warning is None else [warning]

    def check(self, request: ResolvedRequest, *, image: bool, last: bool, video: bool | None = None) -> None:
        """Refuse a request that this model can't make.

        Args:
            video: Whether it starts from a video, in case the request no longer holds the video itself.

        Raises:
            InvalidRequest: It names the field, what is allowed and the nearest value that works.
        """
        video = request.video is not None if video is None else video
        self._check_inputs(request, image=image, last=last, video=video)
        self._check_settings(request)
        self.check_cache(request)
        self.check_size(request)

    @abc.abstractmethod
    def check_cache(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest` when steps can't be skipped as the request's `cache` asks."""

    def check_size(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest`, with the nearest size that works, when the model can't make videos of that size."""
        for name in ("height", "width"):
            value, multiple = getattr(request, name), self.size_multiple
            if value % multiple:
                nearest = nearest_multiple(value, multiple)
                raise InvalidRequest(
                    f"{name} is {value}; {self.name} needs a multiple of {multiple}, nearest {nearest}", name
                )

    def check_extension(self, request: ResolvedRequest | None = None) -> None:
        """Refuse to continue a video where the model can't, or with a request that doesn't make a new frame.

        Raises:
            InvalidRequest: It says what to do instead.
        """
        if "i2v" not in self.tasks:
            raise InvalidRequest(
                f"a video is continued from its last frame, and {self.name} takes no image; use an I2V checkpoint",
                "video",
            )
        if request is not None and request.frames < 2:
            least = self.nearest_frames(1 + self.frame_step)
            raise InvalidRequest(
                f"frames is {request.frames}, but the first of them repeats the last frame of the video; give at "
                f"least {least}",
                "frames",
            )

    def check_source(self, frames: int) -> None:
        """Raise `InvalidRequest` if this model can't continue the motion of a video with that many frames."""
        if frames < self.frame_offset:
            raise InvalidRequest(
                f"the video has {frames} frames, and {self.name} needs at least {self.frame_offset} to continue it; "
                "give a longer video, or an image",
                "video",
            )

    def _check_inputs(self, request: ResolvedRequest, *, image: bool, last: bool, video: bool) -> None:
        """Refuse images and videos that the model doesn't take, and requests without those that it needs."""
        if request.references is not None:
            self._check_references(request, request.references, image=image, last=last, video=video)
        elif request.reference_size is not None:
            raise InvalidRequest("reference_size was given without references; leave it out", "reference_size")
        self._check_images(request, image=image, last=last)
        if video and (image or last or not self.takes_video):
            why = "both a video and an image were given; give one of them"
            if not self.takes_video:
                why = f"video was given, but {self.name} doesn't take one; use {name_models(takes_video=True)}"
            raise InvalidRequest(why, "video")
        if request.strength is not None:
            if not video:
                raise InvalidRequest(
                    "strength was given without a video; give a video, or leave strength out", "strength"
                )
            if self.continues_video and request.strength != FULL_STRENGTH:
                raise InvalidRequest(
                    f"strength is {request.strength:g}, but {self.name} continues a video without changing it; "
                    "leave strength out",
                    "strength",
                )
            if self.first_step(request) == request.steps:
                least = 1 / request.steps
                raise InvalidRequest(
                    f"strength is {request.strength:g}, which leaves none of the {request.steps} steps; give at "
                    f"least {least:.3g}",
                    "strength",
                )

    def _check_references(
        self, request: ResolvedRequest, references: Sequence[Reference], *, image: bool, last: bool, video: bool
    ) -> None:
        """Refuse references that the model doesn't take."""
        read = [reference.kind for reference in references if reference.kind not in UNREAD]
        if not self.takes_references and (read or (self.overlap is None and not self.follows_sound)):
            able = name_models(takes_references=True)
            instead = (
                f"use {able}" if self.name not in able else "add the transformer for them to checkpoint and layout"
            )
            if self.follows_sound:
                beside = " and a first frame as image" if self.follows_sound_from_image else ""
                sound = "a single sound as soundtrack:PATH (in the API: with audio_mode lock_source)"
                instead = f"give {sound}{beside}, or {instead}"
            raise InvalidRequest(
                f"references were given, but {self.name} takes none here; leave them out, or {instead}", "references"
            )
        given = {"image": image and not self.may_have_image(references), "last_image": last, "video": video}
        if other := next((name for name, is_refused in given.items() if is_refused), None):
            is_read = ("video" if other == "video" else "image") in self.reference_counts
            instead = f", or {other} as one of the references" if is_read else ""
            raise InvalidRequest(
                f"references and {other} were given, but {self.name} takes one of them; leave one out{instead}",
                "references",
            )
        self.check_reference_kinds(read)
        others = [reference for reference in references if reference.kind != SOUNDTRACK]
        for index, reference in enumerate(others):
            if reference.kind in ENDS:
                self._check_tail(request, reference, is_last=index >= len(read))
        for ends, place in ((BEGINNINGS, "begins"), ((GOAL,), "ends")):
            if sum(reference.kind in ends for reference in references) > 1:
                raise InvalidRequest(
                    f"references has several ends of videos that this one {place} with; give one", "references"
                )
        tracks = len(references) - len(others)
        if tracks > int(self.follows_sound):
            able = "takes one at most" if self.follows_sound else "can't follow a given sound"
            raise InvalidRequest(f"references has {tracks} of kind soundtrack; {self.name} {able}", "references")
        if tracks and request.generate_audio is False:
            raise InvalidRequest(
                "references has a soundtrack, but generate_audio is false; leave one of them out", "generate_audio"
            )
        if tracks and len(others) > len(read):
            raise InvalidRequest(
                "references has a soundtrack and the end of a video, whose sound goes on; leave one of them out",
                "references",
            )
        if request.reference_size is not None and "image" not in read:
            raise InvalidRequest(
                "reference_size was given without an image among references; leave it out", "reference_size"
            )

    def _check_tail(self, request: ResolvedRequest, tail: Reference, *, is_last: bool) -> None:
        """Refuse the end of a video that this one can't continue."""
        if self.overlap is None:
            raise InvalidRequest(
                f"references has the end of a video, and {self.name} can't continue its motion; give its last frame as "
                "image",
                "references",
            )
        if tail.frames != self.overlap.frames:
            raise InvalidRequest(
                f"the video that is continued has {tail.frames} frames; {self.name} needs at least "
                f"{self.overlap.frames}",
                "references",
            )
        made_by = tail.source.vae if isinstance(tail.source, Tail) else ""
        if made_by and made_by != self.vae:
            raise InvalidRequest(
                f"references has the end of a video of another model, whose latents aren't those of {self.name}; give "
                "one that this model has made, or its mp4 as continued",
                "references",
            )
        if not is_last:
            raise InvalidRequest("references has the end of a video before another one; put it last", "references")
        if request.frames <= self.overlap.frames:
            least = self.nearest_frames(self.overlap.frames + self.frame_step)
            place, other = ("last", "behind") if tail.kind == GOAL else ("first", "that is continued")
            raise InvalidRequest(
                f"frames is {request.frames}, but the {place} {self.overlap.frames} are those of the video {other}; "
                f"give at least {least}",
                "frames",
            )
        rate = tail.source.fps if isinstance(tail.source, Tail) else 0
        if rate and request.fps != rate:
            raise InvalidRequest(
                f"fps is {request.fps:g}, but the video that is continued has {rate:g}; give that", "fps"
            )
        size, needed = f"{request.width}x{request.height}", f"{tail.width}x{tail.height}"
        if size != needed:
            raise InvalidRequest(f"the size is {size}, but the video that is continued has {needed}; give that", "size")

    def check_reference_kinds(self, kinds: Sequence[str]) -> None:
        """Raise `InvalidRequest` if the model, which takes references, doesn't take so many of these kinds."""
        counts = collections.Counter(kinds)
        for kind, count in counts.items():
            most = self.reference_counts.get(kind, 0)
            if count > most:
                hint = did_you_mean(kind, self.reference_counts)
                most_text = f"at most {most}" if most else f"none{hint}, only {', '.join(self.reference_counts)}"
                raise InvalidRequest(
                    f"references has {count} of kind {kind}; {self.name} takes {most_text}", "references"
                )
        if len(kinds) > self.most_references:
            raise InvalidRequest(
                f"there are {len(kinds)} references; {self.name} takes at most {self.most_references}", "references"
            )
        if set(counts) == {"audio"}:
            raise InvalidRequest(
                f"references has only sound; {self.name} needs an image or a video with it", "references"
            )

    def _check_images(self, request: ResolvedRequest, *, image: bool, last: bool) -> None:
        """Refuse first and last frames that the model doesn't take, and requests without those that it needs."""
        if image and "i2v" not in self.tasks:
            raise InvalidRequest(
                f"image was given, but {self.name} makes videos from texts only; leave it out, or use a model for "
                "images (I2V)",
                "image",
            )
        if not image and not last and "t2v" not in self.tasks:
            raise InvalidRequest(f"image is missing, and {self.name} makes videos from images only; give one", "image")
        if last and self.last_images == "none":
            takes = "only a first frame" if "i2v" in self.tasks else "no image"
            raise InvalidRequest(
                f"last_image was given, but {self.name} takes {takes}; leave it out, or use a checkpoint for first and "
                "last frames",
                "last_image",
            )
        if last and not image and self.last_images != "alone":
            raise InvalidRequest(
                f"last_image was given without image, but {self.name} needs both a first and a last frame; give "
                f"image too, or use {name_models(last_images='alone')}, which takes a last frame alone",
                "last_image",
            )
        if not last and self.last_images == "required":
            raise InvalidRequest(
                f"last_image is missing; {self.name} needs both a first and a last frame", "last_image"
            )
        if image and last and request.frames == 1:
            least = self.nearest_frames(1 + self.frame_step)
            raise InvalidRequest(
                f"frames is 1, but a first and a last frame were given; give at least {least}", "frames"
            )

    def _check_settings(self, request: ResolvedRequest) -> None:
        """Refuse sampling settings that the model doesn't have, or that contradict each other."""
        if request.solver not in self.solvers:
            raise InvalidRequest(
                f"solver {request.solver!r} is unknown{did_you_mean(request.solver, self.solvers)}; choose one of "
                f"{', '.join(self.solvers)}",
                "solver",
            )
        nearest = self.nearest_frames(request.frames)
        if request.frames != nearest:
            form = f"{self.frame_step}n + {self.frame_offset}"
            form += f", up to {nearest}" if request.frames - nearest > self.frame_step / 2 else ""
            raise InvalidRequest(f"frames is {request.frames}; it must be {form}, nearest {nearest}", "frames")
        if request.generate_audio and self.audio_rate is None:
            raise InvalidRequest(
                f"generate_audio is true, but {self.name} makes no sound; leave it out, or use "
                f"{name_models(makes_sound=True)}",
                "generate_audio",
            )
        for adapter in request.loras:
            if not any(map(adapter.is_for, self.expert_stages)):
                raise InvalidRequest(
                    f"{adapter} is for an expert that {self.name} doesn't have; leave @{adapter.expert} out", "loras"
                )
        for name in self.unused:
            value, usual = getattr(request, name), getattr(self.defaults, name, None)
            is_derived = name == "guidance_scale_2" and value == request.guidance_scale
            if value != usual and not is_derived:
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                text = f"{value:g}" if is_number else str(value)[:60]
                has = f"supports only {usual:g}" if name == "fps" else "doesn't use it"
                instead = "; guidance_scale applies to all of its steps" if name == "guidance_scale_2" else ""
                raise InvalidRequest(f"{name} is {text}; {self.name} {has}: leave it out{instead}", name)
        if request.sigmas is not None and len(request.sigmas) != request.steps:
            raise InvalidRequest(
                f"sigmas has {len(request.sigmas)} noise levels, but steps is {request.steps}; leave steps out",
                "sigmas",
            )
        if request.switch_step is not None and request.switch_step > request.steps:
            raise InvalidRequest(
                f"switch_step is {request.switch_step}, but there are {request.steps} steps; allowed: 0 to "
                f"{request.steps}",
                "switch_step",
            )


def name_models(**abilities: object) -> str:
    """Return the names of the published models whose attributes have these values."""
    models = list_models()
    able = [model.name for model in models if all(getattr(model, name) == abilities[name] for name in abilities)]
    return " or ".join(filter(None, [", ".join(able[:-1]), *able[-1:]]))
