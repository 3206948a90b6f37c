"""The plan of one request: what each stage has to do. Drivers, leaders and hosts hold it, without JAX and torch."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image

from wan_tpu.errors import InvalidRequest
from wan_tpu.request import DIFFUSERS, ResolvedRequest

ENCODER, DECODER = "encoder", "decoder"  # The first and the last stage of every model; between them it denoises.
# Among a prompt's arrays, float32 [1]: how long its video should be, by a model that chooses lengths.
SECONDS = "seconds"
VIDEO, AUDIO = "video", "audio"  # The parts that a model denoises together: each has latents and a schedule.


@dataclass(frozen=True)
class Expert:
    """A range of denoising steps and the stage that runs them.

    Attributes:
        start: Its first step, counted from 0 over all experts.
        guided: Whether each step runs two branches, one for the prompt and one for the negative prompt.
        enlarges: Whether the latents are upsampled, and noise is added again, before its first step.
        chunk: Index of the part of the video that it denoises, counted from 0, if parts are denoised one after the
            other.
    """

    stage: str
    start: int
    stop: int
    guided: bool
    enlarges: bool = False
    chunk: int = 0


class PromptText(NamedTuple):
    """A text to encode.

    Attributes:
        field: The request's field that has it.
        may_be_cut: Whether it is cut if the model reads less; otherwise the request is refused.
        by_diffusers: Whether it is read by diffusers' rules, where these differ from those of the model's authors.
    """

    text: str
    field: str = "prompt"
    may_be_cut: bool = True
    by_diffusers: bool = False


@dataclass(frozen=True)
class RequestPlan:
    """What a request needs, stage by stage; created once, by `wan_tpu.spec.ModelSpec.plan`.

    Attributes:
        request: The request with every field filled in.
        prompts: Texts to encode: the prompt and, with guidance, the negative prompt; empty if the text encoder reads
            the request's images together with its prompt.
        has_image: Whether an image or a video is encoded, too, even if the plan holds the request without its pixels.
        experts: Which stage runs which steps, in order; experts without a step are left out.
        skipped: For each step, which branches reuse what an earlier step computed; None without a cache.
        decoder_chunks: How many latent frames the decoder takes at a time, chunk by chunk.
        shapes: For each stage, a name for the programs and adapters that it needs. A different name means that
            something must be compiled or merged first.
        adapts_text: Whether the request's adapters may change how its prompts are encoded.
        cuts_prompts: Whether a prompt that is longer than the model reads is cut.
        warnings: What the request's author should know before anything is computed.
        needs_prompt: Whether an empty prompt leaves the model nothing to attend to. Only `check_prompt` refuses one,
            because sizes are planned without a prompt.
    """

    request: ResolvedRequest
    prompts: tuple[str, ...]
    has_image: bool
    images: int
    experts: tuple[Expert, ...]
    skipped: tuple[tuple[bool, bool], ...] | None
    decoder_chunks: tuple[int, ...]
    has_sound: bool
    shapes: dict[str, str]
    needs_prompt: bool = False
    adapts_text: bool = False
    cuts_prompts: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def has_open_length(self) -> bool:
        """Whether the model will choose the length when the prompt is encoded (`wan_tpu.spec.ModelSpec.set_length`).

        Until then, the plan is for the longest video.
        """
        return self.request.max_seconds is not None

    @property
    def first_step(self) -> int:
        """The first step that is run; a video's strength may skip the ones before it."""
        return self.experts[0].start

    @property
    def steps(self) -> int:
        """How many steps there are over all chunks of the video; `request.steps` are those of one chunk."""
        return self.experts[-1].stop

    @property
    def preview_steps(self) -> tuple[int, ...]:
        """The steps after which a preview is shown: at each quarter of those that are run, but not at the end."""
        run = self.steps - self.first_step
        quarters = {self.first_step - (-run * quarter // 4) for quarter in (1, 2, 3)}
        return tuple(sorted(quarters - {self.steps}))

    @property
    def chunk_stops(self) -> tuple[int, ...]:
        """For each chunk of the video, the first step after it; most models denoise a video as one chunk."""
        return tuple({expert.chunk: expert.stop for expert in self.experts}.values())

    def chunk_at(self, step: int) -> int:
        """Return the chunk that the latents belong to after `step` steps; after its last step, still that chunk."""
        return next(expert.chunk for expert in self.experts if step <= expert.stop)

    def count_denoised_chunks(self, step: int) -> int:
        """Return how many chunks of the video are denoised after `step` steps."""
        return sum(stop <= step for stop in self.chunk_stops)

    def decodable(self, step: int) -> int:
        """Return how many of the decoder's chunks can be decoded after `step` steps: those of fully denoised chunks."""
        return len(self.decoder_chunks) * self.count_denoised_chunks(step) // len(self.chunk_stops)

    def expert_at(self, step: int) -> Expert:
        """Return the expert that runs the step after `step` steps are done.

        Raises:
            ValueError: No expert runs that step.
        """
        for expert in self.experts:
            if expert.start <= step < expert.stop:
                return expert
        raise ValueError(f"no expert runs a step after {step}: {self.first_step} to {self.steps} are run")

    def experts_on(self, stages: Collection[str]) -> tuple[Expert, ...]:
        """Return the experts that run on the given stages, such as those that a pool hosts."""
        return tuple(expert for expert in self.experts if expert.stage in stages)

    def size_of(self, expert: Expert) -> int:
        """Return an expert's position in its chunk and stage: each later expert of a stage denoises larger latents."""
        return [e for e in self.experts if (e.stage, e.chunk) == (expert.stage, expert.chunk)].index(expert)

    def describe_text(self, text: str) -> PromptText:
        """Return one of the `prompts` with what its encoding needs to know."""
        field = "prompt" if text == self.request.prompt else "negative_prompt"
        return PromptText(text, field, self.cuts_prompts, self.request.preset == DIFFUSERS)

    def check_prompt(self) -> None:
        """Refuse an empty prompt where the model needs one; raises `InvalidRequest`."""
        if self.needs_prompt and not self.request.prompt:
            raise InvalidRequest(
                "prompt is empty, but this model needs a prompt or an image: describe what happens in the video, or "
                "give an image",
                "prompt",
            )

    def with_images(self, image: Image.Image | None = None, last_image: Image.Image | None = None) -> "RequestPlan":
        """Return the plan with these images; it is kept without them, and so small, while nobody needs them."""
        return self.with_request(dataclasses.replace(self.request, image=image, last_image=last_image))

    def without_image(self) -> "RequestPlan":
        """Return the plan without the images' pixels, 2.8 MB at 720p: experts and the decoder need none."""
        return self.with_request(self.request.without_files())

    def with_request(self, request: ResolvedRequest) -> "RequestPlan":
        """Return the plan for the same request with other images, adapters or seed; they don't affect the plan."""
        return dataclasses.replace(self, request=request)
