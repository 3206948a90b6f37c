"""The programs of a VAE half, which the encoder and the decoder share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from wan_tpu.families.model import Model
from wan_tpu.families.shared.causal_vae import Cache, CausalChunks
from wan_tpu.runtime.mesh import replicated
from wan_tpu.runtime.program import Program
from wan_tpu.runtime.runtime import Runtime


def vae_programs(
    runtime: Runtime[Model], component: str, module: torch.nn.Module, count: int
) -> tuple[CausalChunks, Program, Program]:
    """Return a VAE half ("vae_encoder" or "decoder"), and its jitted `first` and `next`, for so many chunks.

    Both return (output, extremes, cache): what the half gives for a chunk; its smallest and largest value of each
    channel, float32 [1, C, 2, 1, 1], which say on every process whether it is healthy; and the cache for the next. The
    decoder's output has two parts: pixels [1, 3, T, H, W] around [-1, 1], and as `planes` makes them of these.
    """
    make = runtime.model.vae_decoder if component == "decoder" else runtime.model.vae_encoder
    chunks = make(module, runtime.mesh).of(count)
    kind = component if chunks.history_of is None else f"{component} of {count}"  # a program of its own
    whole, decodes = replicated(runtime.mesh), component == "decoder"
    out = (chunks.out_format, whole) if decodes else chunks.out_format
    results = (out, whole, chunks.cache_format)

    def first(*args):  # type: ignore[no-untyped-def]
        return _with_extremes(*chunks.first(*args), decodes=decodes)

    def later(*args):  # type: ignore[no-untyped-def]
        return _with_extremes(*chunks.next(*args), decodes=decodes)

    return (
        chunks,
        runtime.program(f"{kind} first", first, results),
        runtime.program(f"{kind} later", later, results),
    )


def planes(pixels: jax.Array) -> jax.Array:
    """[1, 3, T, H, W] around [-1, 1] -> uint8 [T, 3, H, W], green, blue and red, as ffmpeg's gbrp has them.

    Rounded as diffusers does it. A host takes 45 ms for the same, a v6e-8 16 ms to decode them.
    """
    unit = jnp.clip(pixels[0].astype(jnp.float32), -1, 1) / 2 + 0.5
    red, green, blue = (unit * 255).round().astype(jnp.uint8)
    return jnp.stack([green, blue, red], axis=1)


def _with_extremes(out: jax.Array, cache: Cache, *, decodes: bool) -> tuple[Any, jax.Array, Cache]:
    values = out.astype(jnp.float32)
    extremes = jnp.stack([values.min((2, 3, 4)), values.max((2, 3, 4))], axis=2)[..., None, None]  # NaN comes through
    return (out, planes(out)) if decodes else out, extremes, cache


def healthy(extremes: np.ndarray) -> bool:
    """Whether all values whose extremes these are were finite."""
    return bool(np.isfinite(extremes).all())
