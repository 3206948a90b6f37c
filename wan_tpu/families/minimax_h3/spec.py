"""A MiniMax-H3 model as its configuration describes it: stages, limits, defaults, shapes, its steps' numbers."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.minimax_h3 import published, sampling
from wan_tpu.families.minimax_h3.clips import CLIP_FRAMES, CLIP_LATENTS, chunk_lengths
from wan_tpu.families.minimax_h3.config import LABEL, TEXT_ROWS, MiniMaxH3Config, fit_rows, read_config
from wan_tpu.families.shared.family_spec import DENOISE, FamilySpec
from wan_tpu.families.shared.token_counts import TokenCount, count_tokens
from wan_tpu.plan import AUDIO, DECODER, ENCODER, VIDEO
from wan_tpu.request import Preset, ResolvedRequest, nearest_multiple
from wan_tpu.schedules import flow
from wan_tpu.schedules.schedule import Schedule

FPS = 24  # The only frame rate that the model was trained on.
# Frames: 4 s and 15 s, as MiniMax-H3's model card has them, rounded up to what the VAE can decode, as in SGLang.
SHORTEST, LONGEST = 107, 362
AUDIO_RATE, CHANNELS = 40, 2  # Latents of the sound a second, for each of its channels.
WIDEST = 4  # The width of the widest video, divided by its height.
STRIDE = 16  # Pixels per pixel of the latents, four of which are a token.


class MiniMaxH3Spec(FamilySpec):
    """One MiniMax-H3 model."""

    config: MiniMaxH3Config
    published: ClassVar = published
    read_config: ClassVar = staticmethod(read_config)
    spatial_stride = STRIDE

    tasks = ("t2v", "i2v")
    last_images = "alone"
    reads_images = True
    needs_prompt = True
    cuts_prompts = False
    text_rows = TEXT_ROWS
    seeds_images = True
    solvers = ("euler",)
    frame_stride = CLIP_FRAMES
    frame_offset = SHORTEST
    size_multiple = 2 * STRIDE

    def __post_init__(self) -> None:
        transformer, vae, audio = self.config.transformer, self.config.vae, self.config.audio_vae
        pairs = {
            "in_channels": (transformer["in_channels"], vae["latent_channels"]),
            "audio_in_channels": (transformer["audio_in_channels"], audio["latent_channels"]),
            "text_dim": (transformer["text_dim"], self.config.text_encoder["hidden_size"]),
        }
        for key, (value, fitting) in pairs.items():
            if value != fitting:
                raise CheckpointError(
                    f"the transformer has {key} {value}, but its counterpart has {fitting}; give a checkpoint whose "
                    "components belong together"
                )

    @property
    def few_step_presets(self) -> Mapping[str, Preset]:
        """Few steps by distilled adapters."""
        return sampling.FEW_STEP_PRESETS.get(self.name, {})

    def attention_density(self, request: ResolvedRequest) -> float | None:
        """Return the share of the blocks of keys that sparse attention keeps; None for attention to all keys."""
        return sampling.DENSITIES.get(request.preset or "")

    @property
    def unused(self) -> tuple[str, ...]:
        """Guidance is part of the weights, and so is the frame rate that they were trained on."""
        return "guidance_scale", "guidance_scale_2", "switch_step", "fps"

    @property
    def audio_rate(self) -> int:  # type: ignore[override]
        """Samples per second of the model's sound."""
        return int(self.config.audio_vae["sampling_rate"])

    @property
    def components(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        """The components of each stage."""
        return {
            ENCODER: ("text_encoder", "vision", "vae_encoder"),
            DENOISE: (DENOISE,),
            DECODER: (DECODER, "audio_decoder"),
        }

    # ---- Shapes.

    def nearest_frames(self, frames: float) -> int:
        """Return the length, in frames, from `SHORTEST` to `LONGEST`, that is nearest to `frames`."""
        return super().nearest_frames(min(frames, LONGEST))

    def latent_frames(self, frames: int) -> int:
        """Return how many latent frames a video of that many frames has: 5 n + 2 for 17 n + 5."""
        return (frames - CLIP_LATENTS) // CLIP_FRAMES * CLIP_LATENTS + 2

    def audio_tokens(self, frames: int) -> int:
        """Return 2 A: for both channels, the rounded number of latents that last as long as the video."""
        return CHANNELS * round(frames / FPS * AUDIO_RATE)

    def latent_shapes(self, request: ResolvedRequest, step: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the video's latents and of the sound's, [1, 2 A, channels], one channel first."""
        sound = 1, self.audio_tokens(request.frames), int(self.config.audio_vae["latent_channels"])
        return {VIDEO: self.latent_shape(request), AUDIO: sound}

    def size_like(self, picture: tuple[int, int], preset: str | None = None) -> tuple[int, int]:
        """Return the (height, width) of an image's shape, whose short side or area is that of the default size.

        Raises:
            InvalidRequest: The model wasn't trained on videos of such a shape.
        """
        short, area = sorted((self.defaults.height, self.defaults.width))[0], self.defaults.height * self.defaults.width
        shape = picture[1] / picture[0]
        if not 1 / WIDEST <= shape <= WIDEST:
            raise InvalidRequest(
                f"the image is {picture[1]}x{picture[0]}, {shape:.3g} times as wide as it is high; {self.name} "
                f"makes videos with aspect ratios from 1:{WIDEST} to {WIDEST}:1: crop the image, or give height and "
                "width"
            )
        height, width = (short, short * shape) if shape >= 1 else (short / shape, short)
        factor = min(1.0, (area / (height * width)) ** 0.5)
        return nearest_multiple(height * factor, self.size_multiple), nearest_multiple(
            width * factor, self.size_multiple
        )

    def decoder_chunks(self, latent_frames: int) -> tuple[int, ...]:
        """Return how many latent frames the decoder takes at a time."""
        return chunk_lengths(latent_frames)

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the video's tokens."""
        _, _, frames, height, width = latent_shape
        _, patch_height, patch_width = self.config.transformer["patch_size"]
        return frames * (height // patch_height) * (width // patch_width)

    def choose_text_rows(self, request: ResolvedRequest, *, images: int) -> int:
        """Return how many rows the prompt and the labels of its keyframes take.

        A process that can't read the tokenizer plans for a short text. The text encoder's counts in any case.
        """
        count = self._count_text(request, images)
        return TEXT_ROWS[0] if count is None else fit_rows(count.tokens)

    def shapes(self, request: ResolvedRequest, *, images: int) -> dict[str, str]:
        """Name the programs as every model does; long texts, sparse attention and lengths of sounds have their own."""
        names = super().shapes(request, images=images)
        rows = self.choose_text_rows(request, images=images)
        if rows > TEXT_ROWS[0]:
            names = {stage: f"{name}, {rows} tokens" if stage != DECODER else name for stage, name in names.items()}
        if self.attention_density(request) is not None:
            names[DENOISE] += ", sparse attention"
        return names | {DECODER: f"{names[DECODER]}x{request.frames}"}

    def check(self, request: ResolvedRequest, *, image: bool, last: bool, video: bool | None = None) -> None:
        """Refuse what every model refuses, and a prompt that is too long unless it may be cut."""
        super().check(request, image=image, last=last, video=video)
        count = self._count_text(request, image + last)
        if count is not None and count.cut is not None and not self.may_cut(request):
            raise count.cut.refuse("prompt")

    def list_warnings(self, request: ResolvedRequest, *, images: int) -> Iterator[str]:
        """Yield what every model does, and the cut if the prompt is too long."""
        yield from super().list_warnings(request, images=images)
        count = self._count_text(request, images)
        if count is not None and count.cut is not None:
            yield count.cut.describe("prompt")

    def _count_text(self, request: ResolvedRequest, images: int) -> TokenCount | None:
        """Count the tokens of a prompt, behind the labels of its keyframes; None if there is no telling here."""
        labels = [count_tokens(self.tokenizer, LABEL.format(i + 1), TEXT_ROWS[-1]) for i in range(images)]
        spoken = sum(label.tokens for label in labels if label is not None)
        count = count_tokens(self.tokenizer, request.prompt, TEXT_ROWS[-1] - spoken)
        return None if count is None else count._replace(tokens=count.tokens + spoken)

    # ---- Steps.

    def is_guided(self, request: ResolvedRequest) -> bool:
        """Return False: guidance is part of the weights."""
        return False

    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the numbers of every step of the video."""
        return self.schedules(request)[VIDEO]

    def schedules(self, request: ResolvedRequest) -> dict[str, Schedule]:
        """Return the schedules of video and sound, which differ by their shifts."""
        sound = float(self.config.audio_scheduler["shift"])
        if request.sigmas is None:
            return {
                VIDEO: flow.euler_rising(request.steps, request.shift),
                AUDIO: flow.euler_rising(request.steps, sound),
            }
        # Noise levels given for the video are unshifted, and shifted again with the sound's own shift.
        levels = np.array(request.sigmas)
        unshifted = levels / (request.shift - (request.shift - 1) * levels)
        shifted = sound * unshifted / (1 + (sound - 1) * unshifted)
        return {VIDEO: flow.euler_rising_at(request.sigmas), AUDIO: flow.euler_rising_at(tuple(shifted.tolist()))}
