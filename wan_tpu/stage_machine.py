"""Decide what comes next for a request: a value without I/O, which everything that makes videos consults.

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
        return self.expert.stage


@dataclass(frozen=True)
class Finish:
    """Apply the model's final change to the latents, on the stage that ran the last step."""

    stage: str


@dataclass(frozen=True)
class HandOver:
    """Hand the state over to the executor that hosts the stage of the next operation."""

    stage: str


@dataclass(frozen=True)
class DecodeSound:
    """Decode the sound. This precedes all frames, so that an mp4 can be written while frames arrive."""

    stage: ClassVar[str] = DECODER


@dataclass(frozen=True)
class Decode:
    """Decode one chunk of latent frames."""

    chunk: int
    stage: ClassVar[str] = DECODER


@dataclass(frozen=True)
class Save:
    """Finish the video's file and put it at its destination."""

    stage: ClassVar[str] = DECODER


Encode = EncodeText | EncodeImage
Operation = Encode | Step | Finish | DecodeSound | Decode | Save


@dataclass(frozen=True)
class StageMachine:
    """How far a request has progressed, which determines what comes next.

    If a video is denoised in chunks, its steps are counted over all of them. Each chunk but the last can be decoded as
    soon as its last step is done, while the next one is denoised; the last one once the latents are finished.

    Denoising ends at the plan's last step and nowhere else, because the decoder expects latents at the last sigma: only
    latents whose `step` is the plan's `steps` can be finished. To end a request earlier, plan it with fewer steps. An
    executor that stops in between (`LocalExecutor.work` with `stop`, a pool that hands over) has a state to resume
    from, and its machine still names the next step.
    """

    plan: RequestPlan
    encoded: frozenset[Encode] = frozenset()  # The encodings whose results are available.
    # How many steps the available state has been through; None while there is no state, so that denoising starts at the
    # plan's first step.
    step: int | None = None
    is_finished: bool = False  # Whether the available latents are ready for the decoder.
    has_decoded_sound: bool = False
    decoded: int = 0  # How many of the decoder's chunks are decoded.
    is_saved: bool = False

    def __post_init__(self) -> None:
        first, steps = self.plan.first_step, self.plan.steps
        if self.step is not None and not first <= self.step <= steps:
            raise ValueError(f"the state is after step {self.step}; this request runs steps {first} to {steps}")
        if self.is_finished and self.step != steps:
            raise ValueError(f"latents after step {self.step} of {steps} can't be finished")

    @property
    def inputs(self) -> tuple[Encode, ...]:
        """Every encoding that the experts need, without duplicates."""
        texts = tuple(EncodeText(prompt) for prompt in dict.fromkeys(self.plan.prompts))
        return (*texts, EncodeImage()) if self.plan.has_image else texts

    @property
    def steps_done(self) -> int:
        """How many steps are done, including those that the request skips at the start."""
        return self.plan.first_step if self.step is None else self.step

    @property
    def next(self) -> tuple[Operation, ...]:
        """The operations that can run now, concurrently if there are several; empty once the video is saved."""
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
        """The denoising operation that comes next, whether or not its inputs are available."""
        if self.plan.has_open_length:
            raise ValueError("the video's length is open; `with_plan` takes the plan that sets it")
        done = self.steps_done
        if done == self.plan.steps:
            return Finish(self.plan.experts[-1].stage)
        return Step(self.plan.expert_at(done), done)

    def next_on(self, stages: Collection[str]) -> Step | Finish | HandOver:
        """Return the next denoising operation for an executor that hosts `stages` and has all inputs."""
        following = self.next_step
        return following if following.stage in stages else HandOver(following.stage)

    def steps_left_on(self, stages: Collection[str]) -> int:
        """Return how many steps an executor that hosts `stages` can run before it must hand the state over."""
        steps = 0
        for expert in self.plan.experts:
            if expert.stop > self.steps_done:
                if expert.stage not in stages:
                    break
                steps = expert.stop - self.steps_done
        return steps

    def needs_inputs_beyond(self, stages: Collection[str]) -> bool:
        """Return whether an executor other than the one that hosts `stages` will still need the inputs."""
        return any(expert.stage not in stages for expert in self.plan.experts if expert.stop > self.steps_done)

    def after(self, operation: Operation) -> "StageMachine":
        """Return the machine after one of the operations in `next`.

        Raises:
            ValueError: The operation isn't in `next`.
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
        """Return the machine for a state after `step` (a snapshot or a file), or for no state (after a loss).

        Args:
            step: The number of steps that the state has been through; None without a state.
            is_finished: Whether the latents are what the decoder takes.
            decoded: How many of the decoder's chunks are decoded anyway, perhaps more than this state would allow.
        """
        return dataclasses.replace(
            self, step=step, is_finished=is_finished, has_decoded_sound=False, decoded=decoded, is_saved=False
        )

    def with_plan(self, plan: RequestPlan) -> "StageMachine":
        """Return the machine for the plan of the same request whose length is no longer open."""
        return dataclasses.replace(self, plan=plan)

    def with_inputs(self) -> "StageMachine":
        """Return the machine with every encoding available."""
        return dataclasses.replace(self, encoded=frozenset(self.inputs))

    def without_inputs(self) -> "StageMachine":
        """Return the machine with no encoding available, because they were released or lost."""
        return dataclasses.replace(self, encoded=frozenset())
