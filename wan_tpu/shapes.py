"""What every stage compiles for a request: programs, argument shapes and how often each runs, without any weights."""

from typing import Any, NamedTuple

import jax
import numpy as np

from wan_tpu.checkpoint import DTYPES, abstract_component
from wan_tpu.families.wan import TEXT_TOKENS
from wan_tpu.mesh import replicated
from wan_tpu.program import Program
from wan_tpu.request import FRAME_STRIDE, ResolvedRequest
from wan_tpu.runtime import Runtime
from wan_tpu.stages import guided, image_program, text_program, vae_programs


class StageProgram(NamedTuple):
    """One compiled program of a stage; program.compile(*args) compiles it.

    args   arguments as `jax.ShapeDtypeStruct`s with shardings
    calls  how often it runs for one video
    """

    program: Program
    args: tuple[Any, ...]
    calls: int


def stage_programs(runtime: Runtime, request: ResolvedRequest) -> dict[str, StageProgram]:
    """Return the programs of the encoder and the decoder stage for a resolved request, by name.

    A model that only makes videos from images is taken to get one, whether the request holds it or not.
    """
    model = runtime.model
    prompts = 2 if guided(model, request) else 1
    text = abstract_component(model.components["text_encoder"], runtime.dtype, runtime.mesh)
    tokens = _array(runtime, prompts, TEXT_TOKENS, dtype=np.int32)
    programs = {"text_encoder": StageProgram(text_program(runtime, text.module), (text.params, tokens, tokens), 1)}
    latents = model.latent_shape(request)
    if request.image is not None or "t2v" not in model.tasks:
        if model.needs_image_features:
            image = abstract_component(model.components["image_encoder"], runtime.dtype, runtime.mesh)
            size = (model.config.image_encoder or {})["image_size"]
            args = (image.params, _array(runtime, 1, 3, size, size))
            programs["image_encoder"] = StageProgram(image_program(runtime, image.module), args, 1)
        picture = (1, 3, 1, request.height, request.width)
        chunks = 1 if model.config.expand_timesteps else latents[2]
        programs |= _vae(runtime, "vae_encoder", picture, FRAME_STRIDE, chunks)
    return programs | _vae(runtime, "decoder", (*latents[:2], 1, *latents[3:]), 1, latents[2])


def _vae(
    runtime: Runtime, component: str, shape: tuple[int, ...], later_frames: int, chunks: int
) -> dict[str, StageProgram]:
    """Return a VAE half's programs; shape [1, C, 1, H, W] is its first chunk's input."""
    loaded = abstract_component(runtime.model.components[component], runtime.dtype, runtime.mesh)
    half, first, later = vae_programs(runtime, component, loaded.module)
    x = _array(runtime, *shape)
    programs = {f"{component} first": StageProgram(first, (loaded.params, x), 1)}
    if chunks > 1:
        x_later = _array(runtime, *shape[:2], later_frames, *shape[3:])
        args = (loaded.params, x_later, half.cache(loaded.params, x))
        programs[f"{component} later"] = StageProgram(later, args, chunks - 1)
    return programs


def _array(runtime: Runtime, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    kind = DTYPES[runtime.dtype] if dtype is None else dtype
    return jax.ShapeDtypeStruct(shape, kind, sharding=replicated(runtime.mesh))
