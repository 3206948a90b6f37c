"""An LTX-2 model as its configuration describes it: stages, limits, defaults, shapes, its steps' numbers."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.ltx2 import classes, in_context, published
from wan_tpu.families.ltx2.config import DECODERS, Ltx2Config, is_25, read_config
from wan_tpu.families.ltx2.guidance import guidance_of
from wan_tpu.families.shared.family_spec import DENOISE, FamilySpec
from wan_tpu.families.shared.resampling import count_resampled
from wan_tpu.plan import AUDIO, DECODER, ENCODER, VIDEO, Expert
from wan_tpu.reference import CONTINUED, FPS, GOAL, TAIL, Reference, find_goal, find_soundtrack, find_tail
from wan_tpu.request import LIMITS, Defaults, GenerationRequest, Preset, ResolvedRequest, nearest_multiple
from wan_tpu.schedules import flow
from wan_tpu.schedules.schedule import Schedule
from wan_tpu.tail import Overlap

REFINE = "refine"
VOICE_ENCODER = "audio_encoder"  # The component that only requests with a known sound need.
# A video that goes on from another one begins with its last four latent frames. Each of both videos shows half of them,
# because what the decoder makes of a latent frame depends on two or more on either side.
OVERLAP = Overlap(frames=25, latents=4, blended=16)
# Of the end of a sound, so much isn't encoded: the sound is a little shorter than the video, and all ends are to have
# the same programs.
UNHEARD_S = 0.05
AUDIO_RATE, LONGEST_S = 25, 60  # Latents of the sound a second; the longest video: three times what it was trained on.
LEAST_CHOICE_S = 1.0  # The shortest video that the duration head chooses.
STRIDE = 32  # Pixels per pixel of the latents, which is a token.
AUDIO_STRIDE = 4  # Mel frames, and mel bins, of a latent of the sound.
_LARGEST_EXPONENT = 80  # Beyond it the shift overflows float32; all noise levels are 1 long before.

_Request = TypeVar("_Request", bound=GenerationRequest)


class Room(NamedTuple):
    """What is known of a request's latents.

    Attributes:
        frames: How many of the first and of the last latent frames.
        audio: How many of the first and of the last latents of the sound.
        sizes: (height, width) of the latents of each stage.
    """

    frames: tuple[int, int]
    audio: tuple[int, int]
    sizes: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """How many tokens that is, of all sizes, and latents of the sound."""
        return sum(self.frames) * sum(height * width for height, width in self.sizes) + sum(self.audio)


class Ltx2Spec(FamilySpec):
    """One LTX-2 model."""

    config: Ltx2Config
    published: ClassVar = published
    read_config: ClassVar = staticmethod(read_config)
    spatial_stride = STRIDE
    own_keys = ("model", "decoder")

    adapts_text = True
    tasks = ("t2v", "i2v")
    frame_stride = 8
    overlap = OVERLAP
    follows_sound = True
    follows_sound_from_image = True

    def __post_init__(self) -> None:
        vae, transformer = self.config.vae, self.config.transformer
        for key, supported in (("spatial_compression_ratio", STRIDE), ("temporal_compression_ratio", 8)):
            if vae[key] not in (None, supported):
                raise CheckpointError(f"the VAE has {key} {vae[key]}; supported: {supported}")
        if transformer["in_channels"] != vae["latent_channels"]:
            raise CheckpointError(
                f"the transformer takes {transformer['in_channels']} channels, but the VAE makes "
                f"{vae['latent_channels']}; give a checkpoint whose components belong together"
            )

    @property
    def vae(self) -> str:  # type: ignore[override]
        """LTX-2's VAE has other widths than that of the later versions."""
        return "-".join(map(str, self.config.vae["block_out_channels"]))

    @property
    def unused(self) -> tuple[str, ...]:
        """How a schedule is shifted is no setting of a request; both stages run the same transformer."""
        return (*dict.fromkeys(("guidance_scale_2", "switch_step", "shift", *super().unused)),)

    @property
    def chooses_length(self) -> bool:  # type: ignore[override]
        """Whether the checkpoint has a duration head."""
        return self.config.duration_head is not None

    def shorten(self, request: ResolvedRequest, seconds: float) -> ResolvedRequest:
        """Return a request of open length with the frames that the model makes if it chooses so many seconds.

        Source: `predict_num_frames` of pipelines/ltx2/duration_head.py in diffusers 0.42.1, and
        `seconds_to_clamped_num_frames` of ltx_pipelines/utils/helpers.py in github.com/Lightricks/LTX-2 at 400fd310.
        """
        assert request.max_seconds is not None
        least = max(self._shortest, round(LEAST_CHOICE_S * request.fps))
        if find_tail(request.references) is not None:
            least = max(least, OVERLAP.frames + self.frame_stride)
        most = min(round(request.max_seconds * request.fps), int(LIMITS["frames"][1]))
        wanted = max(least, min(round(min(seconds, request.max_seconds) * request.fps), most))
        frames = (wanted - 1) // self.frame_stride * self.frame_stride + 1
        above = frames + self.frame_stride
        if frames < least and (above <= most or above - wanted < wanted - frames):
            frames = above
        return dataclasses.replace(request, frames=frames)

    @property
    def solvers(self) -> tuple[str, ...]:  # type: ignore[override]
        """Euler's method; from LTX-2.5 on, a distilled model's first stage was made with the ancestral one."""
        ancestral = self.config.distilled and is_25(self.config)
        return (published.ANCESTRAL, published.EULER) if ancestral else (published.EULER,)

    @property
    def presets(self) -> Mapping[str, Preset]:
        """The common ones, and two stages with guidance."""
        presets = dict(super().presets)
        if self.config.upsampler is not None and not self.config.distilled:
            presets.setdefault(published.TWO_STAGES, published.two_stages(self.config, self.defaults))
        return presets

    @property
    def lacking_presets(self) -> Mapping[str, str]:
        """Two stages with guidance where the second one is missing."""
        if self.config.upsampler is not None or self.config.distilled:
            return {}
        needs = (
            f"which needs the folder latent_upsampler in the checkpoint and the stage {REFINE} in the layout, and one "
            "of them is missing; add it, or leave the preset out for one stage"
        )
        return {published.TWO_STAGES: needs}

    def defaults_for(self, request: GenerationRequest, picture: tuple[int, int] | None) -> Defaults:
        """Return the settings that fill open fields; with `TWO_STAGES`, the usual size is the first stage's."""
        if request.preset != published.TWO_STAGES:
            return super().defaults_for(request, picture)
        sides = {name: value for name in ("height", "width") if (value := getattr(request, name)) is not None}
        halves: dict[str, Any] = {name: nearest_multiple(value / 2, STRIDE) for name, value in sides.items()}
        first = super().defaults_for(dataclasses.replace(request, **halves), picture)
        return dataclasses.replace(first, height=2 * first.height, width=2 * first.width)

    @property
    def optional_stages(self) -> frozenset[str]:  # type: ignore[override]
        """The second stage of a guided model, which only one preset needs."""
        return frozenset() if self.config.distilled else frozenset([REFINE]) & self.components.keys()

    def limit_to(self, stages: Collection[str]) -> Self:
        """Return the model, without its second stage if that isn't hosted."""
        if self.optional_stages <= set(stages):
            return self
        return dataclasses.replace(self, config=dataclasses.replace(self.config, upsampler=None))

    @property
    def size_multiple(self) -> int:
        """The multiple for two stages if that is the default; a request for one stage may have multiples of 32."""
        return 2 * STRIDE if self._refines_by_default else STRIDE

    @property
    def _refines_by_default(self) -> bool:
        """Whether a request without settings is made in two stages."""
        return self.config.upsampler is not None and self.config.distilled

    @property
    def usual_sizes(self) -> list[tuple[int, int]]:
        """The usual ones, of which few are multiples of 64, and LTX-2's own."""
        examples = [(h, w) for h, w in published.SIZES if h * w <= self._usual_area]
        sizes = [*super().usual_sizes, *examples, *((w, h) for h, w in examples)]
        return list(dict.fromkeys(sizes))

    @property
    def _usual_area(self) -> int:
        """The pixels of the largest size that is offered: 1080p if two stages are usual, otherwise the default."""
        default = self.defaults.height * self.defaults.width
        return max(default, math.prod(published.SIZES[0])) if self._refines_by_default else default

    def size_to_extend(self, picture: tuple[int, int]) -> tuple[int, int]:
        """Return the (height, width) of a clip that continues a video, which keeps every usual size."""
        height, width = (nearest_multiple(side, self.size_multiple) for side in picture)
        return (height, width) if height * width <= self._usual_area else super().size_to_extend(picture)

    @property
    def audio_rate(self) -> int:  # type: ignore[override]
        """Samples per second of the model's sound."""
        return int(self.config.vocoder["output_sampling_rate"])

    @property
    def components(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        """The components of each stage."""
        return {
            ENCODER: ("text_encoder", "connectors", *(("duration_head",) * self.chooses_length), "vae_encoder"),
            DENOISE: (DENOISE,),
            **({} if self.config.upsampler is None else {REFINE: (REFINE, "upsampler", "statistics")}),
            DECODER: (DECODER, "audio_decoder", "vocoder"),
        }

    @property
    def heads(self) -> int:  # type: ignore[override]
        """Attention heads of the transformer; the sound has as many."""
        transformer = self.config.transformer
        return math.gcd(int(transformer["num_attention_heads"]), int(transformer["audio_num_attention_heads"]))

    def with_decoder(self, name: str) -> Self:
        """Return LTX-2.5 with its diffusion decoder."""
        if not is_25(self.config):
            return super().with_decoder(name)
        if name not in DECODERS:
            raise InvalidRequest(f"decoder is {name!r}; {self.name} has {' and '.join(DECODERS)}", "decoder")
        decoder = None if name == DECODERS[0] else classes.DIFFUSION_DECODER
        return dataclasses.replace(self, config=dataclasses.replace(self.config, diffusion_decoder=decoder))

    # ---- Shapes.

    def text_width(self, stream: str) -> int:
        """Return the channels of the text that "video" or "audio" attends to, as the connectors return it."""
        heads, width = (f"{stream}_connector_{part}" for part in ("num_attention_heads", "attention_head_dim"))
        return int(self.config.connectors[heads] * self.config.connectors[width])

    def audio_tokens(self, frames: int, fps: float) -> int:
        """Return A, the rounded number of latents that last as long as the video."""
        audio = self.config.audio_vae
        return round(frames / fps * (audio["sample_rate"] / audio["mel_hop_length"] / AUDIO_STRIDE))

    def audio_shape(self, request: ResolvedRequest) -> tuple[int, int, int]:
        """Return [1, A, channels] of the sound's latents."""
        audio = self.config.audio_vae
        channels = audio["latent_channels"] * audio["mel_bins"] // AUDIO_STRIDE
        return 1, self.audio_tokens(request.frames, request.fps), channels

    def latent_shapes(self, request: ResolvedRequest, step: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the video's latents and the sound's; the first of two stages has half the size."""
        *leading, height, width = self.latent_shape(request)
        if self.has_two_stages(request) and step <= _count_first(request):
            height, width = height // 2, width // 2
        return {VIDEO: (*leading, height, width), AUDIO: self.audio_shape(request)}

    def list_components(self, request: ResolvedRequest) -> list[str]:
        """Return the components of a request, with the one that encodes a known sound."""
        names = super().list_components(request)
        room = self.find_room(request)
        return names if room is None or not sum(room.audio) else [*names, VOICE_ENCODER]

    def typical_references(self, request: _Request) -> tuple[_Request, ...]:
        """Return the request with the end of a video that it continues."""
        if (request.frames or self.defaults.frames) <= OVERLAP.frames:
            return ()
        size = request.height or self.defaults.height, request.width or self.defaults.width
        samples = round(OVERLAP.frames / (request.fps or self.defaults.fps) * self.audio_rate)
        end = Reference(TAIL, None, *size, OVERLAP.frames, samples, self.audio_rate)
        return (dataclasses.replace(request, references=(end,)),)

    def find_room(self, request: ResolvedRequest, *, image: bool = False) -> Room | None:
        """Return what is known of a request's latents; None if nothing is, or an image alone.

        Args:
            request: The request; its pixels aren't needed.
            image: Whether it has an image.
        """
        if request.references is None:
            return None
        tail, goal = find_tail(request.references), find_goal(request.references)
        count = self.audio_tokens(request.frames, request.fps)
        audio = (count, 0)
        if find_soundtrack(request.references) is None:
            last = 0
            if goal is not None and goal.samples:
                last = max(0, count - math.ceil((request.frames - goal.frames) / request.fps * AUDIO_RATE))
            audio = (self._count_heard(tail, request), last)
        shapes = (self.latent_shapes(request, expert.stop)[VIDEO] for expert in self.experts(request))
        sizes = dict.fromkeys((height, width) for *_, height, width in shapes)
        first, last = (0 if end is None else OVERLAP.latents for end in (tail, goal))
        return Room((1 if image else first, last), audio, tuple(sizes))

    def _count_heard(self, tail: Reference | None, request: ResolvedRequest) -> int:
        """Return how many latents of the sound of a video's end are known."""
        if tail is None or not tail.samples:
            return 0
        settings = self.config.audio_vae
        mel = count_resampled(tail.samples, tail.sample_rate, settings["sample_rate"]) // settings["mel_hop_length"]
        return min(mel // AUDIO_STRIDE, int((tail.frames / request.fps - UNHEARD_S) * AUDIO_RATE))

    def conditioned_shape(self, request: ResolvedRequest, expert: Expert) -> tuple[int, ...]:
        """Return the shape of an expert's latents, since Lightricks encodes the image again for the second stage.

        Source: ltx_pipelines/distilled.py of ltx-pipelines 1.0.0. diffusers' second stage doesn't see the image, unless
        there is a given sound, which none of its pipelines for images takes.
        """
        if self.follows_diffusers(request) and request.references is None:
            return super().conditioned_shape(request, expert)
        return self.latent_shapes(request, expert.stop)[VIDEO]

    def image_sizes(self, request: ResolvedRequest) -> list[tuple[int, int]]:
        """Return each (height, width) in pixels at which an image is encoded."""
        shapes = (self.conditioned_shape(request, expert) for expert in self.experts(request))
        return list(dict.fromkeys((height * STRIDE, width * STRIDE) for *_, height, width in shapes))

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the video's tokens."""
        return math.prod(latent_shape[2:])

    @property
    def begins_decoder_with_noise(self) -> bool:  # type: ignore[override]
        """Whether it is the diffusion decoder, which turns noise into pixels."""
        return self.config.diffusion_decoder is not None

    def decoder_chunks(self, latent_frames: int) -> tuple[int, ...]:
        """Return a single chunk with all frames, because the decoder looks ahead."""
        return (latent_frames,)

    def shapes(self, request: ResolvedRequest, *, images: int) -> dict[str, str]:
        """Name the programs as every model does, by each stage's own size and the length of the sound."""
        names, size = super().shapes(request, images=images), f"{request.height}x{request.width}"
        room = self.find_room(request, image=images > 0)
        sound = f"{self.audio_tokens(request.frames, request.fps)} of sound"
        for expert in self.experts(request):
            *_, height, width = self.latent_shapes(request, expert.stop)[VIDEO]
            program = names[expert.stage].replace(size, f"{height * STRIDE}x{width * STRIDE}", 1)
            names[expert.stage] = f"{program} {sound}"
            if room is not None:
                names[expert.stage] += f" {room.frames} and {room.audio} known"
        if room is not None:
            tail = find_tail(request.references)
            from_file = f" and frames of {room.sizes}" if tail is not None and tail.kind == CONTINUED else ""
            names[ENCODER] = f"{ENCODER} {room.audio} of sound{from_file}"
        if images:
            sizes = [f"{height}x{width}" for height, width in self.image_sizes(request)]
            heard = "" if room is None else f" {room.audio} of sound"
            names[ENCODER] = f"{ENCODER} {' and '.join(sizes)}{heard}"
            if REFINE in names:
                names[REFINE] += f" of {sizes[-1]}"  # The image, whose size need not be the second stage's.
        return names | {DECODER: f"{DECODER} {size}x{request.frames} {sound}"}

    def check_size(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest` for a size that the model can't make, or whose half its first stage can't make."""
        multiple, needs = STRIDE, f"{self.name} needs a multiple of {STRIDE}"
        remedy = ""
        if self.has_two_stages(request):
            multiple, needs = 2 * STRIDE, f"two stages need a multiple of {2 * STRIDE}"
            one = f"give steps {_count_first(request)}" if self.config.distilled else "leave the preset out"
            remedy = f", or {one} for one stage"
        # A single row of latents can't be mirrored, and windows of the diffusion decoder must be full.
        modes = (self.config.vae[f"{half}_spatial_padding_mode"] for half in ("encoder", "decoder"))
        mirrored = 2 if "reflect" in modes else 1
        for name, fewest in zip(("height", "width"), self._fewest_latents[1:], strict=True):
            value, least = getattr(request, name), STRIDE * max(mirrored, fewest)
            least = -(-least // multiple) * multiple
            at_least = f", at least {least}" if value < least else ""
            if value % multiple or value < least:
                nearest = max(least, nearest_multiple(value, multiple))
                raise InvalidRequest(f"{name} is {value}; {needs}{at_least}, nearest {nearest}{remedy}", name)

    def _check_tail(self, request: ResolvedRequest, tail: Reference, *, is_last: bool) -> None:
        super()._check_tail(request, tail, is_last=is_last)
        if tail.kind == CONTINUED and request.fps != FPS:
            raise InvalidRequest(
                f"fps is {request.fps:g}, but a file is continued with its motion at {FPS}; give that, or its last "
                "frame as image",
                "fps",
            )
        least = OVERLAP.frames + self.frame_stride * (OVERLAP.latents + 1)
        if tail.kind == GOAL and find_tail(request.references) is not None and request.frames < least:
            raise InvalidRequest(
                f"frames is {request.frames}, all of which are those of the videos before and behind; give at least "
                f"{least}",
                "frames",
            )

    @property
    def _fewest_latents(self) -> tuple[int, int, int]:
        """The fewest frames, rows and columns of latents that the decoder takes."""
        decoder = self.config.diffusion_decoder
        if decoder is None:
            return 1, 1, 1
        kernels = [*decoder["decoder_stage_kernels"], decoder["decoder_stage5_kernel"]]
        strides = [(1, 1, 1), *decoder["decoder_upsample_strides"]]
        sizes = np.cumprod(strides, axis=0)  # Of each stage's grid, for one latent.
        fewest = -(-np.array(kernels) // sizes)
        # Doubled frames lack the first, and all stages but the last see copies of the last latent frame.
        fewest[:, 0] = 1
        fewest[-1, 0] = 1 - (-(kernels[-1][0] - 1) // int(sizes[-1, 0]))
        frames, rows, columns = fewest.max(axis=0).tolist()
        return frames, rows, columns

    @property
    def _shortest(self) -> int:
        """The fewest frames of a video."""
        return (self._fewest_latents[0] - 1) * self.frame_stride + 1

    def _check_settings(self, request: ResolvedRequest) -> None:
        super()._check_settings(request)
        if find_soundtrack(request.references) is not None and request.max_seconds is not None:
            raise InvalidRequest("frames is missing; a video that follows a given sound needs a length", "frames")
        for adapter in request.loras:
            in_context.refuse_by_name(adapter)
        if request.frames < self._shortest:
            raise InvalidRequest(
                f"frames is {request.frames}; the diffusion decoder makes at least {self._shortest}", "frames"
            )
        seconds, least = request.frames / request.fps, 1 / AUDIO_RATE
        if not least <= seconds <= LONGEST_S:
            nearest = request.frames / min(max(seconds, least), LONGEST_S)
            raise InvalidRequest(
                f"fps is {request.fps:g}, so that {request.frames} frames and their sound last {seconds:.3g} s; "
                f"{self.name} makes {least:g} to {LONGEST_S} s; nearest fps: {nearest:.3g}",
                "fps",
            )
        self._check_stages(request)
        if not self.config.distilled or request.sigmas is not None:
            return
        first, second = len(published.DISTILLED_SIGMAS), len(published.SECOND_STAGE_SIGMAS)
        works = f"{first}, or {first + second} in two stages" if self.config.upsampler is not None else str(first)
        if request.steps != first and not self.has_two_stages(request):
            raise InvalidRequest(
                f"steps is {request.steps}; {self.name} was trained for the noise levels of {works}: give that many, "
                "or your own sigmas",
                "steps",
            )

    def _check_stages(self, request: ResolvedRequest) -> None:
        """Refuse what contradicts the number of stages, and a second stage after guidance without its adapter."""
        second = len(published.SECOND_STAGE_SIGMAS)
        refining = [adapter for adapter in request.loras if not adapter.is_for(DENOISE)]
        if not self.has_two_stages(request):
            if refining:
                preset = "" if self.config.distilled else f"give preset {published.TWO_STAGES}, or "
                raise InvalidRequest(
                    f"{refining[0]} is for the second of two stages, and this request has one; {preset}leave the "
                    "adapter out",
                    "loras",
                )
            return
        if request.preset != published.TWO_STAGES:
            return
        one = "leave the preset out for one stage"
        if not refining:
            given = ", ".join(map(str, request.loras)) or "none"
            raise InvalidRequest(
                f"loras is {given}; preset {request.preset} needs the distilled adapter for its second stage alone: "
                f"give it as PATH@{REFINE}, or {one}",
                "loras",
            )
        if request.sigmas is not None:
            raise InvalidRequest(
                f"sigmas was given, but preset {request.preset} has its own; leave sigmas out, or {one}", "sigmas"
            )
        if request.steps <= second:
            raise InvalidRequest(
                f"steps is {request.steps}, of which preset {request.preset} needs {second} for its second stage; give "
                f"at least {second + 1}, or {one}",
                "steps",
            )

    # ---- Steps.

    def has_two_stages(self, request: ResolvedRequest) -> bool:
        """Return whether a request is made at half the size first; its preset or its number of steps says so."""
        if not self.config.distilled:
            return request.preset == published.TWO_STAGES
        steps = len(published.DISTILLED_SIGMAS) + len(published.SECOND_STAGE_SIGMAS)
        return self.config.upsampler is not None and request.sigmas is None and request.steps == steps

    def is_guided(self, request: ResolvedRequest) -> bool:
        """Return whether there is guidance, of any kind that the model has."""
        return request.guidance_scale > 1

    def count_evaluations(self, request: ResolvedRequest, expert: Expert) -> int:
        """Return how often a step runs the transformer."""
        return self._guidance_rows(request).shape[1] if expert.guided else 1

    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return the one expert, or the two stages that run the same transformer at two sizes.

        After a guided first stage, the second one has no guidance.
        """
        if not self.has_two_stages(request):
            return super().experts(request)
        guided, first = self.is_guided(request), _count_first(request)
        refine = Expert(REFINE, first, request.steps, guided and self.config.distilled, enlarges=True)
        return Expert(DENOISE, 0, first, guided), refine

    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the numbers of every step: Euler's method, with guidance of video and sound, [2, E] for E evaluations.

        A row says how far the result is pushed away from each evaluation but the first, and how much it is pulled back.
        """
        euler = flow.euler_ancestral_at if request.solver == published.ANCESTRAL else flow.euler_at
        first, *others = self.experts(request)
        schedule = euler(self._first_levels(request, first.stop))
        if others:
            # Three steps are too few to remove fresh noise.
            schedule = schedule.followed_by(flow.euler_at(published.SECOND_STAGE_SIGMAS))
        rows = self._guidance_rows(request)
        return schedule.with_guidance(np.broadcast_to(rows, (request.steps, *rows.shape)))

    def _first_levels(self, request: ResolvedRequest, steps: int) -> tuple[float, ...]:
        """Return the noise levels of the only stage, or of the first one."""
        if request.sigmas is not None:
            return request.sigmas
        if self.config.distilled and steps == len(published.DISTILLED_SIGMAS):
            return published.DISTILLED_SIGMAS
        if self.follows_diffusers(request):
            return _diffusers_levels(self.config, steps, self.tokens(self.latent_shape(request)))
        return _lightricks_levels(steps)

    def _guidance_rows(self, request: ResolvedRequest) -> np.ndarray:
        """Return the guidance of video and sound, [2, E]."""
        if not self.is_guided(request):
            return np.zeros((2, 1))
        guidance = guidance_of(self.config, follows_diffusers=self.follows_diffusers(request))
        perturbation = (guidance.perturbation,) if guidance.perturbation else ()
        extra_scales = (*perturbation, guidance.modality - 1, guidance.rescale)
        return np.array([(scale - 1, *extra_scales) for scale in (request.guidance_scale, guidance.audio_scale)])

    def schedules(self, request: ResolvedRequest) -> dict[str, Schedule]:
        """Return the schedule of the video, which is also the sound's.

        With LTX-2.5 and guidance, only the video keeps what the second stage makes of it: ltx_pipelines/
        ti2vid_two_stages.py of github.com/Lightricks/LTX-2 at 400fd310.
        """
        schedule = self.schedule(request)
        keeps_sound = is_25(self.config) and not self.config.distilled and self.has_two_stages(request)
        sound = schedule.keep_result(_count_first(request)) if keeps_sound else schedule
        return {VIDEO: schedule, AUDIO: sound}


def _count_first(request: ResolvedRequest) -> int:
    """Return the steps of the first of two stages."""
    return request.steps - len(published.SECOND_STAGE_SIGMAS)


def _lightricks_levels(steps: int) -> tuple[float, ...]:
    """Return the noise level of each step as Lightricks' LTX2Scheduler computes them for videos of any size.

    ltx-pipelines 1.0.0 calls that scheduler without latents: ltx_core/components/schedulers.py of ltx-core 1.0.0. It
    computes in float32 with torch, whose way to count down and to divide is repeated here: the model's embedding of a
    timestep changes with the last bit of a level near 1.
    """
    one, index = np.float32(1), np.arange(steps)
    step = np.float64(one / np.float32(steps))  # Multiplied and added with one rounding.
    levels = np.where(index < (steps + 1) // 2, 1 - step * index, step * (steps - index)).astype(np.float32)
    shift = np.float32(math.exp(published.SHIFT))
    levels = one / (shift + (one / levels - one)) * shift
    return _stretch(levels, published.TERMINAL) if steps > 1 else (1.0,)


def _stretch(levels: np.ndarray, terminal: float) -> tuple[float, ...]:
    """Return noise levels whose distances from 1 are multiplied so that the last level is `terminal`."""
    rest = 1 - levels
    return tuple((1 - rest / (rest[-1] / (1 - terminal))).astype(np.float32).tolist())


def _diffusers_levels(config: Ltx2Config, steps: int, tokens: int) -> tuple[float, ...]:
    """Return the noise level of each step, as diffusers' FlowMatchEulerDiscreteScheduler computes them in float32."""
    scheduler = config.scheduler
    sigmas: np.ndarray = np.linspace(1.0, 1 / steps, steps).astype(np.float32)
    if scheduler["use_dynamic_shifting"]:
        first, last = scheduler["base_image_seq_len"], scheduler["max_image_seq_len"]
        slope = (scheduler["max_shift"] - scheduler["base_shift"]) / (last - first)
        shift = math.exp(min(tokens * slope + scheduler["base_shift"] - slope * first, _LARGEST_EXPONENT))
        sigmas = shift / (shift + (1 / sigmas - 1))
    if scheduler["shift_terminal"] and steps > 1:
        if sigmas[-1] == 1:
            raise InvalidRequest(
                f"with {tokens} tokens the schedule's shift raises every noise level to 1; give fewer "
                "frames (121 work at 1920x1088), leave the preset out, or give your own sigmas",
                "frames",
            )
        return _stretch(sigmas, scheduler["shift_terminal"])
    return tuple(sigmas.astype(np.float32).tolist())
