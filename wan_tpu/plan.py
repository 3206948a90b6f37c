"""What one request takes of a model, stage by stage. No JAX, no torch: drivers, leaders and hosts all hold one."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from PIL import Image

from wan_tpu.errors import InvalidRequest
from wan_tpu.request import ResolvedRequest

ENCODER, DECODER = "encoder", "decoder"  # The first and the last stage of every model; between them it denoises.
VIDEO, AUDIO = "video", "audio"  # The parts that a model denoises together: each has latents and a schedule.


@dataclass(frozen=True)
class Expert:
    """A stretch of steps and the stage that runs it.

    Attributes:
        stage: Name of the stage.
        start: Its first step, counted from 0 over all experts.
        stop: The first step after it.
        guided: Whether it runs two branches, the prompt's and the negative prompt's.
        enlarges: Whether the latents become larger, and get noise again, before its first step.
        chunk: Which part of the video it denoises, where parts are denoised one after the other: from 0 to the last.
    """

    stage: str
    start: int
    stop: int
    guided: bool
    enlarges: bool = False
    chunk: int = 0


@dataclass(frozen=True)
class RequestPlan:
    """What a request takes, stage by stage; made once by `wan_tpu.spec.ModelSpec.plan`.

    Attributes:
        request: The request with every field filled in.
        prompts: Texts to encode: the prompt and, under guidance, the negative prompt; none where the text encoder reads
            a request's images with its prompt.
        has_image: Whether an image or a video is encoded, too. The plan may hold the request without its pixels.
        images: How many images are encoded.
        experts: Which stage runs which steps, in order; experts without a step are left out.
        skipped: For each step, which branches reuse what an earlier step computed; None without a cache.
        decoder_chunks: How many latent frames the decoder takes at a time, chunk by chunk.
        has_sound: Whether the video has sound.
        shapes: By stage, the name of the programs and adapters it needs. Another name means compiling or merging anew.
        needs_prompt: Whether the model has nothing to attend to if the prompt is empty. Sizes are planned without one.
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

    @property
    def first_step(self) -> int:
        """The first step that is run: a video's strength may leave out the ones before."""
        return self.experts[0].start

    @property
    def steps(self) -> int:
        """How many steps there are over all chunks of the video; `request.steps` are those of one chunk."""
        return self.experts[-1].stop

    @property
    def chunk_stops(self) -> tuple[int, ...]:
        """For each chunk of the video, the first step after it; most models denoise a video as one chunk."""
        return tuple({expert.chunk: expert.stop for expert in self.experts}.values())

    def chunk_at(self, step: int) -> int:
        """Return which chunk the latents after `step` steps are of: at its end still the one that is denoised."""
        return next(expert.chunk for expert in self.experts if step <= expert.stop)

    def count_denoised_chunks(self, step: int) -> int:
        """Return how many chunks of the video are denoised after `step` steps."""
        return sum(stop <= step for stop in self.chunk_stops)

    def decodable(self, step: int) -> int:
        """Return how many of the decoder's chunks can be decoded after `step` steps: those of denoised chunks."""
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
        """Return the experts of some stages, such as those that a pool hosts."""
        return tuple(expert for expert in self.experts if expert.stage in stages)

    def size_of(self, expert: Expert) -> int:
        """Return 0 for the first expert of its chunk and stage: others of that stage denoise larger latents."""
        return [e for e in self.experts if (e.stage, e.chunk) == (expert.stage, expert.chunk)].index(expert)

    def check_prompt(self) -> None:
        """Refuse an empty prompt where the model needs one; raises `InvalidRequest`."""
        if self.needs_prompt and not self.request.prompt:
            raise InvalidRequest(
                "prompt is empty, and without an image this model has nothing else to go by: say what happens in the "
                "video, or give an image",
                "prompt",
            )

    def with_images(self, image: Image.Image | None = None, last_image: Image.Image | None = None) -> "RequestPlan":
        """Return the plan with those images in place of its own: it stays small while they aren't needed."""
        return self.with_request(dataclasses.replace(self.request, image=image, last_image=last_image))

    def without_image(self) -> "RequestPlan":
        """Return the plan without the images' pixels, 2.8 MB at 720p: experts and the decoder need none."""
        return self.with_request(dataclasses.replace(self.request, image=None, last_image=None, video=None))

    def with_request(self, request: ResolvedRequest) -> "RequestPlan":
        """Return the plan for the same request with other images, adapters or seed, which change nothing about it."""
        return dataclasses.replace(self, request=request)
