"""One request in one process: the operations of its stage machine, one after another."""

import dataclasses
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from wan_tpu.data import Arrays, Conditioning, DenoiseState, ImageCondition, join_conditioning
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.families.model import Model
from wan_tpu.plan import ENCODER, SECONDS, VIDEO, RequestPlan
from wan_tpu.progress import Bar, Progress
from wan_tpu.runtime.components import DTYPES
from wan_tpu.runtime.health import ColourRange
from wan_tpu.runtime.runtime import Runtime, list_adapter_warnings
from wan_tpu.stage_machine import (
    Decode,
    DecodeSound,
    EncodeImage,
    EncodeText,
    Finish,
    Operation,
    Save,
    StageMachine,
    Step,
)
from wan_tpu.stages.chunks import chunk_of
from wan_tpu.stages.decode import decode_chunks, decoder_inputs, finish_video
from wan_tpu.stages.decoder_noise import draw_ahead
from wan_tpu.stages.denoise import (
    ExpertRun,
    StepEvent,
    check_noise,
    device_state,
    expert_inputs,
    fetch_adapters,
    finish_state,
    initial_state,
    to_host,
)
from wan_tpu.stages.encode import Adapters, ImageInputs, Warn, encode_image, encode_prompt, fit_warnings, image_inputs
from wan_tpu.stages.sound import decode_sound

Around = Callable[[Operation], AbstractContextManager[object]]


class LocalExecutor:
    """Runs one request's operations. Their results stay where they were computed until the next operation takes them.

    Attributes:
        plan: The request's plan. Adapters are read before the first step, and all steps use the content read then. If
            its length is open, the encoded prompt sets it.
        machine: How far the request is.
    """

    def __init__(
        self,
        runtime: Runtime[Model],
        plan: RequestPlan,
        progress: Progress,
        *,
        conditioning: Conditioning | None = None,
        state: DenoiseState | None = None,
        noise: np.ndarray | None = None,
        warn: Warn = warnings.warn,
        around: Around = lambda operation: nullcontext(),
    ) -> None:
        """Start after `conditioning` and `state`, or at the beginning.

        Args:
            runtime: The model on its devices.
            plan: The request's plan.
            progress: Shows a bar for each stage.
            conditioning: The encoder's earlier result for the request.
            state: The state that an earlier run has reached; after the last step it holds finished latents.
            noise: Initial latents [1, C, T, H, W], to use instead of those drawn from the seed.
            warn: Called when the request is changed, or a part of it has no effect.
            around: Returns the context manager that an operation runs in.

        Raises:
            InvalidInput: The encoder's earlier result doesn't say how long a video of open length is.
            InvalidRequest: The noise doesn't have this request's shape, or its length is open.
            ValueError: The state's step isn't one of this plan's.
        """
        self.plan, self._runtime, self._progress = plan, runtime, progress
        self._warned: set[str] = set()
        self._tell, self._around = warn, around
        if noise is not None and plan.has_open_length:
            raise InvalidRequest(
                "noise was given, but the model chooses the video's length; give frames, too", "frames"
            )
        shape = runtime.model.spec.latent_shapes(plan.request, 0)[VIDEO]
        self._noise = None if noise is None else check_noise(noise, shape)
        self._texts: dict[EncodeText, Arrays] = {}
        self._text_adapters: Mapping[str, Adapters] | None = None
        self._image = ImageCondition()
        self._image_inputs: ImageInputs | None = None
        self._conditioning, self._state = conditioning, state
        self._is_placed = False  # Whether the state is on the devices, in this mesh's form.
        self._run: ExpertRun | None = None
        self._chunks: Iterator[tuple[jax.Array, jax.Array]] | None = None
        self._colours = ColourRange()
        self._decoder_noise: Callable[[], np.ndarray | None] | None = None
        self._bar: Bar | None = None
        self.machine = StageMachine(plan)
        if conditioning is not None:
            self.machine = self.machine.with_inputs()
            self._set_length(conditioning.prompt)
        if state is not None:
            self.machine = self.machine.at_step(state.step, is_finished=state.step == plan.steps)

    @property
    def conditioning(self) -> Conditioning:
        """The encoder's result for the request; every encoding must be done."""
        if self._conditioning is None:
            texts = [self._texts[EncodeText(prompt)] for prompt in self.plan.prompts]
            self._conditioning = join_conditioning(self._image, *texts)
        return self._conditioning

    @property
    def state(self) -> DenoiseState:
        """The state that denoising has reached, on the host; before the first step, the initial one."""
        if self._state is None:
            self._state = self._initial_state()
        return to_host(self._state)

    @property
    def resumable(self) -> DenoiseState | None:
        """The latest state that another run can continue from, perhaps on the devices; None before the first step."""
        return self._state if self._run is None else self._run.resumable

    def work(self, *kinds: type[Operation], stop: int | None = None) -> Generator[tuple[Operation, Any]]:
        """Run operations, and yield each with its result.

        Args:
            kinds: The kinds of operations to run, by default all but `Save`. It ends when only other kinds can come
                next.
            stop: End once this many steps are done.

        Yields:
            `EncodeText` with its arrays by name, `EncodeImage` with an `ImageCondition`, `Step` with a `StepEvent`,
            `Finish` with a `DenoiseState`, `DecodeSound` with what `decode_sound` returns, `Decode` with pixels and
            planes on the devices (`vae_programs`).

        Raises:
            UnhealthyResult: A result has NaN or Inf, or the video has a single colour.
        """
        try:
            while (operation := self._next(kinds, stop)) is not None:
                with self._around(operation):
                    result = self._perform(operation, stop)
                self.machine = self.machine.after(operation)
                self._release_after(operation)
                yield operation, result
        finally:
            self._leave_expert()
            self._close_bar()

    def _next(self, kinds: tuple[type[Operation], ...], stop: int | None) -> Operation | None:
        following = (other for other in self.machine.next if not isinstance(other, Save))
        operation = next((other for other in following if not kinds or isinstance(other, kinds)), None)
        if stop is not None and isinstance(operation, Step | Finish) and self.machine.steps_done >= stop:
            return None
        return operation

    def _perform(self, operation: Operation, stop: int | None) -> Any:
        match operation:
            case EncodeText(prompt):
                bar = self._encoder_bar()
                if self._text_adapters is None:
                    loras = self.plan.request.loras if self.plan.adapts_text else ()
                    self._text_adapters = self._runtime.fetch_text_adapters(loras)
                text = self.plan.describe_text(prompt)
                self._texts[operation] = encode_prompt(self._runtime, text, self._warn, self._text_adapters)
                if prompt == self.plan.request.prompt:
                    self._set_length(self._texts[operation])
                bar.step()
                return self._texts[operation]
            case EncodeImage():
                bar = self._encoder_bar()
                assert self._image_inputs is not None
                self._image = encode_image(self._runtime, self.plan.request, self._image_inputs, bar)
                return self._image
            case Step():
                return self._step(operation, stop)
            case Finish():
                assert self._state is not None
                with self._runtime.time_host_work():
                    image_latents = self.conditioning.image_latents
                    self._state = finish_state(self._runtime.model, self.plan.request, self._state, image_latents)
                    self._is_placed = False
                return self._state
            case DecodeSound():
                assert self._state is not None and self._state.audio is not None
                return decode_sound(self._runtime, np.asarray(self._state.audio), self.plan.request)
            case Decode():
                return self._decode(operation)
        raise AssertionError(operation)

    def _set_length(self, prompt: Arrays) -> None:
        """Set the video's length, if it is open, by what the model has made of the prompt."""
        if not self.plan.has_open_length:
            return
        if SECONDS not in prompt:
            raise InvalidInput("the encoder's result has no length of the video; run the encoder again, or give frames")
        self.plan = self._runtime.model.spec.set_length(self.plan, float(prompt[SECONDS][0]))
        self.machine = self.machine.with_plan(self.plan)

    def _encoder_bar(self) -> Bar:
        """Return the encoder's bar; before the first encoding, put the images on the devices to know its length."""
        if self._bar is None:
            with self._runtime.time_host_work():
                self._image_inputs = inputs = image_inputs(self._runtime, self.plan.request)
            messages = () if inputs is None else inputs.warnings
            fits = fit_warnings(self._runtime.model, self.plan.request)
            for warning in (*self.plan.warnings, *messages, *fits):
                self._warn(warning)
            units = 0 if inputs is None else inputs.parts
            texts = len(self.machine.inputs) - (inputs is not None)
            self._bar = self._progress.bar(ENCODER, texts + units)
        return self._bar

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._tell(message)

    def _step(self, step: Step, stop: int | None) -> StepEvent:
        if self._run is None:
            self._begin(step)
        assert self._run is not None
        if self._bar is None:
            here = step.stage, step.expert.chunk
            last = max(expert.stop for expert in self.plan.experts if (expert.stage, expert.chunk) == here)
            self._bar = self._progress.bar(step.stage, (last if stop is None else min(stop, last)) - step.index)
        event = self._run.step()
        self._bar.step()
        return event

    def _begin(self, step: Step) -> None:
        """Put the state and the inputs of the step's expert on the devices, and read adapters that aren't read yet."""
        runtime, request = self._runtime, self.plan.request
        if request.loras:
            stages = [expert.stage for expert in self.plan.experts if step.index < expert.stop]
            adapters = fetch_adapters(runtime, request, stages)
            self.plan = self.plan.with_request(dataclasses.replace(request, loras=adapters))
            for warning in list_adapter_warnings(adapters):
                self._warn(warning)
        with runtime.time_host_work():
            if not self._is_placed:
                state = self._initial_state() if self._state is None else self._state
                self._state, self._is_placed = device_state(runtime, self.plan, state), True
            assert self._state is not None
            inputs = expert_inputs(runtime, request, step.expert, self.conditioning)
        self._run = ExpertRun(runtime, self.plan, step.expert, inputs, self._state)
        self._take_decoder_noise()

    def _initial_state(self) -> DenoiseState:
        model, plan = self._runtime.model, self.plan
        if plan.request.strength is None and not (plan.has_image and model.spec.chunk_frames is not None):
            return initial_state(model, plan, self._noise)
        encoded = self.conditioning
        return initial_state(model, plan, self._noise, encoded.video_latents, encoded.generator)

    def _take_decoder_noise(self) -> Callable[[], np.ndarray | None]:
        """Return what waits for the decoder's noise; it is drawn from the first step on."""
        if self._decoder_noise is None:
            dtype = DTYPES[self._runtime.dtype]
            self._decoder_noise = draw_ahead(self._runtime.model, self.plan.request, dtype)
        return self._decoder_noise

    def _decode(self, operation: Decode) -> tuple[jax.Array, jax.Array]:
        count = len(self.plan.decoder_chunks)
        per_chunk = count // len(self.plan.chunk_stops)
        if operation.chunk % per_chunk == 0:
            assert self._state is not None
            with self._runtime.time_host_work():
                latents = chunk_of(self.plan, self._state, operation.chunk // per_chunk)
                noise = self._take_decoder_noise()
                frames = decoder_inputs(self._runtime, latents, noise())
            self._chunks = decode_chunks(self._runtime, frames, self._progress, self._colours)
        assert self._chunks is not None
        chunk = next(self._chunks)
        if (operation.chunk + 1) % per_chunk == 0:
            next(self._chunks, None)  # The iterator closes its bar.
        if operation.chunk + 1 == count:
            finish_video(self._runtime, self._colours)
        return chunk

    def _release_after(self, operation: Operation) -> None:
        """Release everything that no later operation needs."""
        following = self.machine.next
        if isinstance(operation, EncodeText) and not any(isinstance(other, EncodeText) for other in following):
            model = self._runtime.model
            for name in model.token_shapes:
                for part in (name, *model.joined_with(name)):
                    self._runtime.release_weights(part)
        if not isinstance(operation, Step):
            if following[0].stage != operation.stage:
                self._close_bar()
            return
        step, expert = self.machine.next_step, operation.expert
        following_expert = step.expert if isinstance(step, Step) else None
        if following_expert != expert:
            self._leave_expert(None if following_expert is None else following_expert.stage)
        if following_expert is None or (following_expert.stage, following_expert.chunk) != (expert.stage, expert.chunk):
            self._close_bar()

    def _leave_expert(self, following: str | None = None) -> None:
        """Keep the state that the expert has reached; release its keys and weights before the next one's are read.

        Weights that the stage `following` shares are kept.
        """
        if self._run is not None:
            self._state, stage, self._run = self._run.state, self._run.expert.stage, None
            if following is None or not self._shares_weights(stage, following):
                self._runtime.release_weights(stage)

    def _shares_weights(self, stage: str, following: str) -> bool:
        """Return whether a stage's weights are those of a following one, or become them by its adapters."""
        names, request = self._runtime.model.same_weights, self.plan.request
        if names.get(stage, stage) != names.get(following, following):
            return False
        adapters = request.adapters_for(stage)
        return not adapters or adapters == request.adapters_for(following)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
