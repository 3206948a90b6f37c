"""Transitions between the experts of a video that is denoised in chunks: begin a chunk, or upsample its latents."""

import dataclasses

import jax
import numpy as np

from wan_tpu.data import DenoiseState
from wan_tpu.errors import InvalidInput
from wan_tpu.families.chunked import ChunkedModel
from wan_tpu.families.model import Model
from wan_tpu.plan import Expert, RequestPlan
from wan_tpu.runtime.mesh import replicated_sharding
from wan_tpu.runtime.program import Program, place
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stages.step_programs import ExpertInputs


def initial_chunked_state(model: Model, plan: RequestPlan, generator: np.ndarray | None) -> DenoiseState:
    """Return the state before the first step of a request that is denoised in chunks.

    Args:
        generator: As in `Conditioning`.

    Raises:
        InvalidInput: The request has an image or a video, but the generator's state after encoding it is missing.
    """
    assert isinstance(model, ChunkedModel)
    if plan.has_image and generator is None:
        raise InvalidInput("the encoded image or video of this request is missing; run the encoder again")
    schedule, expert = model.spec.schedule(plan.request), plan.experts[0]
    noise, generator = model.chunk_noise(plan.request, expert, generator, plan.images)
    history = tuple(np.zeros_like(noise) for _ in range(schedule.history_terms))
    return DenoiseState(np.float32(schedule.start) * noise, history, expert.start, generator=generator)


def enter_expert(runtime: Runtime[Model], plan: RequestPlan, expert: Expert, state: DenoiseState) -> DenoiseState:
    """Return the state for the first step of an expert that begins a chunk or enlarges it, from the state before."""
    model, schedule = runtime.model, runtime.model.spec.schedule(plan.request)
    assert isinstance(model, ChunkedModel)
    chunks = state.chunks
    with runtime.time_host_work():
        noise, generator = model.chunk_noise(plan.request, expert, state.generator, plan.images)
        if expert.chunk != plan.chunk_at(state.step):
            chunks = (*chunks, np.asarray(state.latents))
            latents = place(np.float32(schedule.start) * noise, runtime.mesh)
        else:
            factors = tuple(map(np.float32, model.renoising(plan.request, expert)))
            operands = place((noise, factors), runtime.mesh)
            latents = growing_program(runtime)(state.latents, *operands)
        zeros = place(np.zeros_like(noise), runtime.mesh)
    return dataclasses.replace(
        state, latents=latents, history=(zeros,) * schedule.history_terms, chunks=chunks, generator=generator
    )


def growing_program(runtime: Runtime[Model]) -> Program:
    """Return the jitted function (latents, noise, factors of both) -> upsampled latents with noise."""

    def run(latents, noise, factors):  # type: ignore[no-untyped-def]
        model = runtime.model
        assert isinstance(model, ChunkedModel)
        larger = factors[0] * model.enlarge_chunk(latents) + factors[1] * noise
        return jax.lax.with_sharding_constraint(larger, replicated_sharding(runtime.mesh))

    return runtime.program("enlarge a chunk's latents", run)


def place_history(
    runtime: Runtime[Model], plan: RequestPlan, state: DenoiseState, inputs: ExpertInputs
) -> dict[str, jax.Array]:
    """Put on the devices what the steps of a state's chunk need from the earlier chunks, by name."""
    model = runtime.model
    assert isinstance(model, ChunkedModel)
    with runtime.time_host_work():
        image = None if inputs.image_latents is None else np.asarray(inputs.image_latents)
        arrays: dict[str, jax.Array] = place(model.chunk_history(plan.request, state.chunks, image), runtime.mesh)
    return arrays


def join_chunks(state: DenoiseState) -> DenoiseState:
    """Return a state, on the host, whose latents are those of all chunks joined together."""
    return dataclasses.replace(state, latents=np.concatenate([*state.chunks, state.latents], axis=2), chunks=())


def chunk_of(plan: RequestPlan, state: DenoiseState, index: int) -> np.ndarray:
    """Return the latents [1, C, T, H, W] of a fully denoised chunk, on the host, from any later state."""
    is_finished = state.step == plan.steps and not state.chunks  # Then the latents are those of all chunks.
    latest = np.split(np.asarray(state.latents), len(plan.chunk_stops) if is_finished else 1, axis=2)
    chunk: np.ndarray = [*state.chunks, *latest][index]
    return chunk
