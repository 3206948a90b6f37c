"""Upsample the latents between two denoising stages, and add noise to them again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.data import DenoiseState
from wan_tpu.families.model import Model
from wan_tpu.plan import VIDEO, Expert
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.components import Loaded
from wan_tpu.runtime.mesh import replicated_sharding
from wan_tpu.runtime.program import Program, place
from wan_tpu.runtime.runtime import Runtime

Parts = dict[str, tuple[jax.Array, tuple[jax.Array, ...]]]


def enlarge(
    runtime: Runtime[Model], request: ResolvedRequest, expert: Expert, state: DenoiseState, image: jax.Array | None
) -> Parts:
    """Return the latents' parts for an expert's first step, from the state after the previous expert.

    A part that has kept its size keeps its history.

    Args:
        image: The expert's image latents (`ModelSpec.conditioned_shape`), or None.
    """
    program, params = enlarging_program(runtime, expert)
    sigmas = {part: schedule.sigmas[expert.start] for part, schedule in runtime.model.spec.schedules(request).items()}
    with runtime.time_host_work():
        numbers = {part: np.float32(sigma) for part, sigma in sigmas.items()}
        operands = place((runtime.model.renoise(request, expert, has_image=image is not None), numbers), runtime.mesh)
    latents = {part: latents for part, (latents, _) in state.parts.items()}
    enlarged: dict[str, jax.Array] = program(params, latents, image, *operands)
    for name in runtime.model.spec.components[expert.stage][1:]:
        runtime.release_weights(name)

    def keep(part: str, value: jax.Array) -> tuple[Any, ...]:
        before, history = state.parts[part]
        return tuple(old if before.shape == value.shape else jnp.zeros_like(value) for old in history)

    return {part: (value, keep(part, value)) for part, value in enlarged.items()}


def enlarging_program(runtime: Runtime[Model], expert: Expert) -> tuple[Program, tuple[dict[str, jax.Array], ...]]:
    """Return the jitted (params, latents, image, noises, sigmas) -> latents, all by part, and its params.

    The params are the weights of the stage's components after the transformer.
    """
    names = runtime.model.spec.components[expert.stage][1:]
    components = [runtime.component(name) for name in names]

    def run(params, latents, image, noises, sigmas):  # type: ignore[no-untyped-def]
        loaded = [Loaded(part.module, weights) for part, weights in zip(components, params, strict=True)]
        larger = {**latents, VIDEO: runtime.model.enlarge(loaded, runtime.mesh, latents[VIDEO])}
        noisy = {part: (1 - sigmas[part]) * x + sigmas[part] * noises[part] for part, x in larger.items()}
        if image is not None:
            # It has no noise: it is the image, or what it has become if it wasn't encoded at the larger size.
            enlarged = larger[VIDEO][:, :, :1]
            noisy[VIDEO] = noisy[VIDEO].at[:, :, :1].set(image if image.shape == enlarged.shape else enlarged)
        return jax.lax.with_sharding_constraint(noisy, replicated_sharding(runtime.mesh))

    return runtime.program("enlarge latents", run), tuple(part.params for part in components)
