"""The decoder stage: latents to pixels, chunk by chunk."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np

from wan_tpu.families.model import Model
from wan_tpu.progress import Progress
from wan_tpu.runtime.components import DTYPES
from wan_tpu.runtime.health import ColourRange, check_finite
from wan_tpu.runtime.program import fetch, place
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stages.vae import healthy, vae_programs

T = TypeVar("T")


def decode(runtime: Runtime[Model], latents: np.ndarray, progress: Progress) -> Iterator[np.ndarray]:
    """Yield the video of final latents [1, C, T, H, W] as it is decoded: float32 [1 or 4, H, W, 3] in [0, 1]."""
    with runtime.on_host():
        frames = decoder_inputs(runtime, latents)
    for pixels, _ in decode_chunks(runtime, frames, progress):
        yield runtime.model.pixels(np.asarray(pixels))


def decoder_inputs(runtime: Runtime[Model], latents: np.ndarray) -> list[jax.Array]:
    """Put final latents [1, C, T, H, W] on the devices, scaled for the VAE and cut as it takes them."""
    scaled = runtime.model.vae_latents(latents).astype(DTYPES[runtime.dtype])
    ends = np.cumsum(runtime.model.spec.decoder_chunks(scaled.shape[2]))
    return [place(chunk, runtime.mesh) for chunk in np.split(scaled, ends[:-1], axis=2)]


def decode_chunks(
    runtime: Runtime[Model], frames: Sequence[jax.Array], progress: Progress
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield each chunk of latent frames decoded, whole on every device: pixels and planes, as `vae_programs` has them.

    Raises `UnhealthyResult` for NaN and Inf, and after the last chunk for a video of one single colour: on every
    process, whether or not it looks at the pixels.
    """
    colours = ColourRange()
    bar = progress.bar("decoder", len(frames))
    try:
        for i, (chunk, extremes) in enumerate(_one_ahead(_run(runtime, frames))):
            limits = fetch(extremes, "decoder")
            check_finite(healthy(limits), f"decoder, chunk {i + 1} of {len(frames)}")
            colours.add(runtime.model.pixels(limits))
            bar.step()
            yield chunk
    finally:
        bar.close()
    colours.check()
    runtime.done_with("decoder")


def _run(
    runtime: Runtime[Model], frames: Sequence[jax.Array]
) -> Iterator[tuple[tuple[jax.Array, jax.Array], jax.Array]]:
    loaded = runtime.component("decoder")
    _, first, later = vae_programs(runtime, "decoder", loaded.module, len(frames))
    cache = None
    for frame in frames:
        if cache is None:
            pixels, extremes, cache = first(loaded.params, frame)
        else:
            pixels, extremes, cache = later(loaded.params, frame, cache)
        yield pixels, extremes


def _one_ahead(chunks: Iterator[T]) -> Iterator[T]:
    """Yield chunks, each when the next has been started: one is computed while the one before is written."""
    before: T | None = None
    for chunk in chunks:
        if before is not None:
            yield before
        before = chunk
    if before is not None:
        yield before
