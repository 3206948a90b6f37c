"""The programs of one half of a VAE, for the encoder and the decoder."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from wan_tpu.families.model import Model
from wan_tpu.families.shared.causal_vae import Cache, Chunks
from wan_tpu.runtime.mesh import replicated_sharding
from wan_tpu.runtime.program import Program
from wan_tpu.runtime.runtime import Runtime


def vae_programs(
    runtime: Runtime[Model], component: str, module: torch.nn.Module, count: int
) -> tuple[Chunks, Program, Program]:
    """Return one half of a VAE, and its programs for the first chunk and for later ones.

    Both programs return (output, extremes, cache): the half's output for a chunk; the smallest and largest value of
    each channel, float32 [1, C, 2, 1, 1], which say on every process whether the output is finite; and the cache for
    the next chunk. The decoder's output has two parts: pixels [1, 3, T, H, W] around [-1, 1], and their `to_planes`.

    Args:
        component: "vae_encoder" or "decoder".
    """
    make = runtime.model.vae_decoder if component == "decoder" else runtime.model.vae_encoder
    chunks = make(module, runtime.mesh).for_chunks(count)
    kind = (
        component if not chunks.depends_on_count else f"{component} of {count}"
    )  # Each count has programs of its own.
    replicated, decodes = replicated_sharding(runtime.mesh), component == "decoder"
    out = (chunks.out_format, replicated) if decodes else chunks.out_format
    results = (out, replicated, chunks.cache_format)

    def first(*args):  # type: ignore[no-untyped-def]
        return _with_extremes(*chunks.run_first(*args), decodes=decodes)

    def later(*args):  # type: ignore[no-untyped-def]
        return _with_extremes(*chunks.run_next(*args), decodes=decodes)

    return (
        chunks,
        runtime.program(f"{kind} first", first, results),
        runtime.program(f"{kind} later", later, results),
    )


def to_planes(pixels: jax.Array) -> jax.Array:
    """Convert pixels [1, 3, T, H, W] around [-1, 1] to ffmpeg's gbrp: uint8 [T, 3, H, W], green, blue and red.

    Pixels are rounded as in diffusers. A host would take 45 ms for this; a v6e-8 takes 16 ms to decode the same frames.
    """
    unit = jnp.clip(pixels[0].astype(jnp.float32), -1, 1) / 2 + 0.5
    red, green, blue = (unit * 255).round().astype(jnp.uint8)
    return jnp.stack([green, blue, red], axis=1)


def _with_extremes(out: jax.Array, cache: Cache, *, decodes: bool) -> tuple[Any, jax.Array, Cache]:
    values = out.astype(jnp.float32)
    extremes = jnp.stack([values.min((2, 3, 4)), values.max((2, 3, 4))], axis=2)[..., None, None]  # NaN passes through.
    return (out, to_planes(out)) if decodes else out, extremes, cache


def are_finite(extremes: np.ndarray) -> bool:
    """Return whether all values with these extremes are finite."""
    return bool(np.isfinite(extremes).all())
