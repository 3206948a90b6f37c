"""The expert stages: a request on an expert, a step at a time; its state stays on the devices between steps."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch

from wan_tpu.data import Conditioning, DenoiseState
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.families.model import Model, StepInputs
from wan_tpu.plan import Expert, RequestPlan
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.components import DTYPES, Loaded
from wan_tpu.runtime.health import check_finite
from wan_tpu.runtime.mesh import replicated
from wan_tpu.runtime.program import Program, fetch, place
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.schedules.schedule import Schedule


@dataclass(frozen=True)
class StepEvent:
    """What a callback is told after each denoising step.

    stage     "denoise_high" or "denoise_low"; step counts from 1 to `steps` over both
    timestep  in [0, 1000]; seconds  of this step, compilation included
    skipped   whether it reused what the blocks gave before, in every branch (`wan_tpu.schedules.magcache`)
    """

    stage: str
    step: int
    steps: int
    timestep: float
    seconds: float
    skipped: bool
    state: DenoiseState  # arrays on the device; np.asarray(event.latents) copies them

    @property
    def latents(self) -> np.ndarray:
        """The latents after this step, float32 [1, C, T, H, W]."""
        return np.asarray(self.state.latents)


@dataclass(frozen=True)
class ExpertInputs:
    """What an expert needs of a request beside its state, on the devices.

    text   what the prompt and, under guidance, the negative prompt have by that name, [B, ...]
    image, image_latents  as in `Conditioning`
    """

    text: Mapping[str, jax.Array]
    image: jax.Array | None
    image_latents: jax.Array | None


# ---- states


def initial_state(
    model: Model, plan: RequestPlan, noise: np.ndarray | None = None, video: np.ndarray | None = None
) -> DenoiseState:
    """Return the state before the first step.

    Args:
        model: The model.
        plan: The request's plan.
        noise: Float32 [1, C, T, H, W]; what diffusers draws for the request's seed when left out.
        video: Latents of the request's video. Under the noise there is as much of it as the first step begins with.

    Raises:
        InvalidRequest: The noise has another shape.
        InvalidInput: The request begins with a video, and its latents are missing.
    """
    request = plan.request
    shape, schedule = model.spec.latent_shape(request), model.spec.schedule(request)
    history = tuple(np.zeros(shape, np.float32) for _ in range(schedule.history_terms))
    drawn = model.initial_noise(request) if noise is None else check_noise(noise, shape)
    if request.strength is None:
        return DenoiseState(np.float32(schedule.start) * drawn, history)
    if video is None:
        raise InvalidInput("a video to begin with is asked for, and its latents are missing; run the encoder again")
    sigma = np.float32(schedule.sigmas[plan.first_step])
    return DenoiseState((np.float32(1) - sigma) * video + sigma * drawn, history, plan.first_step)


def check_noise(noise: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return initial noise as a float32 copy.

    Raises:
        InvalidRequest: It isn't an array of finite real numbers of that shape.
    """
    try:
        array = np.array(noise).astype(np.float32, casting="same_kind")
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"noise is no array of real numbers ({error}); give float32 {shape}") from None
    if array.shape != shape or not np.isfinite(array).all():
        raise InvalidRequest(f"noise has shape {array.shape}; this request needs {shape}, all finite")
    return array


def device_state(runtime: Runtime[Model], plan: RequestPlan, state: DenoiseState) -> DenoiseState:
    """Put a state on the devices.

    Raises:
        InvalidInput: It is another request's, which is no request's fault.
    """
    spec, request = runtime.model.spec, plan.request
    terms, expected = spec.schedule(request).history_terms, spec.latent_shape(request)
    if tuple(state.latents.shape) != expected or len(state.history) != terms:
        raise InvalidInput(
            f"the state has latents {tuple(state.latents.shape)} and {len(state.history)} history terms; "
            f"this request needs {expected} and {terms}: start from its own initial state"
        )
    # Copied: device_put may alias host memory on CPU, and the caller's state must stay as it is.
    latents, history = place((np.array(state.latents), tuple(map(np.array, state.history))), runtime.mesh)
    return DenoiseState(latents, history, state.step)


def to_host(state: DenoiseState) -> DenoiseState:
    """Copy a state out of the devices. Steps don't change it, so this may run on any thread, beside the next one."""
    return DenoiseState(np.asarray(state.latents), tuple(map(np.asarray, state.history)), state.step)


def finished(
    model: Model, request: ResolvedRequest, state: DenoiseState, image_latents: np.ndarray | jax.Array | None
) -> DenoiseState:
    """Return a state on the host, after the last step with what the model does to its latents before decoding."""
    state = to_host(state)
    if state.step < request.steps:
        return state
    given = None if image_latents is None else np.asarray(image_latents)
    return DenoiseState(model.finish(state.latents, given, request), state.history, state.step)


# ---- steps


def expert_inputs(runtime: Runtime[Model], expert: Expert, conditioning: Conditioning) -> ExpertInputs:
    """Put on the devices what an expert needs of a request; raises `InvalidInput` when something is missing."""
    prompts = [conditioning.prompt]
    if expert.guided:
        if conditioning.negative is None:
            raise InvalidInput("guidance needs the negative prompt's embeddings; run the encoder stage again with it")
        prompts.append(conditioning.negative)
    dtype = DTYPES[runtime.dtype]  # the encoder may have run in another

    def cast(array: np.ndarray) -> np.ndarray:
        return array.copy() if np.issubdtype(array.dtype, np.integer) else array.astype(dtype)

    text = {name: cast(np.concatenate([one[name] for one in prompts])) for name in conditioning.prompt}
    image = None if conditioning.image is None else cast(conditioning.image)
    latents = None if conditioning.image_latents is None else np.array(conditioning.image_latents)
    given = text, image, latents
    return ExpertInputs(*place(given, runtime.mesh))


class ExpertRun:
    """A request on one expert, from the step that `state` has reached.

    state      after the last finished step, on the devices; replaced, never changed, by each step
    resumable  the latest that another run can go on from: with a cache, one before a step that reuses nothing
    """

    def __init__(
        self,
        runtime: Runtime[Model],
        plan: RequestPlan,
        expert: Expert,
        inputs: ExpertInputs,
        state: DenoiseState,
        *,
        measured: bool = False,
    ) -> None:
        """state: from `device_state`, or another expert's run of the same request; measured: see `residual_ratios`."""
        request = plan.request
        self.expert = expert
        self.state = self.resumable = state
        self._runtime = runtime
        self._schedule = runtime.model.spec.schedule(request)
        self._noise = runtime.model.step_noise(request) if self._schedule.noise_terms else None
        self._loras = request.loras_for(expert.stage)
        loaded = runtime.component(expert.stage, self._loras)
        self._module = loaded.module
        self._given = step_conditioning(runtime, loaded, inputs)
        self._branches = 2 if expert.guided else 1
        skipped = ((False, False),) * request.steps if measured else plan.skipped
        self._skipped = None if skipped is None else np.array(skipped)
        self._residual: jax.Array | None = None  # of the blocks, where it will be reused

    def step(self) -> StepEvent:
        """Run the next step; raises `UnhealthyResult` naming it, on every process, when it gives NaN or Inf.

        After an error `state` is what it was before.
        """
        start, stage, i, schedule = time.perf_counter(), self.expert.stage, self.state.step, self._schedule
        assert self.expert.start <= i < self.expert.stop, f"step {i} is not {self.expert}'s"
        numbers = step_numbers(schedule, i)
        if self._noise is not None:
            numbers["noise"] = self._noise(i)
        numbers = place(numbers, self._runtime.mesh)
        given = self.state.latents, self.state.history, numbers, self._given
        # Not kept here: a paused request's weights make room for others' adapters, and are merged again.
        params = self._runtime.component(self.expert.stage, self._loras).params
        before, residual, skipped = self.state, self._residual, self._reuses(i)
        if self._skipped is None:
            latents, history, finite, _ = step_program(self._runtime, self._module)(params, *given)
        elif skipped.all():
            latents, history, finite, _ = step_program(self._runtime, self._module, "all")(params, *given, residual)
        else:
            residual = self._nothing() if residual is None else residual
            program = step_program(self._runtime, self._module, "some")
            latents, history, finite, residual = program(params, *given, residual, place(skipped, self._runtime.mesh))
        timestep = float(schedule.timesteps[i])
        check_finite(
            bool(fetch(finite, "denoise step")), f"{stage}, step {i + 1} of {schedule.steps} (t = {timestep:g})"
        )
        self.state, self._residual = DenoiseState(latents, history, i + 1), residual
        if self._skipped is None or i + 1 == self.expert.stop:
            self.resumable = self.state
        elif not skipped.any():
            self.resumable = before
        seconds = time.perf_counter() - start
        return StepEvent(stage, i + 1, schedule.steps, timestep, seconds, bool(skipped.all()), self.state)

    def residual_ratios(self, before: jax.Array | None) -> tuple[np.ndarray, jax.Array]:
        """Return how much larger the residual is than one before, float32 [B], one where there is none; and itself.

        The mean over the tokens of their norms' ratios, as diffusers calibrates; asked of a run that is `measured`.
        """
        assert self._residual is not None
        if before is None:
            return np.ones(self._branches, np.float32), self._residual
        tokens = self._runtime.model.spec.tokens(self.state.latents.shape)

        def ratios(now: jax.Array, before: jax.Array) -> jax.Array:
            norms = (jnp.linalg.norm(x[:, :tokens].astype(jnp.float32), axis=-1) for x in (now, before))
            found = (next(norms) / (next(norms) + 1e-8)).mean(axis=1)
            return jax.lax.with_sharding_constraint(found, replicated(self._runtime.mesh))

        name = f"residuals' ratios of {tokens} tokens"
        return fetch(self._runtime.program(name, ratios)(self._residual, before), name), self._residual

    def _reuses(self, i: int) -> np.ndarray:
        """Return which branches reuse the residual in step i, bool [B]."""
        if self._skipped is None or self._residual is None:
            return np.zeros(self._branches, bool)
        return self._skipped[i, : self._branches]

    def _nothing(self) -> jax.Array:
        """Return a residual that isn't used."""
        shape = residual_shape(self._runtime, self.state.latents.shape, self._branches)

        def zeros() -> jax.Array:
            return jnp.zeros(shape.shape, shape.dtype)

        made: jax.Array = self._runtime.program(f"no residual {list(shape.shape)}", zeros, shape.sharding)()
        return made


def step_numbers(schedule: Schedule, i: int) -> dict[str, Any]:
    """Return what step i needs to know, as float32 arrays, so that no step recompiles."""
    numbers: dict[str, Any] = {
        "timestep": np.float32(schedule.timesteps[i]),
        "sigma": np.float32(schedule.sigmas[i]),
        "matrix": schedule.matrices[i].astype(np.float32),
        "guidance": np.float32(schedule.guidance[i]),
    }
    if schedule.following is not None:
        numbers["timestep"] = np.array([schedule.timesteps[i], schedule.following[i]], np.float32)
    if schedule.alphas is not None:  # a flow's programs have none
        numbers["alpha"] = np.float32(schedule.alphas[i])
    return numbers


Reused = Literal["none", "some", "all"]
_NAMES = {"none": "denoise step", "some": "denoise step, cached", "all": "denoise step, skipped"}


def step_program(runtime: Runtime[Model], module: torch.nn.Module, reused: Reused = "none") -> Program:
    """Return the jitted step: (params, latents, history, numbers, conditioning) -> latents, history, finite, None.

    latents and each term of the history are [1, C, T, H, W], numbers are `step_numbers`, conditioning is that of
    `step_conditioning`; finite says whether all new latents are. Both experts run the same program: they differ in
    weights only (families refuse experts that don't).

    reused  whether it is given a residual of the blocks (`residual_shape`): for "some" branches, which are given next,
            bool [B], and then it returns the residual in place of None; or in place of the blocks of "all"
    """

    def step(params, latents, history, numbers, conditioning, residual=None, skipped=None):  # type: ignore[no-untyped-def]
        model, mesh = runtime.model, runtime.mesh
        given = StepInputs(latents, numbers["timestep"], numbers["guidance"], *conditioning)
        if reused == "none":
            velocity, residual = model.velocity(module, params, mesh, given), None
        else:
            velocity, residual = model.cached_velocity(module, params, mesh, given, (residual, skipped))
        clean = numbers.get("alpha", 1) * latents - numbers["sigma"] * velocity
        terms = (latents, clean, *history, *([numbers["noise"]] if "noise" in numbers else []))
        following, *kept = (sum(row[k] * term for k, term in enumerate(terms)) for row in numbers["matrix"])
        # Whole everywhere: every process can read the result, and the next step takes it as it lies.
        results = following, tuple(kept), jnp.isfinite(following).all()
        return (*jax.lax.with_sharding_constraint(results, replicated(runtime.mesh)), residual)

    return runtime.program(_NAMES[reused], step)


def residual_shape(runtime: Runtime[Model], latents: tuple[int, ...], branches: int) -> jax.ShapeDtypeStruct:
    """Return shape and sharding of what a cache reuses."""
    found: jax.ShapeDtypeStruct = runtime.model.residual_shape(runtime.mesh, branches, latents, DTYPES[runtime.dtype])
    return found


def step_conditioning(runtime: Runtime[Model], expert: Loaded, inputs: ExpertInputs) -> tuple[Any, jax.Array | None]:
    """Return (keys, image_latents), what `step_program` takes last.

    keys are the expert's cross-attention keys and values of the prompt and, under guidance, the negative prompt.
    """
    keys = keys_program(runtime, expert.module)(expert.params, inputs.text, inputs.image)
    return keys, inputs.image_latents


def keys_program(runtime: Runtime[Model], module: torch.nn.Module) -> Program:
    """Return the jitted (params, text, image) -> keys, as `ExpertInputs` has them; run once an expert of a request."""

    def keys(params, text, image):  # type: ignore[no-untyped-def]
        return runtime.model.text_keys(module, params, runtime.mesh, text, image)

    return runtime.program("text keys", keys)
