"""A MiniMax-H3 model as its configuration describes it: stages, limits, defaults, shapes, its steps' numbers."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import ClassVar, Self, TypeVar

import numpy as np

from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.minimax_h3 import published, references, sampling
from wan_tpu.families.minimax_h3.clips import CLIP_FRAMES, CLIP_LATENTS, chunk_lengths
from wan_tpu.families.minimax_h3.config import (
    FPS,
    LABEL,
    STRIDE,
    TEXT_ROWS,
    MiniMaxH3Config,
    count_voices,
    fit_rows,
    read_config,
)
from wan_tpu.families.shared.family_spec import DENOISE, FamilySpec
from wan_tpu.families.shared.token_counts import TokenCount, count_tokens
from wan_tpu.media.image import describe_stretch
from wan_tpu.plan import AUDIO, DECODER, ENCODER, VIDEO, Expert
from wan_tpu.reference import CONTINUED, ENDS, TAIL, Reference
from wan_tpu.request import MATCH, GenerationRequest, Preset, ResolvedRequest, nearest_multiple
from wan_tpu.schedules import flow
from wan_tpu.schedules.schedule import Schedule
from wan_tpu.tail import Overlap

# Frames: 4 s and 15 s, as MiniMax-H3's model card has them, rounded up to what the VAE can decode, as in SGLang.
SHORTEST, LONGEST = 107, 362
CHANNELS = 2  # Of the sound.
WIDEST = 4  # The width of the widest video, divided by its height.
REFERENCES = {"image": 9, "video": 3, "audio": 3}  # The most references of each kind, as MiniMax documents them.
MOST_REFERENCES = 12  # Of all kinds.
CLIP_ENCODER, VOICE_ENCODER = "clip_encoder", "audio_encoder"  # Components that only some references need.
DENOISE_REFERENCES = "denoise_ref"  # The stage and the component of requests with references.

_Request = TypeVar("_Request", bound=GenerationRequest)


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
        """Few steps by distilled adapters; of a distilled transformer, its steps with images."""
        if self.config.fasth3 is not None:
            return sampling.list_fasth3_presets(self.config.fasth3, float(self.config.scheduler["shift"]))
        return sampling.FEW_STEP_PRESETS.get(self.name, {})

    def attention_density(self, request: ResolvedRequest) -> float | None:
        """Return the share of the blocks of keys that sparse attention keeps; None for attention to all keys."""
        return None if self.config.fasth3 else sampling.DENSITIES.get(request.preset or "")

    def sparsity(self, request: ResolvedRequest) -> float | None:
        """Return the share of the video's tiles that video sparse attention leaves out; None without it."""
        if self.config.fasth3 is not None:
            return self.config.fasth3.sparsity
        return sampling.SPARSITIES.get(request.preset or "")

    def needs_adapter(self, preset: str | None) -> bool:
        """Return whether a preset's adapter holds the gates of video sparse attention."""
        return self.config.fasth3 is None and preset in sampling.SPARSITIES

    optional_stages = frozenset([DENOISE_REFERENCES])

    def limit_to(self, stages: Collection[str]) -> Self:
        """Return the model, without references if their transformer isn't hosted."""
        if DENOISE_REFERENCES in stages or not self.takes_references:
            return self
        return dataclasses.replace(self, config=dataclasses.replace(self.config, canvas=None))

    def list_components(self, request: ResolvedRequest) -> list[str]:
        """Return the components of a request, with those that encode its references."""
        names = super().list_components(request)
        if request.references is None:
            return names
        kinds = {reference.kind for reference in request.references}
        encoders = {CLIP_ENCODER: bool(kinds & {"video", CONTINUED})}
        encoders[VOICE_ENCODER] = any(reference.samples for reference in request.references)
        return [*names, *(name for name, is_needed in encoders.items() if is_needed)]

    def fit_reference(self, request: ResolvedRequest, kind: str, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size of a video's frames, and the size of an image unless it is smaller."""
        fitted = references.fit(self.config, request, kind, size)
        return fitted if kind == "video" or fitted[0] < size[0] else size

    def typical_references(self, request: _Request) -> tuple[_Request, ...]:
        """Return the request with an image of the video's size, and with the end of a video that it continues."""
        preset = self.few_step_presets.get(request.preset or "")
        if not self.takes_references or (preset is not None and not preset.with_references):
            return ()
        size = request.height or self.defaults.height, request.width or self.defaults.width
        frames, rate = references.OVERLAP.frames, self.audio_rate
        end = Reference(TAIL, None, *size, frames, round(frames / FPS * rate), rate)
        image = dataclasses.replace(request, references=(Reference("image", None, *size),), reference_size=MATCH)
        return (image,) if preset is not None else (image, dataclasses.replace(request, references=(end,)))

    def typical_requests(self, request: _Request) -> tuple[_Request, ...]:
        """Return what every model does, without the request itself if its preset is for references only."""
        preset = self.few_step_presets.get(request.preset or "")
        with_references = self.typical_references(request)
        if with_references and preset is not None and preset.with_references:
            return with_references
        return (request, *with_references)

    @property
    def reference_counts(self) -> Mapping[str, int]:  # type: ignore[override]
        """How many references of each kind there may be; none if the checkpoint lacks the transformer for them."""
        return {} if self.config.canvas is None else REFERENCES

    @property
    def overlap(self) -> Overlap | None:  # type: ignore[override]
        """How a video overlaps with the one that it continues, which is one of its references."""
        return references.OVERLAP if self.takes_references else None

    @property
    def follows_sound(self) -> bool:  # type: ignore[override]
        """Whether a sound may be given: the transformer for references reads it without noise."""
        return self.takes_references

    @property
    def most_references(self) -> int:  # type: ignore[override]
        """How many references there may be."""
        return MOST_REFERENCES if self.reference_counts else 0

    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return the transformer for references, or the other one."""
        stage = DENOISE if request.references is None else DENOISE_REFERENCES
        return (Expert(stage, 0, request.steps, self.is_guided(request)),)

    @property
    def unused(self) -> tuple[str, ...]:
        """Guidance is part of the weights, and so is the frame rate that they were trained on."""
        return (*dict.fromkeys(("guidance_scale", "guidance_scale_2", "switch_step", "fps", *super().unused)),)

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
            **({DENOISE_REFERENCES: (DENOISE_REFERENCES,)} if self.takes_references else {}),
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
        return CHANNELS * count_voices(frames)

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
        if request.references is not None:
            names |= self._name_references(request)
        rows = self.choose_text_rows(request, images=images)
        if rows > TEXT_ROWS[0]:
            names = {stage: f"{name}, {rows} tokens" if stage != DECODER else name for stage, name in names.items()}
        if self.attention_density(request) is not None:
            names[DENOISE] += ", sparse attention"
        if self.sparsity(request) is not None:
            names[DENOISE] += ", video sparse attention"
        return names | {DECODER: f"{names[DECODER]}x{request.frames}"}

    def _name_references(self, request: ResolvedRequest) -> dict[str, str]:
        """Name the programs of a request with references: encoders differ with every size, steps with the rows."""
        measures, size = references.measure(self.config, request), f"{request.height}x{request.width}x{request.frames}"
        kinds = ", ".join(f"{m.kind} {m.frames}x{m.height}x{m.width} {m.voices or m.locked}" for m in measures)
        room = references.find_room(self.config, measures)
        rows = f"{room.vision}+{room.visible}+{room.voices}+{room.locked} rows of references"
        return {
            ENCODER: f"{ENCODER} {kinds}",
            DENOISE_REFERENCES: f"{DENOISE_REFERENCES} {size} {rows} {request.solver}"
            + "".join(f" {adapter}" for adapter in request.adapters_for(DENOISE_REFERENCES)),
        }

    def check(self, request: ResolvedRequest, *, image: bool, last: bool, video: bool | None = None) -> None:
        """Refuse what every model refuses, and a prompt that is too long unless it may be cut.

        FastVideo didn't distil its transformers with images: those are refused unless a preset asks for them.
        """
        super().check(request, image=image, last=last, video=video)
        if self.config.fasth3 is not None and (image or last) and request.preset != sampling.FASTH3_IMAGES:
            field = "image" if image else "last_image"
            raise InvalidRequest(
                f"{field} was given, but {self.name} was distilled from text alone; leave {field} out, or give preset "
                f"{sampling.FASTH3_IMAGES} to try it all the same",
                field,
            )
        preset = self.few_step_presets.get(request.preset or "")
        if request.references is not None:
            is_end = request.references[-1].kind in ENDS
            if preset is not None and (is_end or not preset.with_references):
                refused = "the end of a video was" if is_end else "references were"
                others = self.few_step_presets.items()
                fitting = [] if is_end else [name for name, other in others if other.with_references]
                instead = f", or give preset {' or '.join(fitting)}" if fitting else ""
                why = f"preset {request.preset} is trained without them; leave the preset out{instead}"
                raise InvalidRequest(f"{refused} given, but {why}", "preset")
            references.check(self.config, request)
        elif preset is not None and preset.with_references:
            raise InvalidRequest(
                f"preset {request.preset} is for requests with references, and here are none, as in segments after the "
                "first one; leave the preset out",
                "preset",
            )
        if self.needs_adapter(request.preset) and not request.loras:
            raise InvalidRequest(
                f"preset {request.preset} is for video sparse attention, whose gates are in its adapter; leave loras "
                "out, or give that adapter, too",
                "loras",
            )
        count = self._count_text(request, image + last)
        if count is not None and count.cut is not None and not self.may_cut(request):
            raise count.cut.refuse("prompt")

    def images_of(self, request: ResolvedRequest) -> tuple[int, ...]:
        """Return how many images a request may have; none with a transformer that was distilled from text alone."""
        if self.config.fasth3 is not None and request.preset != sampling.FASTH3_IMAGES:
            return (0,)
        return super().images_of(request)

    def list_warnings(self, request: ResolvedRequest, *, images: int) -> Iterator[str]:
        """Yield what every model does, stretched references, a replaced adapter, and the cut of a long prompt."""
        yield from super().list_warnings(request, images=images)
        preset, kinds = self.presets.get(request.preset or ""), {one.kind for one in request.references or ()}
        if preset is not None and (self.attention_density(request) is not None or self.needs_adapter(request.preset)):
            own = dict(preset.settings).get("loras", ())
            # A copy of its file may be anywhere.
            files = [{PurePath(adapter.path).name for adapter in adapters} for adapters in (own, request.loras)]
            if own and files[0].isdisjoint(files[1]):
                given = ", ".join(map(str, request.loras)) or "none"
                yield (
                    f"preset {request.preset} has sparse attention, for which {own[0]} was trained; loras is {given}: "
                    "leave it out, or give that adapter, too"
                )
        if preset is not None and preset.with_references and "image" in kinds and request.reference_size != MATCH:
            yield f"preset {request.preset} was trained with images of the video's size: reference_size {MATCH}"
        for number, reference in enumerate(request.references or (), 1):
            if reference.kind in ("image", "video"):
                size = reference.height, reference.width
                fitted = references.fit(self.config, request, reference.kind, size)
                if (warning := describe_stretch(f"reference {number}", size, fitted)) is not None:
                    yield warning
        count = self._count_text(request, images)
        if count is not None and count.cut is not None:
            yield count.cut.describe("prompt")

    def _count_text(self, request: ResolvedRequest, images: int) -> TokenCount | None:
        """Count the tokens of a prompt, behind the labels of its images; None if there is no telling here."""
        texts = [LABEL.format(i + 1) for i in range(images)]
        if request.references is not None:
            parts = references.read_parts(self.config, references.measure(self.config, request))
            texts = [part.label for part in parts]
        labels = [count_tokens(self.tokenizer, text, TEXT_ROWS[-1]) for text in texts]
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
        sound, fasth3 = float(self.config.audio_scheduler["shift"]), self.config.fasth3
        if request.sigmas is None and fasth3 is not None and request.steps == len(fasth3.levels):
            return {
                part: flow.euler_rising_at(sampling.shift_levels(fasth3.levels, shift))
                for part, shift in ((VIDEO, request.shift), (AUDIO, sound))
            }
        if request.sigmas is None:
            return {
                VIDEO: flow.euler_rising(request.steps, request.shift),
                AUDIO: flow.euler_rising(request.steps, sound),
            }
        # Noise levels given for the video are unshifted, and shifted again with the sound's own shift.
        levels = np.array(request.sigmas)
        unshifted = levels / (request.shift - (request.shift - 1) * levels)
        shifted = sampling.shift_levels(unshifted.tolist(), sound)
        return {VIDEO: flow.euler_rising_at(request.sigmas), AUDIO: flow.euler_rising_at(shifted)}
