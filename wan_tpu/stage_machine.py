"""What comes next for a request: one value without I/O, asked by everything that makes videos.

    RequestPlan ──► StageMachine ── next ──► an operation ──► an executor runs it
                        ▲                                            │
                        └───────────── after(operation) ─────────────┘

The machine decides where a request begins and ends, which expert runs which step, what must be encoded again after a
loss, when encoded inputs may be released, and what may run at the same time. Executors only run operations: one
process (`wan_tpu.stages.local`), stages with files between them (`wan_tpu.commands.staged`), and pools of slices
(`actors.pipeline.request_run` between pools, `actors.slices.stage_runner` within one).
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from wan_tpu.plan import DECODER, ENCODER, Expert, RequestPlan


@dataclass(frozen=True)
class EncodeText:
    """Compute the embeddings of one prompt."""

    prompt: str
    stage: ClassVar[str] = ENCODER


@dataclass(frozen=True)
class EncodeImage:
    """Encode the request's image, or the video that it begins with."""

    stage: ClassVar[str] = ENCODER


@dataclass(frozen=True)
class Step:
    """Run one denoising step; `index` steps are done before it."""

    expert: Expert
    index: int

    @property
    def stage(self) -> str:
        """The stage that runs it."""
        return self.expert.stage


@dataclass(frozen=True)
class Finish:
    """Do to the latents what the model does after its last step, where that step was run."""

    stage: str


@dataclass(frozen=True)
class HandOver:
    """Leave the state for another executor, which hosts the stage of the next operation."""

    stage: str


@dataclass(frozen=True)
class DecodeSound:
    """Decode the sound: before any frame, so that an mp4 can be written as frames come."""

    stage: ClassVar[str] = DECODER


@dataclass(frozen=True)
class Decode:
    """Decode one chunk of latent frames."""

    chunk: int
    stage: ClassVar[str] = DECODER


@dataclass(frozen=True)
class Save:
    """End the video's file and put it where it was asked for."""

    stage: ClassVar[str] = DECODER


Encode = EncodeText | EncodeImage
Operation = Encode | Step | Finish | DecodeSound | Decode | Save


@dataclass(frozen=True)
class StageMachine:
    """How far a request is, and from that, what comes next.

    A video that is denoised in chunks has steps counted over all of them. Each chunk but the last can be decoded as
    soon as its last step is done, while the next one is denoised; the last one when the latents are finished.

    Denoising ends at the plan's last step and nowhere else, because its last sigma is what the decoder takes: latents
    are finished only where `step` is the plan's `steps`. To end a request earlier, plan it with fewer steps. An
    executor that stops in between (`LocalExecutor.work` with `stop`, a pool that hands over) has a state to resume
    from, and its machine still names the next step.

    Attributes:
        plan: The request's plan.
        encoded: The encodings whose results are at hand.
        step: How many steps the state at hand has done; None while there is none, so that denoising starts at the
            plan's first step.
        is_finished: Whether the latents at hand are what the decoder takes.
        has_decoded_sound: Whether the sound is decoded.
        decoded: How many of the decoder's chunks are decoded.
        is_saved: Whether the video is where it was asked for.
    """

    plan: RequestPlan
    encoded: frozenset[Encode] = frozenset()
    step: int | None = None
    is_finished: bool = False
    has_decoded_sound: bool = False
    decoded: int = 0
    is_saved: bool = False

    def __post_init__(self) -> None:
        first, steps = self.plan.first_step, self.plan.steps
        if self.step is not None and not first <= self.step <= steps:
            raise ValueError(f"the state is after step {self.step}; this request runs steps {first} to {steps}")
        if self.is_finished and self.step != steps:
            raise ValueError(f"latents after step {self.step} of {steps} can't be finished")

    @property
    def inputs(self) -> tuple[Encode, ...]:
        """All encodings that the experts take, each once."""
        texts = tuple(EncodeText(prompt) for prompt in dict.fromkeys(self.plan.prompts))
        return (*texts, EncodeImage()) if self.plan.has_image else texts

    @property
    def steps_done(self) -> int:
        """How many steps are done, those that the request leaves out included."""
        return self.plan.first_step if self.step is None else self.step

    @property
    def next(self) -> tuple[Operation, ...]:
        """The operations that can run now, at the same time where there are several; none once the video is saved."""
        if self.is_saved:
            return ()
        if self.is_finished and self.plan.has_sound and not self.has_decoded_sound:
            return (DecodeSound(),)
        decode = (Decode(self.decoded),) if self.decoded < self.decodable else ()
        if self.is_finished:
            return decode or (Save(),)
        missing = tuple(encoding for encoding in self.inputs if encoding not in self.encoded)
        return (*decode, *(missing or (self.next_step,)))

    @property
    def decodable(self) -> int:
        """How many of the decoder's chunks have latents that no later operation changes.

        Sound is decoded before any frame, and only once it is finished.
        """
        if self.is_finished:
            return len(self.plan.decoder_chunks)
        return 0 if self.plan.has_sound else self.plan.decodable(min(self.steps_done, self.plan.steps - 1))

    @property
    def next_step(self) -> Step | Finish:
        """The denoising operation that comes next, whether or not its inputs are at hand."""
        done = self.steps_done
        if done == self.plan.steps:
            return Finish(self.plan.experts[-1].stage)
        return Step(self.plan.expert_at(done), done)

    def next_on(self, stages: Collection[str]) -> Step | Finish | HandOver:
        """Return the next denoising operation of an executor that hosts some stages, and has all inputs."""
        following = self.next_step
        return following if following.stage in stages else HandOver(following.stage)

    def steps_left_on(self, stages: Collection[str]) -> int:
        """Return how many steps an executor that hosts some stages can run before the state is another's."""
        steps = 0
        for expert in self.plan.experts:
            if expert.stop > self.steps_done:
                if expert.stage not in stages:
                    break
                steps = expert.stop - self.steps_done
        return steps

    def needs_inputs_beyond(self, stages: Collection[str]) -> bool:
        """Return whether anyone else will need the inputs once the host of some stages has copies of them."""
        return any(expert.stage not in stages for expert in self.plan.experts if expert.stop > self.steps_done)

    def after(self, operation: Operation) -> "StageMachine":
        """Return the machine after one of the operations that it named.

        Raises:
            ValueError: It didn't name this one.
        """
        if operation not in self.next:
            raise ValueError(f"{operation} can't come next; {self.next} can")
        match operation:
            case EncodeText() | EncodeImage():
                return dataclasses.replace(self, encoded=self.encoded | {operation})
            case Step():
                return dataclasses.replace(self, step=operation.index + 1)
            case Finish():
                return dataclasses.replace(self, step=self.steps_done, is_finished=True)
            case DecodeSound():
                return dataclasses.replace(self, has_decoded_sound=True)
            case Decode():
                return dataclasses.replace(self, decoded=self.decoded + 1)
            case Save():
                return dataclasses.replace(self, is_saved=True)

    def at_step(self, step: int | None, *, is_finished: bool = False, decoded: int = 0) -> "StageMachine":
        """Return the machine with a state after that step at hand, or with none: a snapshot, a file, a lost host.

        Args:
            step: The step, or None.
            is_finished: Whether the latents are what the decoder takes.
            decoded: How many of the decoder's chunks are decoded all the same, maybe more than this state could give.
        """
        return dataclasses.replace(
            self, step=step, is_finished=is_finished, has_decoded_sound=False, decoded=decoded, is_saved=False
        )

    def without_decoded(self) -> "StageMachine":
        """Return the machine with nothing decoded: the decoder is lost, and with it the video's file."""
        return dataclasses.replace(self, has_decoded_sound=False, decoded=0, is_saved=False)

    def with_inputs(self) -> "StageMachine":
        """Return the machine with every encoding at hand."""
        return dataclasses.replace(self, encoded=frozenset(self.inputs))

    def without_inputs(self) -> "StageMachine":
        """Return the machine with no encoding at hand: released, or lost."""
        return dataclasses.replace(self, encoded=frozenset())
