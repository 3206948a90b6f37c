"""The expert stages: run a request on an expert, step by step. The state stays on the devices between steps."""

import collections
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.data import Conditioning, DenoiseState
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.families.model import Model
from wan_tpu.plan import SECONDS, VIDEO, Expert, RequestPlan
from wan_tpu.request import ResolvedRequest
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.runtime.components import DTYPES
from wan_tpu.runtime.health import check_finite
from wan_tpu.runtime.mesh import replicated_sharding
from wan_tpu.runtime.program import fetch, place
from wan_tpu.runtime.runtime import FetchedAdapter, Runtime
from wan_tpu.stages.chunks import enter_expert, initial_chunked_state, join_chunks, place_history
from wan_tpu.stages.clean import CleanEstimate, estimate_clean
from wan_tpu.stages.enlarging import enlarge
from wan_tpu.stages.step_programs import (
    ExpertInputs,
    residual_shape,
    step_conditioning,
    step_numbers,
    step_program,
)


@dataclass(frozen=True)
class StepEvent:
    """The argument of a callback after each denoising step.

    Attributes:
        stage: Such as "denoise_high" or "denoise_low".
        step: Counts from 1 to `steps` over all experts.
        timestep: As the model's published scheduler counts it, such as from 1000 towards 0, or from 0 towards 1.
        seconds: Seconds of this step, compilation included.
        skipped: Whether it reused the blocks' earlier results in every branch (`wan_tpu.schedules.magcache`).
        state: The state after it, with arrays on the devices; np.asarray(event.latents) copies the latents.
        clean: The video's clean latents as this step has estimated them.
    """

    stage: str
    step: int
    steps: int
    timestep: float
    seconds: float
    skipped: bool
    state: DenoiseState
    clean: CleanEstimate

    @property
    def latents(self) -> np.ndarray:
        """The latents after this step, float32 [1, C, T, H, W]."""
        return np.asarray(self.state.latents)


def fetch_adapters(
    runtime: Runtime[Model], request: ResolvedRequest, names: Sequence[str]
) -> tuple[RequestedAdapter, ...]:
    """Return a request's adapters for some stages, as `Runtime.fetch_adapters`.

    Raises:
        InvalidRequest: One doesn't fit, or they add weights other than those that the request's preset is for.
        Unavailable: A file can't be read now.
    """
    adapters = runtime.fetch_adapters(request.loras, names)
    if not adapters:
        return adapters
    adding = [adapter for adapter in adapters if isinstance(adapter, FetchedAdapter) and adapter.adapter.added]
    known = [weight for name in names for weight in runtime.model.components[name].added]
    preset = f"preset {request.preset}" if request.preset else "a request without a preset"
    reason = ""
    if not runtime.model.adds_weights(request):
        if adding:
            reason = f"{adding[0]} adds weights, which {preset} doesn't use; give the preset that it was trained for"
    elif known and not adding:
        reason = f"{preset} needs weights that none of loras adds ({known[0]}); leave loras out, or add its own adapter"
    elif max(collections.Counter(weight for one in adding for weight in one.adapter.added).values(), default=0) > 1:
        reason = f"loras has several adapters that add the same weights: {', '.join(map(str, adding))}; give one"
    elif scaled := [adapter for adapter in adding if adapter.scale != 1]:
        reason = f"{scaled[0]} adds weights, which can't be scaled; leave its scale out"
    if reason:
        raise InvalidRequest(reason, "loras")
    return adapters


def initial_state(
    model: Model,
    plan: RequestPlan,
    noise: np.ndarray | None = None,
    video: np.ndarray | None = None,
    generator: np.ndarray | None = None,
) -> DenoiseState:
    """Return the state before the first step.

    Args:
        noise: Float32 [1, C, T, H, W]; by default the noise that diffusers draws for the request's seed.
        video: Latents of the request's video, which are mixed with as much noise as the first step expects.
        generator: As in `Conditioning`.

    Raises:
        InvalidRequest: The noise has another shape, or the model draws noise for each chunk.
        InvalidInput: The request begins with a video, and its latents are missing.
    """
    if model.spec.chunk_frames is not None:
        if noise is not None:
            raise InvalidRequest(
                f"noise was given, but {model.spec.name} draws its own for each chunk; leave noise out"
            )
        return initial_chunked_state(model, plan, generator)
    request, schedules = plan.request, model.spec.schedules(plan.request)
    shapes = model.spec.latent_shapes(request, 0)
    histories = {
        part: tuple(np.zeros(shape, np.float32) for _ in range(schedules[part].history_terms))
        for part, shape in shapes.items()
    }
    video_noise = None if noise is None else check_noise(noise, shapes[VIDEO])
    noises = model.initial_noises(request, video_noise, plan.images)
    if request.strength is None:
        parts = {part: (np.float32(schedules[part].start) * noises[part], histories[part]) for part in shapes}
        return DenoiseState.of_parts(parts, 0, own_noise=noise is not None)
    if video is None:
        raise InvalidInput("the latents of the request's video are missing; run the encoder again")
    sigma = np.float32(schedules[VIDEO].sigmas[plan.first_step])
    latents = (np.float32(1) - sigma) * video + sigma * noises[VIDEO]
    return DenoiseState(latents, histories[VIDEO], plan.first_step, own_noise=noise is not None)


def check_noise(noise: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return initial noise as a float32 copy.

    Raises:
        InvalidRequest: It isn't an array of finite real numbers of that shape.
    """
    try:
        array = np.array(noise).astype(np.float32, casting="same_kind")
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"noise isn't an array of real numbers ({error}); give float32 {shape}") from None
    if array.shape != shape or not np.isfinite(array).all():
        raise InvalidRequest(f"noise has shape {array.shape}; this request needs {shape}, all finite")
    return array


def device_state(runtime: Runtime[Model], plan: RequestPlan, state: DenoiseState) -> DenoiseState:
    """Put a state on the devices.

    Raises:
        InvalidInput: The state belongs to another request. The caller, not the request, is at fault.
    """
    spec, request = runtime.model.spec, plan.request
    shapes, schedules = spec.latent_shapes(request, state.step), spec.schedules(request)
    expected = {part: (shape, schedules[part].history_terms) for part, shape in shapes.items()}
    actual = {part: (tuple(latents.shape), len(history)) for part, (latents, history) in state.parts.items()}
    if actual != expected or len(state.chunks) != plan.chunk_at(state.step):
        chunks = f", and {plan.chunk_at(state.step)} chunks before" if spec.chunk_frames is not None else ""
        raise InvalidInput(
            f"the state after step {state.step} has latents and history terms {actual}; this request needs "
            f"{expected}{chunks}: start from its own initial state"
        )
    # Copied, because on the CPU device_put may alias host memory, and the caller's state must stay as it is.
    parts = place(jax.tree.map(np.array, state.parts), runtime.mesh)
    return state.with_parts(parts, state.step)


def to_host(state: DenoiseState) -> DenoiseState:
    """Copy a state from the devices. Steps don't change it, so any thread may do this while the next step runs."""
    return state.with_parts(jax.tree.map(np.asarray, state.parts), state.step)


def finish_state(
    model: Model, request: ResolvedRequest, state: DenoiseState, image_latents: np.ndarray | jax.Array | None
) -> DenoiseState:
    """Copy a state to the host; after the last step, also apply the model's final change to the latents."""
    state = to_host(state)
    if state.step < model.spec.experts(request)[-1].stop:
        return state
    state = join_chunks(state)
    image = None if image_latents is None else np.asarray(image_latents)
    audio = None if state.audio is None else model.finish_sound(state.audio, image, request)
    return dataclasses.replace(state, latents=model.finish(state.latents, image, request), audio=audio)


def expert_inputs(
    runtime: Runtime[Model], request: ResolvedRequest, expert: Expert, conditioning: Conditioning
) -> ExpertInputs:
    """Put an expert's inputs on the devices; raises `InvalidInput` when some are missing."""
    prompts = [conditioning.prompt]
    if expert.guided:
        if conditioning.negative is None:
            raise InvalidInput(
                "guidance needs the negative prompt's embeddings, which are missing; run the encoder "
                "again with a negative prompt"
            )
        prompts.append(conditioning.negative)
    dtype = DTYPES[runtime.dtype]  # The encoder may have used another one.

    def cast(array: np.ndarray) -> np.ndarray:
        return array.copy() if np.issubdtype(array.dtype, np.integer) else array.astype(dtype)

    names = [name for name in conditioning.prompt if name != SECONDS]
    text = {name: cast(np.concatenate([arrays[name] for arrays in prompts])) for name in names}
    image = None if conditioning.image is None else cast(conditioning.image)
    image_latents = _select_image_latents(runtime, request, expert, conditioning)
    latents = None if image_latents is None else np.array(image_latents)
    shape = runtime.model.spec.latent_shapes(request, expert.stop)[VIDEO]
    constants, variant = runtime.model.constants(request, shape, conditioning.prompt), runtime.model.variant(request)
    return ExpertInputs(*place((text | variant, image, latents, constants | variant), runtime.mesh))


def _select_image_latents(
    runtime: Runtime[Model], request: ResolvedRequest, expert: Expert, conditioning: Conditioning
) -> np.ndarray | None:
    """Return the latents of images that an expert takes, or of the video that it continues; None without any."""
    spec = runtime.model.spec
    sizes = [conditioning.image_latents, conditioning.larger_image_latents]
    if spec.continues_video and conditioning.image_latents is None:  # Chunks attend to either.
        sizes = [conditioning.video_latents]
    given = [latents for latents in sizes if latents is not None]
    expected = runtime.model.condition_shapes(request, expert)
    fitting = next((latents for latents in given if latents.shape in expected), None)
    if given and fitting is None:
        shapes = " and ".join(str(latents.shape) for latents in given)
        raise InvalidInput(
            f"the image's latents are {shapes}; this request needs {' or '.join(map(str, expected))}: run the "
            "encoder stage again with its settings"
        )
    return fitting


class ExpertRun:
    """Runs one request on one expert, from the step that `state` has reached.

    Attributes:
        state: The state after the last finished step, on the devices. Each step replaces it and changes no array.
        resumable: The latest state that another run can continue from. With a cache, it is the latest one before a step
            that reuses nothing.
    """

    def __init__(
        self,
        runtime: Runtime[Model],
        plan: RequestPlan,
        expert: Expert,
        inputs: ExpertInputs,
        state: DenoiseState,
        *,
        keeps_residuals: bool = False,
    ) -> None:
        """Compute the expert's conditioning, which all steps share.

        Args:
            inputs: From `expert_inputs`.
            state: From `device_state`, or from another expert's run of the same request.
            keeps_residuals: Skip no step, and keep each step's residual for `residual_ratios`.
        """
        request = plan.request
        self.expert = expert
        self.state = self.resumable = state
        self._runtime = runtime
        self._schedules = runtime.model.spec.schedules(request)
        draws = self._schedules[VIDEO].draws[expert.start : expert.stop]
        self._noise = runtime.model.step_noise(request, own_noise=state.own_noise) if any(draws) else None
        self._adapters = request.adapters_for(expert.stage)
        loaded = runtime.component(expert.stage, self._adapters)
        self._module = loaded.module
        self._conditioning = step_conditioning(runtime, loaded, inputs)
        self._branches = 2 if expert.guided else 1
        skipped = ((False, False),) * request.steps if keeps_residuals else plan.skipped
        self._skipped = None if skipped is None else np.array(skipped)
        self._residual: jax.Array | None = None  # The blocks' residual, if a later step reuses it.
        self._next = self._enter(plan, inputs)
        if runtime.model.spec.chunk_frames is not None:
            # If there is an image, the history holds it, so that requests with and without one run the same programs.
            keys, _ = self._conditioning
            self._conditioning = {**keys, **place_history(runtime, plan, self._next, inputs)}, None

    def step(self) -> StepEvent:
        """Run the next step. After an error `state` is as it was before.

        Raises:
            UnhealthyResult: The step gave NaN or Inf, on every process. The message names it.
        """
        start, stage, i = time.perf_counter(), self.expert.stage, self.state.step
        schedule = self._schedules[VIDEO]
        assert self.expert.start <= i < self.expert.stop, f"step {i} is not {self.expert}'s"
        numbers = step_numbers(self._schedules, i)
        noises = {} if self._noise is None else self._noise(i)
        for part, noise in noises.items():
            numbers[part]["noise"] = noise
        numbers = place(numbers, self._runtime.mesh)
        inputs = self._next.parts, numbers, self._conditioning
        # Fetched for every step, because while a request is paused, its merged weights may be replaced by those of
        # other requests' adapters, and must then be merged again.
        params = self._runtime.component(self.expert.stage, self._adapters).params
        before, entered, residual, skipped = self.state, self._next, self._residual, self._skipped_branches(i)
        if self._skipped is None:
            parts, finite, _ = step_program(self._runtime, self._module)(params, *inputs)
        elif skipped.all():
            parts, finite, _ = step_program(self._runtime, self._module, "all")(params, *inputs, residual)
        else:
            residual = self._empty_residual() if residual is None else residual
            program = step_program(self._runtime, self._module, "some")
            parts, finite, residual = program(params, *inputs, residual, place(skipped, self._runtime.mesh))
        timestep = float(schedule.timesteps[i])
        check_finite(
            bool(fetch(finite, "denoise step")), f"{stage}, step {i + 1} of {schedule.steps} (t = {timestep:g})"
        )
        self._residual = residual
        self.state = self._next = self._next.with_parts(parts, i + 1)
        if self._skipped is None or i + 1 == self.expert.stop:
            self.resumable = self.state
        elif not skipped.any():
            self.resumable = before
        seconds = time.perf_counter() - start
        clean = estimate_clean(schedule.matrices[i], entered, self.state, noises.get(VIDEO))
        return StepEvent(stage, i + 1, schedule.steps, timestep, seconds, bool(skipped.all()), self.state, clean)

    def _enter(self, plan: RequestPlan, inputs: ExpertInputs) -> DenoiseState:
        """Return the state for the next step; before its first step, an expert may have to transform it."""
        state, expert = self.state, self.expert
        is_new_chunk = expert.chunk != plan.chunk_at(state.step)
        if state.step > expert.start or not (expert.enlarges or is_new_chunk):
            return state
        if self._runtime.model.spec.chunk_frames is not None:
            return enter_expert(self._runtime, plan, expert, state)
        # Known latents have no noise in any step, whatever they have before the first.
        image = None if plan.request.references is not None else inputs.image_latents
        parts: dict[str, Any] = enlarge(self._runtime, plan.request, expert, state, image)
        overlap, smaller = self._runtime.model.spec.overlap, None
        if overlap is not None:
            smaller = np.asarray(state.latents)[:, :, -overlap.latents :].copy()
        return dataclasses.replace(state.with_parts(parts, state.step), smaller=smaller)

    def residual_ratios(self, before: jax.Array | None) -> tuple[np.ndarray, jax.Array]:
        """Return how much larger the residual is than an earlier one, float32 [B], and the residual itself.

        The ratio is the mean over the tokens of their norms' ratios, as in diffusers' calibration. The run must keep
        its residuals (`keeps_residuals`).

        Args:
            before: The earlier residual; None gives ratios of one.
        """
        assert self._residual is not None
        if before is None:
            return np.ones(self._branches, np.float32), self._residual
        tokens = self._runtime.model.spec.tokens(self.state.latents.shape)

        def ratios(now: jax.Array, before: jax.Array) -> jax.Array:
            norms = (jnp.linalg.norm(x[:, :tokens].astype(jnp.float32), axis=-1) for x in (now, before))
            means = (next(norms) / (next(norms) + 1e-8)).mean(axis=1)
            return jax.lax.with_sharding_constraint(means, replicated_sharding(self._runtime.mesh))

        name = f"residuals' ratios of {tokens} tokens"
        return fetch(self._runtime.program(name, ratios)(self._residual, before), name), self._residual

    def _skipped_branches(self, i: int) -> np.ndarray:
        """Return which branches reuse the residual in step i, bool [B]."""
        if self._skipped is None or self._residual is None:
            return np.zeros(self._branches, bool)
        return self._skipped[i, : self._branches]

    def _empty_residual(self) -> jax.Array:
        """Return a residual of zeros, for a program that takes one and doesn't use it."""
        shape = residual_shape(self._runtime, self.state.latents.shape, self._branches)

        def zeros() -> jax.Array:
            return jnp.zeros(shape.shape, shape.dtype)

        residual: jax.Array = self._runtime.program(f"no residual {list(shape.shape)}", zeros, shape.sharding)()
        return residual
