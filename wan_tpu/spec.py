"""What a model needs for a request, as far as its configuration determines it. Imports no JAX and no torch.

Commands, drivers, ingresses and workers all hold a spec, which they open themselves (`wan_tpu.families.open_spec`) or
receive. A family's own spec says how its models differ (`families/<name>/spec.py`); the part that all models share is
here, and the limits of what a model can make are in `wan_tpu.model_limits`.
"""

import abc
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
from PIL import Image

from wan_tpu.errors import InvalidRequest
from wan_tpu.model_limits import FULL_STRENGTH, ModelLimits
from wan_tpu.plan import DECODER, ENCODER, VIDEO, Expert, RequestPlan
from wan_tpu.reference import CONTINUED, Reference, count_read, find_soundtrack, find_tail, parse_references
from wan_tpu.request import (
    DIFFUSERS,
    IMAGES,
    NO_OVERRIDES,
    ORIGINAL,
    CheckpointOverrides,
    Defaults,
    GenerationRequest,
    Preset,
    ResolvedRequest,
    nearest_multiple,
)
from wan_tpu.schedules.magcache import Curve, choose_skipped, parse_magcache
from wan_tpu.schedules.schedule import Schedule
from wan_tpu.suggest import did_you_mean
from wan_tpu.tail import Tail

LONGEST_CHOICE_S = 20.0  # Of a model that chooses the length, unless a request says otherwise.
_Request = TypeVar("_Request", bound=GenerationRequest)
_UNHEARD_S = 0.1  # By how much a soundtrack may be longer or shorter than its video without a warning.


class ModelSpec(ModelLimits):
    """A model as its configuration describes it: picklable, compared by value."""

    # Each stage with the names of the components that it runs, in the order in which a request passes the stages.
    components: dict[str, tuple[str, ...]]
    # Those that only some requests need, so that a layout may leave them out.
    optional_stages: frozenset[str] = frozenset()
    heads: int  # Attention heads of a transformer.
    overrides: CheckpointOverrides = NO_OVERRIDES  # The checkpoint's own sampling settings.
    # The first of two experts runs the steps with t >= boundary_ratio x 1000; None with one expert.
    boundary_ratio: float | None
    reads_images: bool = False  # Whether the text encoder reads a request's images with its prompt.
    needs_prompt: bool = False  # Whether a request without images needs a prompt that isn't empty.
    begins_decoder_with_noise: bool = False  # Whether the decoder takes noise with the latents.
    seeds_images: bool = False  # Whether the latents of images are sampled with a request's seed.
    # The lengths of texts, in tokens, that have programs of their own; a text takes the first that holds it. Empty if
    # texts of all lengths have the same programs.
    text_rows: tuple[int, ...] = ()
    # Latent frames of a chunk, if videos are denoised and decoded chunk after chunk; otherwise None.
    chunk_frames: int | None = None

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that aren't optional, in the order in which a request passes them."""
        return tuple(stage for stage in self.components if stage not in self.optional_stages)

    def with_decoder(self, name: str) -> Self:
        """Return the model with another of its published decoders; raises `InvalidRequest` if it has no such one."""
        raise InvalidRequest(f"decoder is {name!r}; {self.name} has only one, so leave it out", "decoder")

    def limit_to(self, stages: Collection[str]) -> Self:
        """Return the model without what needs optional stages that aren't among these."""
        return self

    def list_components(self, request: ResolvedRequest) -> list[str]:
        """Return the components that a request needs."""
        experts = dict.fromkeys(expert.stage for expert in self.experts(request))
        return [name for stage in (ENCODER, *experts, DECODER) for name in self.components[stage]]

    def fit_reference(self, request: ResolvedRequest, kind: str, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (height, width) that the model needs of an image or a video, given its own.

        Called only if the model takes references.
        """
        raise NotImplementedError

    def typical_references(self, request: _Request) -> tuple[_Request, ...]:
        """Return the request with each of the references that are the most frequent; by default, none."""
        return ()

    def typical_requests(self, request: _Request) -> tuple[_Request, ...]:
        """Return the requests for whose programs those of a request stand: itself, and `typical_references`."""
        return (request, *self.typical_references(request))

    @property
    def denoise_stages(self) -> tuple[str, ...]:
        """The stages between encoder and decoder."""
        return self.stages[1:-1]

    @property
    def expert_stages(self) -> tuple[str, ...]:
        """The stages between encoder and decoder, optional ones too."""
        return tuple(self.components)[1:-1]

    @property
    def presets(self) -> Mapping[str, Preset]:
        """The model's presets, by name."""
        return dict(self.overrides.presets)

    @property
    def lacking_presets(self) -> Mapping[str, str]:
        """Presets of the published model for which something is missing here, by name, with what that is."""
        return {}

    @property
    def curves(self) -> Sequence[Curve]:
        """How the model's residuals change, one curve per measured schedule. MagCache decides by them."""
        return ()

    @abc.abstractmethod
    def latent_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of a request's latents."""

    def latent_shapes(self, request: ResolvedRequest, step: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a request's latents after `step` steps, by part; only the video's by default."""
        return {VIDEO: self.latent_shape(request)}

    def conditioned_shape(self, request: ResolvedRequest, expert: Expert) -> tuple[int, ...]:
        """Return the shape of the latents to which an expert's image condition belongs: by default, the first ones."""
        return self.latent_shapes(request, 0)[VIDEO]

    def decoded_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of the latents that are decoded: the denoised ones, unless a family overrides this."""
        return self.latent_shape(request)

    def decoder_noise_shape(self, request: ResolvedRequest) -> tuple[int, ...] | None:
        """Return the shape of the noise that the decoder takes with the latents; None if it takes none."""
        return (1, 3, request.frames, request.height, request.width) if self.begins_decoder_with_noise else None

    def decoder_chunks(self, latent_frames: int) -> tuple[int, ...]:
        """Return how many latent frames the decoder takes each time; always one, unless a family overrides this."""
        return (1,) * latent_frames

    @abc.abstractmethod
    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the transformer's sequence length for latents of a shape."""

    @abc.abstractmethod
    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the schedule of a resolved request: the numbers of every step."""

    def schedules(self, request: ResolvedRequest) -> dict[str, Schedule]:
        """Return the schedule of each part of a request's latents; only the video's by default."""
        return {VIDEO: self.schedule(request)}

    @abc.abstractmethod
    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return which stage runs which steps, in order; those with no step are left out."""

    def follows_diffusers(self, request: GenerationRequest) -> bool:
        """Return whether a video is made by diffusers' rules, where these differ from those of the model's authors."""
        return request.preset == DIFFUSERS

    def needs_adapter(self, preset: str | None) -> bool:
        """Return whether a preset runs only with its adapter, which adds weights; none does unless overridden."""
        return False

    def count_evaluations(self, request: ResolvedRequest, expert: Expert) -> int:
        """Return how often one of an expert's steps runs the transformer: twice with guidance, unless overridden."""
        return 2 if expert.guided else 1

    def is_guided(self, request: ResolvedRequest) -> bool:
        """Return whether the request uses guidance and so needs the negative prompt."""
        return request.guidance_scale > 1

    def has_sound(self, request: ResolvedRequest) -> bool:
        """Return whether a request's video has sound."""
        return self.audio_rate is not None and bool(request.generate_audio)

    def prompts(self, request: ResolvedRequest) -> tuple[str, ...]:
        """Return the texts whose embeddings a request needs: the prompt and, with guidance, the negative prompt."""
        return (request.prompt, request.negative_prompt) if self.is_guided(request) else (request.prompt,)

    def fit_text_rows(self, tokens: int) -> int:
        """Return the first of the `text_rows` that holds so many tokens.

        Raises:
            InvalidRequest: There is none.
        """
        rows = next((rows for rows in self.text_rows if rows >= tokens), None)
        if rows is None:
            most = f"reads at most {self.text_rows[-1]}" if self.text_rows else "has the same programs for all prompts"
            raise InvalidRequest(f"prompt_tokens is {tokens}; {self.name} {most}", "prompt_tokens")
        return rows

    def choose_text_rows(self, request: ResolvedRequest, *, images: int) -> int:
        """Return which of the `text_rows` a request's text takes; 0 if there are none."""
        return 0

    def shapes(self, request: ResolvedRequest, *, images: int) -> dict[str, str]:
        """Return, for each stage, a name for the set of programs that a resolved request needs.

        Args:
            request: The request; its pixels aren't needed.
            images: How many images it has.
        """
        size = f"{request.height}x{request.width}"
        # The text encoder produces more rows for two images than for one.
        several = f" of {images} images" if self.reads_images and images > 1 else ""
        task = f"i2v{several}" if images else "t2v"
        pictures = images or request.strength is not None
        names = {ENCODER: f"{ENCODER} {size}{several}" if pictures else f"{ENCODER} text"}
        for expert in self.experts(request):
            evaluations = self.count_evaluations(request, expert)
            names[expert.stage] = f"{expert.stage} {size}x{request.frames} {task} {evaluations} {request.solver}"
            names[expert.stage] += "" if request.cache is None else " cached"
            for adapter in request.adapters_for(expert.stage):
                names[expert.stage] += f" {adapter}"
        return names | {DECODER: f"{DECODER} {size}"}

    def plan(
        self,
        request: GenerationRequest,
        *,
        image: bool | None = None,
        last: bool | None = None,
        video: bool | None = None,
        picture: tuple[int, int] | None = None,
    ) -> RequestPlan:
        """Return a request's plan, with every field that the request leaves open filled in.

        Args:
            image: Whether there is a first frame, in case the request doesn't hold it (yet).
            last: The same for a last frame.
            video: The same for a video that it starts from; the request must then have a strength.
            picture: The (height, width) of the first frame, else of the last frame, else of the video, if known.

        Raises:
            InvalidRequest: The model can't make it.
        """
        image = request.image is not None if image is None else image
        last = request.last_image is not None if last is None else last
        images = [getattr(request, name) for name in IMAGES]
        if leading := next((candidate for candidate in images if isinstance(candidate, Image.Image)), None):
            picture = leading.height, leading.width
        elif request.video is not None and self.takes_video and None in (request.height, request.width):
            from wan_tpu.media.reading import read_frames  # Few requests need ffmpeg.

            [frame] = read_frames(request.video, 1)
            picture = frame.height, frame.width
        elif (tail := find_tail(parse_references(request.references or ()))) is not None:
            sizes = request.height or tail.height, request.width or tail.width
            request = dataclasses.replace(request, height=sizes[0], width=sizes[1])
        preset: dict[str, Any] = {}
        if request.preset == ORIGINAL:
            request = dataclasses.replace(request, preset=None)
        if request.preset is not None:
            if request.preset not in self.presets:
                if (missing := self.lacking_presets.get(request.preset)) is not None:
                    raise InvalidRequest(f"preset is {request.preset}, {missing}", "preset")
                known = ", ".join(self.presets) or "none"
                hint = did_you_mean(request.preset, self.presets)
                raise InvalidRequest(
                    f"preset {request.preset!r} is unknown{hint}; {self.name} has {known}",
                    "preset",
                )
            preset = dict(self.presets[request.preset].settings)
        if request.video is not None and request.strength is None and self.continues_video:
            request = dataclasses.replace(request, strength=FULL_STRENGTH)
        resolved = request.resolve(self.defaults_for(request, picture), preset)
        if self.chooses_length:
            resolved = self._open_length(request, resolved, preset)
        if request.negative_prompt is None and not self.is_guided(resolved):
            resolved = dataclasses.replace(resolved, negative_prompt="")
        resolved = self._cut_ending(resolved)
        self.check(resolved, image=image, last=last, video=video)
        if (tail := find_tail(resolved.references)) is not None and isinstance(tail.source, Tail):
            resolved = dataclasses.replace(resolved, hidden_frames=tail.source.frames - tail.source.blended)
        return self.plan_resolved(resolved, image=image, last=last)

    def _cut_ending(self, request: ResolvedRequest) -> ResolvedRequest:
        """Return a request with as many frames of the file that it continues as the model needs."""
        tail = find_tail(request.references)
        if self.overlap is None or tail is None or tail.kind != CONTINUED or tail.frames <= self.overlap.frames:
            return request
        kept = tail.keep_last(self.overlap.frames)
        references = tuple(kept if reference is tail else reference for reference in request.references or ())
        return dataclasses.replace(request, references=references)

    def _open_length(
        self, request: GenerationRequest, resolved: ResolvedRequest, preset: Mapping[str, Any]
    ) -> ResolvedRequest:
        """Return a resolved request with the longest length that the model may choose, if the request leaves it open.

        Raises:
            InvalidRequest: It gives a length, and also the longest that the model may choose.
        """
        if request.frames is None and "frames" not in {**dict(self.overrides.defaults), **preset}:
            most = LONGEST_CHOICE_S if request.max_seconds is None else request.max_seconds
            return self.shorten(dataclasses.replace(resolved, max_seconds=most), most)
        if request.max_seconds is not None:
            raise InvalidRequest(
                f"max_seconds was given, and the video has {resolved.frames} frames; leave one of them out",
                "max_seconds",
            )
        return resolved

    def shorten(self, request: ResolvedRequest, seconds: float) -> ResolvedRequest:
        """Return a request of open length with the frames that the model makes if it chooses so many seconds.

        Called only if the model chooses lengths.
        """
        raise NotImplementedError

    def set_length(self, plan: RequestPlan, seconds: float) -> RequestPlan:
        """Return a plan of open length for the length that the model has chosen."""
        request = dataclasses.replace(self.shorten(plan.request, seconds), max_seconds=None)
        images = plan.images - count_read(request.references)
        return self.plan_resolved(request, image=images > 0, last=images > 1)

    def plan_resolved(self, request: ResolvedRequest, *, image: bool, last: bool = False) -> RequestPlan:
        """Return the plan of a request that has every field filled in and has passed `check`.

        Args:
            request: The request; its pixels aren't needed.
        """
        steps, experts = self.schedule(request).steps, self.experts(request)
        images = image + last + count_read(request.references)
        assert steps == experts[-1].stop, f"a schedule of {steps} steps for {experts[-1].stop}"
        skipped = self.plan_skips(request)
        return RequestPlan(
            request,
            prompts=() if images and self.reads_images else self.prompts(request),
            has_image=images > 0 or request.strength is not None or request.references is not None,
            images=images,
            experts=experts,
            skipped=None if skipped is None else tuple((bool(prompt), bool(other)) for prompt, other in skipped),
            decoder_chunks=self.decoder_chunks(self.decoded_shape(request)[2]),
            has_sound=self.has_sound(request),
            shapes=self.shapes(request, images=images),
            needs_prompt=self.needs_prompt and not images,
            adapts_text=self.adapts_text and any(adapter.is_for_all for adapter in request.loras),
            cuts_prompts=self.may_cut(request),
            warnings=tuple(self.list_warnings(request, images=images)),
        )

    def list_warnings(self, request: ResolvedRequest, *, images: int) -> Iterator[str]:
        """Yield what a request asks for that has no effect, or another one than its author may expect."""
        if request.negative_prompt and not self.is_guided(request):
            yield f"negative_prompt has no effect, because {self.name} makes this video without guidance"
        track, seconds = find_soundtrack(request.references), request.frames / request.fps
        if track is not None and track.sample_rate:
            heard = track.samples / track.sample_rate
            if heard > seconds + _UNHEARD_S:
                yield f"the soundtrack is longer than the video, and is cut after {seconds:.2f} s"
            elif heard < seconds - _UNHEARD_S:
                yield f"the soundtrack lasts {heard:.2f} s and the video {seconds:.2f} s, which ends in silence"

    def check(self, request: ResolvedRequest, *, image: bool, last: bool, video: bool | None = None) -> None:
        """Refuse what `ModelLimits` refuses, and a request with images whose preset is for text only.

        Raises:
            InvalidRequest: The model can't make the video.
        """
        super().check(request, image=image, last=last, video=video)
        if request.preset is None or not (image or last):
            return
        preset = self.presets.get(request.preset)
        if preset is not None and preset.text_only:
            usable = [name for name, other in self.presets.items() if other.takes_images]
            instead = f"give preset {' or '.join(usable)}" if usable else "leave the preset out"
            field = "image" if image else "last_image"
            raise InvalidRequest(
                f"{field} was given, but preset {request.preset} only makes videos from text; leave {field} out, or "
                f"{instead}",
                field,
            )

    def _check_tail(self, request: ResolvedRequest, tail: Reference, *, is_last: bool) -> None:
        super()._check_tail(request, tail, is_last=is_last)
        assert self.overlap is not None
        source = tail.source if isinstance(tail.source, Tail) else None
        given = [] if source is None else [x.shape for x in (source.latents, source.smaller) if x is not None]
        for expert in self.experts(request) if given else ():
            batch, channels, _, height, width = self.latent_shapes(request, expert.stop)[VIDEO]
            if (needed := (batch, channels, self.overlap.latents, height, width)) not in given:
                raise InvalidRequest(
                    f"the end of a video has latents {' and '.join(map(str, given))}; this request needs {needed}: "
                    "give one that the same model has made in as many stages",
                    "references",
                )

    def images_of(self, request: ResolvedRequest) -> tuple[int, ...]:
        """Return `image_counts`, or only 0 where the request's preset or its references leave no place for an image."""
        preset = self.presets.get(request.preset or "")
        is_text_only = preset is not None and preset.text_only
        return (0,) if is_text_only or not self.may_have_image(request.references) else self.image_counts

    def defaults_for(self, request: GenerationRequest, picture: tuple[int, int] | None) -> Defaults:
        """Return the settings that fill a request's open fields.

        If the request leaves the size open, the video takes the picture's shape; if it leaves one side open, that side
        follows from the other.

        Args:
            picture: (height, width) of its image or video, if known.
        """
        follows = self.follows_image or request.strength is not None or request.video is not None
        if picture is None or not follows or None not in (request.height, request.width):
            return self.defaults
        height, width = self.size_like(picture, request.preset)
        if request.height is not None:
            width = nearest_multiple(request.height * picture[1] / picture[0], self.size_multiple)
        if request.width is not None:
            height = nearest_multiple(request.width * picture[0] / picture[1], self.size_multiple)
        return dataclasses.replace(self.defaults, height=height, width=width)

    def plan_skips(self, request: ResolvedRequest) -> np.ndarray | None:
        """Return which branches of each step reuse an earlier result, bool [S, 2]; None without a cache."""
        if request.cache is None:
            return None
        curve = self._curve_of(request)
        assert curve is not None
        phases = [(expert.start, expert.stop) for expert in self.experts(request)]
        return choose_skipped(curve, parse_magcache(request.cache), phases)

    def skipped_steps(self, request: ResolvedRequest) -> list[int]:
        """Return the steps, from 1, that compute no block in any of their branches."""
        reused = self.plan_skips(request)
        if reused is None:
            return []
        experts = self.experts(request)
        branches = {i: 2 if expert.guided else 1 for expert in experts for i in range(expert.start, expert.stop)}
        return [i + 1 for i in range(request.steps) if reused[i, : branches[i]].all()]

    def check_cache(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest` for a cache whose curve is unknown or belongs to another schedule."""
        if request.cache is None:
            return
        if request.strength is not None or (request.switch_step is not None and request.sigmas is None):
            raise InvalidRequest(
                f"cache is {request.cache}, but a curve holds only for a whole schedule; leave strength out, and "
                "give switch_step only together with sigmas",
                "cache",
            )
        if self._curve_of(request) is not None:
            return
        remedy = "measure one with wan-tpu calibrate, or leave it out"
        curves = [curve for curve in self.curves if curve.sigmas is None]
        if request.sigmas is not None or not curves:
            model = self.name if request.sigmas is None else f"{self.name} with these sigmas and this switch of experts"
            raise InvalidRequest(
                f"cache is {request.cache}, but there is no calibrated curve for {model}; {remedy}", "cache"
            )
        solvers = [(curve.shift, curve.solver) for curve in curves]
        usual = {"shift": self.defaults.shift, "solver": self.defaults.solver, "sigmas": None}
        settings = {name: usual | dict(preset.settings) for name, preset in self.presets.items()}
        schedules = {
            name: (fields["shift"], fields["solver"]) for name, fields in settings.items() if not fields["sigmas"]
        }
        presets = [name for name, schedule in schedules.items() if schedule in solvers]
        remedy = f"give preset {' or '.join(presets)}, {remedy}" if presets else remedy
        known = " and ".join(f"shift {curve.shift:g} and solver {curve.solver}" for curve in curves)
        raise InvalidRequest(
            f"cache is {request.cache}, but curves are calibrated only for {known}, and the request has shift "
            f"{request.shift:g} and solver {request.solver}; {remedy}",
            "cache",
        )

    def _curve_of(self, request: ResolvedRequest) -> Curve | None:
        """Return the curve that applies to a request's schedule, if there is one."""
        if request.sigmas is None:
            schedule = (None, request.shift, self.boundary_ratio, request.solver)
            of_shift = (c for c in self.curves if (c.sigmas, c.shift, c.boundary, c.solver) == schedule)
            return next(of_shift, None)
        experts = self.experts(request)
        first_low = experts[1].start if len(experts) > 1 else None
        settings = (request.sigmas, first_low, request.solver)
        return next((c for c in self.curves if (c.sigmas, c.first_low, c.solver) == settings), None)
