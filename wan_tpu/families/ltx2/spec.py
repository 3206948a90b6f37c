"""An LTX-2 model as its configuration describes it: stages, limits, defaults, shapes, its steps' numbers."""

import math
from typing import ClassVar

import numpy as np

from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.ltx2 import published
from wan_tpu.families.ltx2.config import Ltx2Config, read_config
from wan_tpu.families.ltx2.guidance import guidance_of
from wan_tpu.families.shared.family_spec import DENOISE, FamilySpec
from wan_tpu.plan import AUDIO, DECODER, ENCODER, VIDEO, Expert
from wan_tpu.request import ResolvedRequest, nearest_multiple
from wan_tpu.schedules import flow
from wan_tpu.schedules.schedule import Schedule

REFINE = "refine"
AUDIO_RATE, LONGEST_S = 25, 60  # Latents of the sound a second; the longest video: three times what it was trained on.
STRIDE = 32  # Pixels per pixel of the latents, which is a token.
AUDIO_STRIDE = 4  # Mel frames, and mel bins, of a latent of the sound.
_LARGEST_EXPONENT = 80  # Beyond it the shift overflows float32; all noise levels are 1 long before.


class Ltx2Spec(FamilySpec):
    """One LTX-2 model."""

    config: Ltx2Config
    published: ClassVar = published
    read_config: ClassVar = staticmethod(read_config)
    spatial_stride = STRIDE
    own_keys = ("model",)

    adapts_text = True
    tasks = ("t2v", "i2v")
    solvers = ("euler",)
    frame_stride = 8

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
    def unused(self) -> tuple[str, ...]:
        """How a schedule is shifted is no setting of a request; both stages run the same transformer."""
        return "guidance_scale_2", "switch_step", "shift"

    @property
    def size_multiple(self) -> int:
        """The multiple for two stages if that is the default; a request for one stage may have multiples of 32."""
        return STRIDE if self.config.upsampler is None else 2 * STRIDE

    @property
    def usual_sizes(self) -> list[tuple[int, int]]:
        """The usual ones, of which few are multiples of 64, and LTX-2's own."""
        examples = [(h, w) for h, w in published.SIZES if h * w <= self._usual_area]
        sizes = [*super().usual_sizes, *examples, *((w, h) for h, w in examples)]
        return list(dict.fromkeys(sizes))

    @property
    def _usual_area(self) -> int:
        """The pixels of the largest size that is offered: 1080p with two stages, otherwise the default."""
        default = self.defaults.height * self.defaults.width
        return default if self.config.upsampler is None else max(default, math.prod(published.SIZES[0]))

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
            ENCODER: ("text_encoder", "connectors", "vae_encoder"),
            DENOISE: (DENOISE,),
            **({} if self.config.upsampler is None else {REFINE: (REFINE, "upsampler", "statistics")}),
            DECODER: (DECODER, "audio_decoder", "vocoder"),
        }

    @property
    def heads(self) -> int:  # type: ignore[override]
        """Attention heads of the transformer; the sound has as many."""
        transformer = self.config.transformer
        return math.gcd(int(transformer["num_attention_heads"]), int(transformer["audio_num_attention_heads"]))

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
        if self.has_two_stages(request) and step <= len(published.DISTILLED_SIGMAS):
            height, width = height // 2, width // 2
        return {VIDEO: (*leading, height, width), AUDIO: self.audio_shape(request)}

    def conditioned_shape(self, request: ResolvedRequest, expert: Expert) -> tuple[int, ...]:
        """Return the shape of an expert's latents, since Lightricks encodes the image again for the second stage.

        Source: ltx_pipelines/distilled.py of ltx-pipelines 1.0.0. diffusers' second stage doesn't see the image.
        """
        if self.follows_diffusers(request):
            return super().conditioned_shape(request, expert)
        return self.latent_shapes(request, expert.stop)[VIDEO]

    def image_sizes(self, request: ResolvedRequest) -> list[tuple[int, int]]:
        """Return each (height, width) in pixels at which an image is encoded."""
        shapes = (self.conditioned_shape(request, expert) for expert in self.experts(request))
        return list(dict.fromkeys((height * STRIDE, width * STRIDE) for *_, height, width in shapes))

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the video's tokens."""
        return math.prod(latent_shape[2:])

    def decoder_chunks(self, latent_frames: int) -> tuple[int, ...]:
        """Return a single chunk with all frames, because the decoder looks ahead."""
        return (latent_frames,)

    def shapes(self, request: ResolvedRequest, *, images: int) -> dict[str, str]:
        """Name the programs as every model does, by each stage's own size and the length of the sound."""
        names, size = super().shapes(request, images=images), f"{request.height}x{request.width}"
        sound = f"{self.audio_tokens(request.frames, request.fps)} of sound"
        for expert in self.experts(request):
            *_, height, width = self.latent_shapes(request, expert.stop)[VIDEO]
            program = names[expert.stage].replace(size, f"{height * STRIDE}x{width * STRIDE}", 1)
            names[expert.stage] = f"{program} {sound}"
        if images:
            sizes = [f"{height}x{width}" for height, width in self.image_sizes(request)]
            names[ENCODER] = f"{ENCODER} {' and '.join(sizes)}"
            if REFINE in names:
                names[REFINE] += f" of {sizes[-1]}"  # The image, whose size need not be the second stage's.
        return names | {DECODER: f"{DECODER} {size}x{request.frames} {sound}"}

    def check_size(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest` for a size that the model can't make, or whose half its first stage can't make."""
        multiple, needs = STRIDE, f"{self.name} needs a multiple of {STRIDE}"
        remedy = ""
        if self.has_two_stages(request):
            multiple, needs = 2 * STRIDE, f"two stages need a multiple of {2 * STRIDE}"
            remedy = f", or give steps {len(published.DISTILLED_SIGMAS)} for one stage"
        # A single row of latents can't be mirrored.
        modes = (self.config.vae[f"{half}_spatial_padding_mode"] for half in ("encoder", "decoder"))
        least = 2 * STRIDE if "reflect" in modes else STRIDE
        for name in ("height", "width"):
            value = getattr(request, name)
            if value < least:
                needs += f", at least {least}"
            if value % multiple or value < least:
                nearest = max(least, nearest_multiple(value, multiple))
                raise InvalidRequest(f"{name} is {value}; {needs}, nearest {nearest}{remedy}", name)

    def _check_settings(self, request: ResolvedRequest) -> None:
        super()._check_settings(request)
        seconds, least = request.frames / request.fps, 1 / AUDIO_RATE
        if not least <= seconds <= LONGEST_S:
            nearest = request.frames / min(max(seconds, least), LONGEST_S)
            raise InvalidRequest(
                f"fps is {request.fps:g}, so that {request.frames} frames and their sound last {seconds:.3g} s; "
                f"{self.name} makes {least:g} to {LONGEST_S} s; nearest fps: {nearest:.3g}",
                "fps",
            )
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

    # ---- Steps.

    def has_two_stages(self, request: ResolvedRequest) -> bool:
        """Return whether a request is made at half the size first; its number of steps says so."""
        steps = len(published.DISTILLED_SIGMAS) + len(published.SECOND_STAGE_SIGMAS)
        return self.config.upsampler is not None and request.sigmas is None and request.steps == steps

    def is_guided(self, request: ResolvedRequest) -> bool:
        """Return whether there is guidance, of any kind that the model has."""
        return request.guidance_scale > 1

    def count_evaluations(self, request: ResolvedRequest, expert: Expert) -> int:
        """Return how often a step runs the transformer."""
        return self._guidance_rows(request).shape[1] if expert.guided else 1

    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return the one expert, or the two stages that run the same transformer at two sizes."""
        guided, first = self.is_guided(request), len(published.DISTILLED_SIGMAS)
        if not self.has_two_stages(request):
            return super().experts(request)
        return Expert(DENOISE, 0, first, guided), Expert(REFINE, first, request.steps, guided, enlarges=True)

    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the numbers of every step: Euler's method, with guidance of video and sound, [2, E] for E evaluations.

        A row says how far the result is pushed away from each evaluation but the first, and how much it is pulled back.
        """
        if request.sigmas is not None:
            schedule = flow.euler_at(request.sigmas)
        elif self.has_two_stages(request):
            second = flow.euler_at(published.SECOND_STAGE_SIGMAS)
            schedule = flow.euler_at(published.DISTILLED_SIGMAS).followed_by(second)
        elif self.config.distilled and request.steps == len(published.DISTILLED_SIGMAS):
            schedule = flow.euler_at(published.DISTILLED_SIGMAS)
        else:
            levels = _lightricks_levels(request.steps)
            if self.follows_diffusers(request):
                levels = _diffusers_levels(self.config, request.steps, self.tokens(self.latent_shape(request)))
            schedule = flow.euler_at(levels)
        rows = self._guidance_rows(request)
        return schedule.with_guidance(np.broadcast_to(rows, (request.steps, *rows.shape)))

    def _guidance_rows(self, request: ResolvedRequest) -> np.ndarray:
        """Return the guidance of video and sound, [2, E]."""
        if not self.is_guided(request):
            return np.zeros((2, 1))
        guidance = guidance_of(self.config, follows_diffusers=self.follows_diffusers(request))
        extra_scales = (guidance.perturbation, guidance.modality - 1) if guidance.perturbation else ()
        scales = request.guidance_scale, guidance.audio_scale or request.guidance_scale
        return np.array([(scale - 1, *extra_scales, guidance.rescale) for scale in scales])

    def schedules(self, request: ResolvedRequest) -> dict[str, Schedule]:
        """Return the schedule of the video, which is also the sound's."""
        schedule = self.schedule(request)
        return {VIDEO: schedule, AUDIO: schedule}


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
