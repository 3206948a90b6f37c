"""What a model can make, and what a request asks of which stage: known from its configuration. No JAX, no torch.

Every process opens a spec (`wan_tpu.families.open_spec`) or is given one: commands, drivers, ingresses, workers. A
family says how its models differ (`families/<name>/spec.py`); what all of them share is here.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image

from wan_tpu.errors import InvalidRequest
from wan_tpu.media.image import size_at_area
from wan_tpu.plan import DECODER, ENCODER, Expert, RequestPlan
from wan_tpu.request import (
    FRAME_STRIDE,
    NAMED_SIZES,
    NOTHING_OWN,
    CheckpointOverrides,
    Defaults,
    GenerationRequest,
    Preset,
    ResolvedRequest,
    nearest_multiple,
    parse_size,
)
from wan_tpu.schedules.magcache import Curve, magcache_of, skipped
from wan_tpu.schedules.schedule import Schedule
from wan_tpu.suggest import did_you_mean


class ModelSpec(abc.ABC):
    """A model as its configuration describes it: picklable, compared by value.

    name        of the published model, or what it is called when it is none of these
    tasks       which of "t2v" (text to video) and "i2v" (image and text to video) it does
    components  stage -> names of the components that it runs, in the order in which a request passes the stages
    defaults    its published sampling settings
    solvers     names of its schedulers, the published one first
    frame_step  how many frames a video may be longer than another: it has a multiple of them, and one
    heads       attention heads of a transformer
    own         what the checkpoint itself says of how to sample it
    boundary_ratio  the first of two experts runs the steps with t >= boundary_ratio x 1000; None with one expert
    last_images  whether a request may, or must, have a last frame, too
    takes_video  whether a request may begin with a video's frames
    shape_slack  by how many pixels a side may differ from the image's shape: an image that differs more is cropped
    """

    name: str
    tasks: tuple[str, ...]
    components: dict[str, tuple[str, ...]]
    defaults: Defaults
    solvers: tuple[str, ...]
    frame_step: int = FRAME_STRIDE
    heads: int
    own: CheckpointOverrides = NOTHING_OWN
    boundary_ratio: float | None
    last_images: Literal["none", "optional", "required"] = "none"
    takes_video: bool = False

    @property
    def stages(self) -> tuple[str, ...]:
        """All stages, in the order in which a request passes them."""
        return tuple(self.components)

    @property
    def denoise_stages(self) -> tuple[str, ...]:
        """The stages between encoder and decoder."""
        return self.stages[1:-1]

    @property
    def unused(self) -> tuple[str, ...]:
        """Settings of a request that mean nothing to this model."""
        return ("guidance_scale_2", "switch_step") if len(self.denoise_stages) == 1 else ()

    @property
    def follows_image(self) -> bool:
        """Whether a video has the shape of its image unless a request says another."""
        return "i2v" in self.tasks

    def size_like(self, picture: tuple[int, int]) -> tuple[int, int]:
        """Return the (height, width) of a video that follows an image of such a (height, width)."""
        return size_at_area(self.defaults.height * self.defaults.width, picture, self.size_multiple)

    @property
    def shape_slack(self) -> int:
        """What rounding to multiples leaves: so much is stretched, as in diffusers' examples and in Wan's program."""
        return self.size_multiple

    @property
    def presets(self) -> Mapping[str, Preset]:
        """Named ways to sample beside the model's defaults: published ones, and the checkpoint's own."""
        return dict(self.own.presets)

    def defaults_for(self, request: GenerationRequest, picture: tuple[int, int] | None) -> Defaults:
        """Return what fills a request's open fields; picture: (height, width) of its image or video, if known.

        Where the request leaves the size open, it has that shape; where it leaves one side open, that side follows.
        """
        follows = self.follows_image or request.video is not None
        if picture is None or not follows or None not in (request.height, request.width):
            return self.defaults
        height, width = self.size_like(picture)
        if request.height is not None:
            width = nearest_multiple(request.height * picture[1] / picture[0], self.size_multiple)
        if request.width is not None:
            height = nearest_multiple(request.width * picture[0] / picture[1], self.size_multiple)
        return dataclasses.replace(self.defaults, height=height, width=width)

    def first_step(self, request: ResolvedRequest) -> int:
        """Return the first step that is run: with a video not all are, by its strength."""
        return 0 if request.strength is None else request.steps - int(request.steps * request.strength)

    @property
    def curves(self) -> Sequence[Curve]:
        """How the model's residuals change, of each schedule that it was measured for: by them MagCache decides."""
        return ()

    def _curve_of(self, request: ResolvedRequest) -> Curve | None:
        """Return the curve that holds for a request's schedule."""
        if request.sigmas is None:
            schedule = (None, request.shift, self.boundary_ratio, request.solver)
            of_shift = (c for c in self.curves if (c.sigmas, c.shift, c.boundary, c.solver) == schedule)
            return next(of_shift, None)
        experts = self.experts(request)
        first_low = experts[1].start if len(experts) > 1 else None
        given = (request.sigmas, first_low, request.solver)
        return next((c for c in self.curves if (c.sigmas, c.first_low, c.solver) == given), None)

    def skipped(self, request: ResolvedRequest) -> np.ndarray | None:
        """Return which branches of which steps reuse what was computed before, bool [S, 2]; None without a cache."""
        if request.cache is None:
            return None
        curve = self._curve_of(request)
        assert curve is not None
        phases = [(expert.start, expert.stop) for expert in self.experts(request)]
        return skipped(curve, magcache_of(request.cache), phases)

    def skipped_steps(self, request: ResolvedRequest) -> list[int]:
        """Return which steps, from 1, compute no block: in every branch that there is."""
        found = self.skipped(request)
        if found is None:
            return []
        branches = {i: 2 if one.guided else 1 for one in self.experts(request) for i in range(one.start, one.stop)}
        return [i + 1 for i in range(request.steps) if found[i, : branches[i]].all()]

    def _check_cache(self, request: ResolvedRequest) -> None:
        """Refuse a cache whose curve isn't known, or is of another schedule."""
        if request.cache is None:
            return
        if request.strength is not None or (request.switch_step is not None and request.sigmas is None):
            raise InvalidRequest(
                f"cache is {request.cache}; its curve is of a whole schedule, not of strength, nor of another "
                "switch_step without sigmas",
                "cache",
            )
        if self._curve_of(request) is not None:
            return
        remedy = "measure one with wan-tpu calibrate, or leave it out"
        others = [curve for curve in self.curves if curve.sigmas is None]
        if request.sigmas is not None or not others:
            of = self.name if request.sigmas is None else f"{self.name} with these sigmas and this switch of experts"
            raise InvalidRequest(f"cache is {request.cache}, and no curve of {of} is known; {remedy}", "cache")
        wanted = [(curve.shift, curve.solver) for curve in others]
        settings = {name: dict(preset.settings) for name, preset in self.presets.items()}
        presets = [name for name, said in settings.items() if (said.get("shift"), said.get("solver")) in wanted]
        remedy = f"give preset {' or '.join(presets)}, {remedy}" if presets else remedy
        known = " and ".join(f"shift {curve.shift:g} and solver {curve.solver}" for curve in others)
        raise InvalidRequest(
            f"cache is {request.cache}, whose curve holds for {known}; here they are {request.shift:g} and "
            f"{request.solver}: {remedy}",
            "cache",
        )

    @property
    def usual_sizes(self) -> list[tuple[int, int]]:
        """(height, width): the model's own, and the usual ones that it can make and that are no larger."""
        height, width = self.defaults.height, self.defaults.width
        usual = [(h, w) for h, w in map(parse_size, NAMED_SIZES) if h * w <= height * width]
        sizes = dict.fromkeys([(height, width), (width, height), *usual])
        return [(h, w) for h, w in sizes if not h % self.size_multiple and not w % self.size_multiple]

    @property
    @abc.abstractmethod
    def size_multiple(self) -> int:
        """What heights and widths are multiples of, pixels."""

    def check_size(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest`, with the nearest that works, when the model can't make videos of that size."""
        for name in ("height", "width"):
            value, multiple = getattr(request, name), self.size_multiple
            if value % multiple:
                nearest = nearest_multiple(value, multiple)
                raise InvalidRequest(
                    f"{name} is {value}; {self.name} needs a multiple of {multiple}, nearest {nearest}", name
                )

    @abc.abstractmethod
    def latent_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of a request's latents."""

    def decoded_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of the latents that are decoded, those that are denoised unless a family says so."""
        return self.latent_shape(request)

    def decoder_chunks(self, latent_frames: int) -> tuple[int, ...]:
        """Return how many latent frames of a video the decoder takes at a time; one unless a family says otherwise."""
        return (1,) * latent_frames

    @abc.abstractmethod
    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the transformer's sequence length for latents of a shape."""

    @abc.abstractmethod
    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the numbers of every step of a resolved request."""

    @abc.abstractmethod
    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return which stage runs which steps, in order; those with no step are left out."""

    def check(self, request: ResolvedRequest, *, image: bool, last: bool) -> None:
        """Raise `InvalidRequest` when this model can't make what a (resolved) request asks for; images: as `plan`."""
        if ("i2v" if image else "t2v") not in self.tasks:
            does = f"this checkpoint ({self.name}) does {' and '.join(self.tasks)} only"
            if not image:
                raise InvalidRequest(f"image is missing, and {does}; give one", "image")
            raise InvalidRequest(f"image was given, but {does}; leave it out, or use an I2V checkpoint", "image")
        if request.video is not None and (image or last or not self.takes_video):
            why = "a video and an image were given; leave one out"
            if not self.takes_video:
                why = f"video was given, and {self.name} takes none; use a T2V checkpoint of Wan"
            raise InvalidRequest(why, "video")
        if request.strength is not None:
            if request.video is None:
                raise InvalidRequest("strength is given without a video; leave it out, or give one", "strength")
            if self.first_step(request) == request.steps:
                least = 1 / request.steps
                raise InvalidRequest(
                    f"strength {request.strength:g} of {request.steps} steps is none; give at least {least:.3g}",
                    "strength",
                )
        if last and self.last_images == "none":
            raise InvalidRequest(
                f"last_image was given, but {self.name} takes a first frame alone; leave it out, or use a checkpoint "
                "for first and last frames",
                "last_image",
            )
        if not last and self.last_images == "required":
            raise InvalidRequest(
                f"last_image is missing; {self.name} leads from a first frame to a last one", "last_image"
            )
        if last and request.frames == 1:
            raise InvalidRequest("frames is 1, and there are a first and a last frame; give at least 5", "frames")
        if request.solver not in self.solvers:
            raise InvalidRequest(
                f"solver {request.solver!r} is unknown{did_you_mean(request.solver, self.solvers)}; choose one of "
                f"{', '.join(self.solvers)}",
                "solver",
            )
        if (request.frames - 1) % self.frame_step:
            nearest = self.nearest_frames(request.frames)
            raise InvalidRequest(
                f"frames is {request.frames}; it must be {self.frame_step}n + 1, nearest {nearest}", "frames"
            )
        for lora in request.loras:
            if not any(lora.is_for(stage) for stage in self.denoise_stages):
                raise InvalidRequest(
                    f"{lora} is for one of two experts; {self.name} has one: leave @{lora.expert} out", "loras"
                )
        for name in self.unused:
            value, usual = getattr(request, name), getattr(self.defaults, name, None)
            filled = name == "guidance_scale_2" and value == request.guidance_scale
            if value != usual and not filled:
                instead = "; guidance_scale is for all of its steps" if name == "guidance_scale_2" else ""
                given = f"{value:g}" if isinstance(value, int | float) else str(value)[:60]
                raise InvalidRequest(f"{name} is {given}; {self.name} has none: leave it out{instead}", name)
        if request.sigmas is not None and len(request.sigmas) != request.steps:
            raise InvalidRequest(
                f"sigmas are given for {len(request.sigmas)} steps, and steps is {request.steps}; leave steps out",
                "sigmas",
            )
        if request.switch_step is not None and request.switch_step > request.steps:
            raise InvalidRequest(
                f"switch_step is {request.switch_step} of {request.steps} steps; allowed are 0 to {request.steps}",
                "switch_step",
            )
        self._check_cache(request)
        self.check_size(request)

    def nearest_frames(self, frames: float) -> int:
        """Return the number of frames that the model makes which is nearest to a number."""
        return max(1, round((frames - 1) / self.frame_step) * self.frame_step + 1)

    def plan(
        self,
        request: GenerationRequest,
        *,
        image: bool | None = None,
        last: bool | None = None,
        picture: tuple[int, int] | None = None,
    ) -> RequestPlan:
        """Return what a request takes of this model; raises `InvalidRequest` when the model can't make it.

        image, last  whether there is a first, a last frame, where the request doesn't hold it (yet); picture  the
                     first one's (height, width), if known
        """
        image = request.image is not None if image is None else image
        last = request.last_image is not None if last is None else last
        if isinstance(request.image, Image.Image):
            picture = request.image.height, request.image.width
        elif request.video is not None and self.takes_video and None in (request.height, request.width):
            from wan_tpu.media.reading import read_frames  # Few requests need ffmpeg.

            [frame] = read_frames(request.video, 1)
            picture = frame.height, frame.width
        preset: dict[str, Any] = {}
        if request.preset is not None:
            if request.preset not in self.presets:
                known = ", ".join(self.presets) or "none"
                hint = did_you_mean(request.preset, self.presets)
                raise InvalidRequest(
                    f"preset {request.preset!r} is unknown{hint}; {self.name} has {known}, and its own settings "
                    "without one",
                    "preset",
                )
            preset = dict(self.presets[request.preset].settings)
        resolved = request.resolve(self.defaults_for(request, picture), preset)
        self.check(resolved, image=image, last=last)
        return self.plan_resolved(resolved, image=image)

    def plan_resolved(self, request: ResolvedRequest, *, image: bool) -> RequestPlan:
        """Return the plan of a request with every field filled in, once `check` has let it through."""
        steps = self.schedule(request).steps
        assert steps == request.steps, f"a schedule of {steps} steps for {request.steps}"
        skipped = self.skipped(request)
        return RequestPlan(
            request,
            prompts=self.prompts(request),
            has_image=image or request.video is not None,
            experts=self.experts(request),
            skipped=None if skipped is None else tuple((bool(prompt), bool(other)) for prompt, other in skipped),
            decoder_chunks=self.decoder_chunks(self.decoded_shape(request)[2]),
            shapes=self.shapes(request, image=image),
        )

    def guided(self, request: ResolvedRequest) -> bool:
        """Whether there is guidance, so that the negative prompt is needed."""
        return request.guidance_scale > 1

    def prompts(self, request: ResolvedRequest) -> tuple[str, ...]:
        """Return the texts whose embeddings a request needs: the prompt and, under guidance, the negative prompt."""
        return (request.prompt, request.negative_prompt) if self.guided(request) else (request.prompt,)

    def shapes(self, request: ResolvedRequest, *, image: bool) -> dict[str, str]:
        """Name, by stage, the set of programs that a resolved request needs.

        image  whether the request has one; experts may hold a request without its pixels
        """
        size = f"{request.height}x{request.width}"
        task = "i2v" if image else "t2v"
        pictures = image or request.video is not None
        found = {ENCODER: f"{ENCODER} {size}" if pictures else f"{ENCODER} text"}
        for expert in self.experts(request):
            branches = 2 if expert.guided else 1
            found[expert.stage] = f"{expert.stage} {size}x{request.frames} {task} {branches} {request.solver}"
            found[expert.stage] += "" if request.cache is None else " cached"
            for lora in request.loras_for(expert.stage):
                found[expert.stage] += f" {lora}"
        return found | {DECODER: f"{DECODER} {size}"}
