"""The three stages as functions over a runtime: encode, denoise (both experts), decode.

The loops run on the host, one device call a step: between steps progress is reported, results are checked, and a
callback may stop the run by raising.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from wan_tpu.checkpoint import DTYPES, Loaded
from wan_tpu.data import Conditioning, DenoiseState
from wan_tpu.errors import InvalidRequest
from wan_tpu.families import Model
from wan_tpu.families.causal_vae import CausalChunks
from wan_tpu.health import check_finite
from wan_tpu.program import Program, place
from wan_tpu.progress import Progress
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime import Runtime
from wan_tpu.solvers import SolverTable, solver_table


@dataclass(frozen=True)
class StepEvent:
    """What a callback is told after each denoising step.

    stage     "denoise_high" or "denoise_low"; step counts from 1 to `steps` over both
    timestep  in [0, 1000]; seconds  of this step, compilation included
    """

    stage: str
    step: int
    steps: int
    timestep: float
    seconds: float
    state: DenoiseState  # arrays on the device; np.asarray(event.latents) copies them

    @property
    def latents(self) -> np.ndarray:
        """The latents after this step, float32 [1, C, T, H, W]."""
        return np.asarray(self.state.latents)


OnStep = Callable[[StepEvent], object]


@dataclass(frozen=True)
class Expert:
    """A stretch of steps and the transformer that runs it; `stop` is the first step after it."""

    stage: str
    start: int
    stop: int
    guidance: float


def experts(model: Model, request: ResolvedRequest, table: SolverTable) -> list[Expert]:
    """Return who denoises which steps of a resolved request, experts with no step left out."""
    boundary = table.high_noise_steps(model.boundary_ratio)
    both = [
        Expert("denoise_high", 0, boundary, request.guidance_scale),
        Expert("denoise_low", boundary, table.steps, request.guidance_scale_2),
    ]
    return [expert for expert in both if expert.start < expert.stop]


def guided(model: Model, request: ResolvedRequest) -> bool:
    """Whether any expert uses guidance, so that the negative prompt is needed."""
    return request.guidance_scale > 1 or (model.boundary_ratio is not None and request.guidance_scale_2 > 1)


# ---- encoder


def encode(
    runtime: Runtime, request: ResolvedRequest, progress: Progress, warn: Callable[[str], object]
) -> Conditioning:
    """Encode a resolved request's prompts and image."""
    model = runtime.model
    chunks = model.video_condition(request) if request.image is not None else []
    use_clip = request.image is not None and model.needs_image_features
    bar = progress.bar("encoder", 1 + use_clip + len(chunks))
    try:
        prompt, negative = _encode_text(runtime, request, warn)
        bar.step()
        image = None
        if use_clip:
            image = _encode_image(runtime, request)
            bar.step()
        image_latents = None
        if chunks:
            moments = []
            for moment in vae_encode(runtime, chunks):
                moments.append(moment)
                bar.step()
            image_latents = model.image_latents(np.concatenate(moments, axis=2))
    finally:
        bar.close()
    return Conditioning(prompt=prompt, negative=negative, image=image, image_latents=image_latents)


def _encode_text(
    runtime: Runtime, request: ResolvedRequest, warn: Callable[[str], object]
) -> tuple[np.ndarray, np.ndarray | None]:
    prompts = [request.prompt]
    if guided(runtime.model, request):
        prompts.append(request.negative_prompt or "")
    ids, mask, warnings = runtime.model.tokenize(prompts)
    for warning in warnings:
        warn(warning)
    loaded = runtime.component("text_encoder")
    # All prompts in one call: the weights, 11 GB, are read once. With and without guidance are two programs.
    embeddings = np.asarray(text_program(runtime, loaded.module)(loaded.params, *place((ids, mask), runtime.mesh)))
    runtime.done_with("text_encoder")
    check_finite(embeddings, "encoder, text encoder")
    return embeddings[:1], embeddings[1:] if len(prompts) > 1 else None


def text_program(runtime: Runtime, module: torch.nn.Module) -> Program:
    """Return the jitted text encoder: (params, ids, mask [B, L]) -> embeddings [B, L, C]."""
    return runtime.program("text_encoder", lambda *args: runtime.model.encode_text(module, *args))


def _encode_image(runtime: Runtime, request: ResolvedRequest) -> np.ndarray:
    loaded = runtime.component("image_encoder")
    pixels = runtime.model.clip_pixels(request.image).astype(_dtype(runtime))  # type: ignore[arg-type]
    program = image_program(runtime, loaded.module)
    features = np.asarray(program(loaded.params, place(pixels, runtime.mesh)))
    runtime.done_with("image_encoder")
    check_finite(features, "encoder, image encoder")
    return features


def image_program(runtime: Runtime, module: torch.nn.Module) -> Program:
    """Return the jitted image encoder: (params, pixels [1, 3, H, W]) -> features [1, L, C]."""
    return runtime.program("image_encoder", lambda *args: runtime.model.encode_image(module, *args))


def vae_programs(runtime: Runtime, component: str, module: torch.nn.Module) -> tuple[CausalChunks, Program, Program]:
    """Return a VAE half ("vae_encoder" or "decoder"), and its jitted `first` and `next`."""
    make = runtime.model.vae_decoder if component == "decoder" else runtime.model.vae_encoder
    chunks = make(module, runtime.mesh)
    results = (chunks.out_format, chunks.cache_format)
    first = runtime.program(f"{component} first", chunks.first, results)
    return chunks, first, runtime.program(f"{component} later", chunks.next, results)


def vae_encode(runtime: Runtime, chunks: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the VAE's moments [1, 2C, 1, H, W] of chunks of pixels, float32 [1, 3, 1 or 4, H, W] in [-1, 1]."""
    loaded = runtime.component("vae_encoder")
    _, first, later = vae_programs(runtime, "vae_encoder", loaded.module)
    cache = None
    for i, chunk in enumerate(chunks):
        pixels = place(chunk.astype(_dtype(runtime)), runtime.mesh)
        moments, cache = first(loaded.params, pixels) if cache is None else later(loaded.params, pixels, cache)
        out = np.asarray(moments)
        check_finite(out, f"encoder, VAE chunk {i + 1} of {len(chunks)}")
        yield out
    runtime.done_with("vae_encoder")


# ---- experts


def initial_state(
    model: Model, request: ResolvedRequest, table: SolverTable, noise: np.ndarray | None = None
) -> DenoiseState:
    """Return the state before step 0: `noise`, or what diffusers draws for the request's seed.

    noise  [1, C, T, H, W]; raises `InvalidRequest` for any other shape
    """
    shape = model.latent_shape(request)
    history = tuple(np.zeros(shape, np.float32) for _ in range(table.history_terms))
    if noise is None:
        generator = torch.Generator("cpu").manual_seed(request.seed)
        noise = torch.randn(shape, generator=generator, dtype=torch.float32).numpy()
        return DenoiseState(noise, history)
    try:
        given = np.array(noise).astype(np.float32, casting="same_kind")
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"noise is no array of real numbers ({error}); give float32 {shape}") from None
    if given.shape != shape or not np.isfinite(given).all():
        raise InvalidRequest(f"noise has shape {given.shape}; this request needs {shape}, all finite")
    return DenoiseState(given, history)


def denoise(
    runtime: Runtime,
    request: ResolvedRequest,
    conditioning: Conditioning,
    state: DenoiseState,
    progress: Progress,
    *,
    stop: int | None = None,
    on_step: OnStep | None = None,
) -> DenoiseState:
    """Run the steps from `state.step` up to `stop` (all, when left out) and return the state after them.

    The solver's history goes from one expert to the next: nothing restarts at the boundary.
    """
    table = solver_table(request.solver, request.steps, request.shift)
    expected = runtime.model.latent_shape(request)
    if tuple(state.latents.shape) != expected or len(state.history) != table.history_terms:
        raise InvalidRequest(
            f"the state has latents {tuple(state.latents.shape)} and {len(state.history)} history terms; "
            f"this request needs {expected} and {table.history_terms}: start from its own initial state"
        )
    for expert in experts(runtime.model, request, table):
        last = expert.stop if stop is None else min(stop, expert.stop)
        if state.step < last:
            state = _run_expert(runtime, expert, last, table, conditioning, state, progress, on_step)
    if state.step == table.steps:
        latents = runtime.model.finish(np.asarray(state.latents), conditioning)
        state = DenoiseState(latents, state.history, state.step)
    return _to_host(state)


def _run_expert(
    runtime: Runtime,
    expert: Expert,
    stop: int,
    table: SolverTable,
    conditioning: Conditioning,
    state: DenoiseState,
    progress: Progress,
    on_step: OnStep | None,
) -> DenoiseState:
    loaded = runtime.component(expert.stage)
    program = step_program(runtime, loaded.module)
    given = device_conditioning(runtime, loaded, conditioning, guided=expert.guidance > 1)
    # Copied: device_put may alias host memory on CPU, and the caller's state must stay as it is.
    latents, history = place((np.array(state.latents), tuple(map(np.array, state.history))), runtime.mesh)
    bar = progress.bar(expert.stage, stop - state.step)
    try:
        for i in range(state.step, stop):
            start = time.perf_counter()
            numbers = place(step_numbers(table, i, expert.guidance), runtime.mesh)
            latents, history, finite = program(loaded.params, latents, history, numbers, given)
            where = f"{expert.stage}, step {i + 1} of {table.steps} (t = {table.timesteps[i]:g})"
            check_finite(bool(finite), where)
            bar.step()
            state = DenoiseState(latents, history, i + 1)
            if on_step is not None:
                seconds = time.perf_counter() - start
                on_step(StepEvent(expert.stage, i + 1, table.steps, float(table.timesteps[i]), seconds, state))
    finally:
        bar.close()
    runtime.done_with(expert.stage)
    return state


def step_numbers(table: SolverTable, i: int, guidance: float) -> dict[str, np.ndarray]:
    """Return what step i needs to know, as float32 arrays, so that no step recompiles."""
    return {
        "timestep": np.float32(table.timesteps[i]),
        "sigma": np.float32(table.sigmas[i]),
        "matrix": table.matrices[i].astype(np.float32),
        "guidance": np.float32(guidance),
    }


def step_program(runtime: Runtime, module: torch.nn.Module) -> Program:
    """Return the jitted step: (params, latents, history, numbers, conditioning) -> (latents, history, finite).

    Both experts run the same program: they differ in weights only (families refuse experts that don't).
    """

    def step(params, latents, history, numbers, given):  # type: ignore[no-untyped-def]
        timestep, guidance = numbers["timestep"], numbers["guidance"]
        velocity = runtime.model.velocity(module, params, runtime.mesh, latents, timestep, guidance, *given)
        clean = latents - numbers["sigma"] * velocity
        terms = (latents, clean, *history)
        combined = [sum(row[k] * term for k, term in enumerate(terms)) for row in numbers["matrix"]]
        return combined[0], tuple(combined[1:]), jnp.isfinite(combined[0]).all()

    return runtime.program("denoise step", step)


def device_conditioning(
    runtime: Runtime, expert: Loaded, conditioning: Conditioning, *, guided: bool
) -> tuple[Any, jax.Array | None]:
    """Return (keys, image_latents) on the devices, what `step_program` takes last.

    keys are the expert's cross-attention keys and values of the prompt and, under guidance, the negative prompt.
    """
    text = conditioning.prompt
    if guided:
        if conditioning.negative is None:
            raise InvalidRequest("guidance needs the negative prompt's embeddings; run the encoder stage again with it")
        text = np.concatenate([text, conditioning.negative])
    image = conditioning.image
    dtype = _dtype(runtime)  # the encoder may have run in another
    given = text.astype(dtype), None if image is None else image.astype(dtype)
    keys = keys_program(runtime, expert.module)(expert.params, *place(given, runtime.mesh))
    return keys, place(conditioning.image_latents, runtime.mesh)


def keys_program(runtime: Runtime, module: torch.nn.Module) -> Program:
    """Return the jitted (params, text [B, L, C], image) -> keys; run once for each expert of a request."""

    def keys(params, text, image):  # type: ignore[no-untyped-def]
        return runtime.model.text_keys(module, params, runtime.mesh, text, image)

    return runtime.program("text keys", keys)


def _to_host(state: DenoiseState) -> DenoiseState:
    return DenoiseState(np.asarray(state.latents), tuple(map(np.asarray, state.history)), state.step)


# ---- decoder


def decode(runtime: Runtime, latents: np.ndarray, progress: Progress) -> Iterator[np.ndarray]:
    """Yield the video of final latents [1, C, T, H, W] as it is decoded: float32 [1 or 4, H, W, 3] in [0, 1]."""
    loaded = runtime.component("decoder")
    _, first, later = vae_programs(runtime, "decoder", loaded.module)
    scaled = runtime.model.vae_latents(latents).astype(_dtype(runtime))
    frames = scaled.shape[2]
    bar = progress.bar("decoder", frames)
    cache = None
    try:
        for i in range(frames):
            frame = place(scaled[:, :, i : i + 1], runtime.mesh)
            pixels, cache = first(loaded.params, frame) if cache is None else later(loaded.params, frame, cache)
            out = runtime.model.pixels(np.asarray(pixels))
            check_finite(out, f"decoder, latent frame {i + 1} of {frames}")
            bar.step()
            yield out
    finally:
        bar.close()
    runtime.done_with("decoder")


def _dtype(runtime: Runtime) -> np.dtype:
    return DTYPES[runtime.dtype]
