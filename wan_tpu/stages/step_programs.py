"""The programs of a denoising step, and their inputs. Numbers are arguments, so that no step recompiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch

from wan_tpu.families.model import Model, StepInputs
from wan_tpu.plan import AUDIO, VIDEO
from wan_tpu.runtime.components import DTYPES, Loaded
from wan_tpu.runtime.mesh import replicated_sharding
from wan_tpu.runtime.program import Program
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.schedules.schedule import Schedule


@dataclass(frozen=True)
class ExpertInputs:
    """An expert's inputs other than the state, on the devices."""

    text: Mapping[str, jax.Array]  # Arrays [B, ...] of the prompt and, under guidance, of the negative prompt, by name.
    image: jax.Array | None  # As in `Conditioning`.
    image_latents: jax.Array | None  # As in `Conditioning`.
    constants: Mapping[str, jax.Array]  # From `Model.constants`.


def step_numbers(schedules: Mapping[str, Schedule], i: int) -> dict[str, dict[str, Any]]:
    """Return the numbers of step i for each part of the latents as float32 arrays, so that no step recompiles."""
    return {part: _numbers_of(schedule, i) for part, schedule in schedules.items()}


def _numbers_of(schedule: Schedule, i: int) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "timestep": np.float32(schedule.timesteps[i]),
        "sigma": np.float32(schedule.sigmas[i]),
        "matrix": schedule.matrices[i].astype(np.float32),
        "guidance": schedule.guidance[i].astype(np.float32),
    }
    if schedule.following is not None:
        numbers["timestep"] = np.array([schedule.timesteps[i], schedule.following[i]], np.float32)
    # The programs of flow models take no alpha.
    if schedule.alphas is not None:
        numbers["alpha"] = np.float32(schedule.alphas[i])
    return numbers


Reused = Literal["none", "some", "all"]
_NAMES = {"none": "denoise step", "some": "denoise step, cached", "all": "denoise step, skipped"}


def step_program(runtime: Runtime[Model], module: torch.nn.Module, reused: Reused = "none") -> Program:
    """Return the jitted step: (params, parts, numbers, conditioning) -> parts, finite, None.

    parts are `DenoiseState.parts`, numbers are from `step_numbers`, conditioning is from `step_conditioning`; finite
    says whether all new latents are finite. Both experts run the same program: they differ in their weights only
    (families refuse experts that differ otherwise).

    Args:
        reused: Which branches reuse a residual of the blocks (`residual_shape`). With "some", the step also takes a
            residual and the branches that reuse it, bool [B], and returns the new residual instead of None. With "all",
            it takes a residual and computes no block.
    """

    def step(params, parts, numbers, conditioning, residual=None, skipped=None):  # type: ignore[no-untyped-def]
        model, mesh = runtime.model, runtime.mesh
        video, (keys, image_latents) = numbers[VIDEO], conditioning
        audio = (parts[AUDIO][0], numbers[AUDIO]["timestep"]) if AUDIO in parts else None
        inputs = StepInputs(parts[VIDEO][0], video["timestep"], video["guidance"], keys, image_latents, audio)
        if reused == "none":
            velocities, residual = model.velocity(module, params, mesh, inputs), None
        else:
            velocities, residual = model.cached_velocity(module, params, mesh, inputs, (residual, skipped))
        following = {
            part: _advance(latents, history, velocities[part], numbers[part])
            for part, (latents, history) in parts.items()
        }
        finite = jnp.stack([jnp.isfinite(latents).all() for latents, _ in following.values()]).all()
        # The result is replicated, so that every process can read it and the next step takes it without resharding.
        return (*jax.lax.with_sharding_constraint((following, finite), replicated_sharding(runtime.mesh)), residual)

    return runtime.program(_NAMES[reused], step)


def _advance(
    latents: jax.Array, history: tuple[jax.Array, ...], velocity: jax.Array, numbers: Mapping[str, jax.Array]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return latents and history after a step of the solver."""
    clean = numbers.get("alpha", 1) * latents - numbers["sigma"] * velocity
    terms = (latents, clean, *history, *([numbers["noise"]] if "noise" in numbers else []))
    combined: list[Any] = [sum(row[k] * term for k, term in enumerate(terms)) for row in numbers["matrix"]]
    return combined[0], tuple(combined[1:])


def residual_shape(runtime: Runtime[Model], latents: tuple[int, ...], branches: int) -> jax.ShapeDtypeStruct:
    """Return shape and sharding of the residual that a cache reuses."""
    shape: jax.ShapeDtypeStruct = runtime.model.residual_shape(runtime.mesh, branches, latents, DTYPES[runtime.dtype])
    return shape


def step_conditioning(runtime: Runtime[Model], expert: Loaded, inputs: ExpertInputs) -> tuple[Any, jax.Array | None]:
    """Return (keys, image_latents), the last argument of a `step_program`.

    keys are the expert's cross-attention keys and values of the prompt and, under guidance, the negative prompt, with
    the model's constants.
    """
    keys = keys_program(runtime, expert.module)(expert.params, inputs.text, inputs.image)
    return {**keys, **inputs.constants}, inputs.image_latents


def keys_program(runtime: Runtime[Model], module: torch.nn.Module) -> Program:
    """Return the jitted (params, text, image) -> keys, run once for each expert; arguments as in `ExpertInputs`."""

    def keys(params, text, image):  # type: ignore[no-untyped-def]
        return runtime.model.text_keys(module, params, runtime.mesh, text, image)

    return runtime.program("text keys", keys)
