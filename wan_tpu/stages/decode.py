"""The decoder stage: latents to pixels, chunk by chunk."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from wan_tpu.errors import InvalidInput
from wan_tpu.families.model import Model
from wan_tpu.progress import Progress
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.components import DTYPES
from wan_tpu.runtime.health import ColourRange, check_finite
from wan_tpu.runtime.program import fetch, place
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stages.decoder_noise import draw_noise, noise_sharding
from wan_tpu.stages.vae import are_finite, vae_programs

T = TypeVar("T")


def decode(
    runtime: Runtime[Model], latents: np.ndarray, progress: Progress, request: ResolvedRequest | None = None
) -> Iterator[np.ndarray]:
    """Decode final latents [1, C, T, H, W]; yield the video as it is decoded, float32 [1 or 4, H, W, 3] in [0, 1].

    Args:
        runtime: The model on its devices.
        latents: The latents.
        progress: Shows a bar.
        request: The request, which a decoder that begins with noise needs.

    Raises:
        InvalidInput: The decoder begins with noise, and there is no request.
    """
    with runtime.time_host_work():
        noise = None if request is None else draw_noise(runtime.model, request, DTYPES[runtime.dtype])
        frames = decoder_inputs(runtime, latents, noise)
    for pixels, _ in decode_chunks(runtime, frames, progress):
        yield runtime.model.pixels(np.asarray(pixels))


def decoder_inputs(runtime: Runtime[Model], latents: np.ndarray, noise: np.ndarray | None = None) -> list[Any]:
    """Put final latents [1, C, T, H, W] on the devices, scaled for the VAE and cut into the chunks that it takes.

    A decoder that begins with noise, from `draw_noise`, takes both as a pair, which is its only chunk.

    Raises:
        InvalidInput: The decoder begins with noise, and there is none.
    """
    if noise is None and runtime.model.spec.begins_decoder_with_noise:
        raise InvalidInput("this model's decoder begins with noise drawn from the request's seed; give the request")
    dtype = runtime.model.latents_dtype or DTYPES[runtime.dtype]
    scaled = runtime.model.vae_latents(latents).astype(dtype)
    ends = np.cumsum(runtime.model.spec.decoder_chunks(scaled.shape[2]))
    chunks = np.split(scaled, ends[:-1], axis=2)
    placed = place(chunks, runtime.mesh)
    if noise is None:
        return list(placed)
    return [(chunk, place(noise, runtime.mesh, noise_sharding(runtime.mesh, noise.shape))) for chunk in placed]


def decode_chunks(
    runtime: Runtime[Model], frames: Sequence[Any], progress: Progress, colours: ColourRange | None = None
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Decode the decoder's chunks of latent frames, which belong to whole denoising chunks if the video has those.

    Args:
        frames: The chunks, from `decoder_inputs`.
        colours: The colour range of the frames before these. If it is given, these frames aren't the whole video, and
            the caller must call `finish_video` after the last ones.

    Yields:
        Pixels and planes of a chunk, as `vae_programs` describes them, with a complete copy on every device.

    Raises:
        UnhealthyResult: A chunk has NaN or Inf, or the complete video has a single colour. It is raised on every
            process, whether or not that process uses the pixels.
    """
    is_whole, colours = colours is None, ColourRange() if colours is None else colours
    bar = progress.bar("decoder", len(frames))
    try:
        for i, (chunk, extremes) in enumerate(_run_ahead(_run_chunks(runtime, frames))):
            limits = fetch(extremes, "decoder")
            check_finite(are_finite(limits), f"decoder, chunk {i + 1} of {len(frames)}")
            colours.add(runtime.model.pixels(limits))
            bar.step()
            yield chunk
    finally:
        bar.close()
    if is_whole:
        finish_video(runtime, colours)


def finish_video(runtime: Runtime[Model], colours: ColourRange) -> None:
    """Release the decoder after a video; raises `UnhealthyResult` for one of a single colour, on every process."""
    colours.check()
    runtime.release_weights("decoder")


def _run_chunks(
    runtime: Runtime[Model], frames: Sequence[Any]
) -> Iterator[tuple[tuple[jax.Array, jax.Array], jax.Array]]:
    loaded = runtime.component("decoder")
    _, first, later = vae_programs(runtime, "decoder", loaded.module, len(frames))
    cache, per_chunk = None, runtime.model.spec.chunk_frames
    for i, frame in enumerate(frames):
        if cache is None or (per_chunk is not None and i % per_chunk == 0):
            pixels, extremes, cache = first(loaded.params, frame)
        else:
            pixels, extremes, cache = later(loaded.params, frame, cache)
        yield pixels, extremes


def _run_ahead(chunks: Iterator[T]) -> Iterator[T]:
    """Yield each chunk after the next one has been started, so that it is computed while this one is written."""
    before: T | None = None
    for chunk in chunks:
        if before is not None:
            yield before
        before = chunk
    if before is not None:
        yield before
