"""The decoder stage's sound: latents to samples, through the components that follow the VAE's decoder."""

import jax
import numpy as np
import torch

from wan_tpu.families.model import Model
from wan_tpu.plan import DECODER
from wan_tpu.reference import find_goal, find_tail
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.health import check_finite
from wan_tpu.runtime.mesh import replicated_sharding
from wan_tpu.runtime.program import Program, fetch, place
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.tail import Tail, blend_goal, blend_sound, find_sample


def decode_sound(
    runtime: Runtime[Model], latents: np.ndarray, request: ResolvedRequest | None = None
) -> tuple[np.ndarray, int]:
    """Decode the sound's final latents: float32 [channels, samples] in [-1, 1], and their rate in samples a second.

    Args:
        runtime: The model on its devices.
        latents: The latents.
        request: The request, if its sound goes on from that of another video.

    Raises:
        UnhealthyResult: The sound has NaN or Inf. It is raised on every process.
    """
    rate = runtime.model.spec.audio_rate
    assert rate is not None, "a model without sound"
    if request is not None and (given := runtime.model.given_sound(request)) is not None:
        return given, rate
    value = place(latents, runtime.mesh)
    for name in sound_decoders(runtime.model):
        loaded = runtime.component(name)
        value = sound_program(runtime, name, loaded.module)(loaded.params, value)
        runtime.release_weights(name)
    samples = fetch(value, "sound")
    check_finite(samples, "decoder, sound")
    tail = None if request is None else find_tail(request.references)
    if request is not None and tail is not None and isinstance(tail.source, Tail) and tail.source.blended:
        samples = blend_sound(samples, tail.source, request.fps)
    goal = None if request is None else find_goal(request.references)
    if request is not None and goal is not None and isinstance(goal.source, Tail):
        places = request.origin, request.origin + request.frames - goal.frames
        begin, first = (find_sample(place, rate, request.fps) for place in places)
        samples = blend_goal(samples, goal.source, first - begin, request.fps)
    return samples, rate


def sound_decoders(model: Model) -> tuple[str, ...]:
    """Return the components that turn the sound's latents into samples, in order; none without sound."""
    return tuple(name for name in model.spec.components[DECODER] if name != "decoder")


def sound_program(runtime: Runtime[Model], name: str, module: torch.nn.Module) -> Program:
    """Return a jitted sound decoder: (params, the previous one's result) -> the next one's input, or samples."""

    def run(*args):  # type: ignore[no-untyped-def]
        decoded = runtime.model.decode_sound(name, module, *args)
        return jax.lax.with_sharding_constraint(decoded, replicated_sharding(runtime.mesh))

    return runtime.program(name, run)
