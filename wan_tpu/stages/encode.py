"""The encoder stage: prompts one at a time, and the image."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import torch
from PIL import Image

from wan_tpu.data import Arrays, ImageCondition
from wan_tpu.families.chunked import ChunkedModel
from wan_tpu.families.model import Model
from wan_tpu.families.shared.causal_vae import Cache
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.media.reading import read_frames
from wan_tpu.plan import ENCODER, PromptText
from wan_tpu.progress import Bar
from wan_tpu.request import IMAGES, ResolvedRequest
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import DTYPES, Loaded
from wan_tpu.runtime.health import check_finite
from wan_tpu.runtime.mesh import replicated_sharding
from wan_tpu.runtime.program import Program, fetch, place
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stages.vae import are_finite, vae_programs

Warn = Callable[[str], object]
Adapters = tuple[RequestedAdapter, ...]
NO_ADAPTERS: Mapping[str, Adapters] = MappingProxyType({})


@dataclass(frozen=True)
class ImageInputs:
    """The encoder's inputs from a request's image, on the devices.

    Attributes:
        chunks: For the VAE, [1, 3, 1 or 4, H, W] in [-1, 1], H W in pixels.
        clip: [1, 3, 224, 224], where the model takes CLIP features.
        read: The text encoder's inputs by component, if it reads the image together with the prompt; also on the host.
        cuts: What is cut of the prompt that is read with the image.
        references: What is encoded of the request's references, with the component that encodes it.
        source_frames: How many frames the request's video has, where the model continues it.
    """

    chunks: tuple[jax.Array, ...]
    clip: jax.Array | None
    read: Mapping[str, tuple[jax.Array, ...]] | None = None
    cuts: tuple[Cut, ...] = ()
    source_frames: int | None = None
    references: tuple[tuple[str, jax.Array], ...] = ()

    @property
    def warnings(self) -> list[str]:
        """Warnings about the prompt that is read with the image."""
        return [cut.describe("prompt") for cut in self.cuts]

    @property
    def parts(self) -> int:
        """How many parts `encode_image` encodes."""
        return len(self.chunks) + (self.clip is not None) + len(self.read or ()) + len(self.references)


def fit_warnings(model: Model, request: ResolvedRequest) -> Iterator[str]:
    """Yield a warning for each image or input video that is stretched or cropped, as its shape isn't the video's."""
    pictures = {name: getattr(request, name) for name in IMAGES}
    if request.video is not None:
        [pictures["the input video"]] = read_frames(request.video, 1)
    for name, picture in pictures.items():
        if isinstance(picture, Image.Image):
            yield from model.spec.describe_fit(request, name, (picture.height, picture.width))


def encode_prompt(
    runtime: Runtime[Model], prompt: PromptText, warn: Warn, adapters: Mapping[str, Adapters] = NO_ADAPTERS
) -> Arrays:
    """Return the text encoders' arrays for a prompt, by name (`Conditioning`); `warn` is called when it is cut.

    Each call encodes a single prompt, so that its result, bit for bit, depends on nothing but that and the adapters.
    Encoding two prompts at once would read the weights only once, but saves little: it takes 24 ms instead of 2 x 16 on
    a v6e chip (docs/benchmarks.md), in a request of a minute.

    Args:
        adapters: What is applied, by component, from `Runtime.fetch_text_adapters`.

    Raises:
        InvalidRequest: The prompt is too long, and may not be cut.
    """
    for name in runtime.model.tokenizers:
        runtime.prepare(name)
    with runtime.time_host_work():
        tokens, cuts = runtime.model.tokenize_text(prompt)
    if cuts and not prompt.may_be_cut:
        raise cuts[0].refuse(prompt.field)
    for cut in cuts:
        warn(cut.describe(prompt.field))
    embeddings = {
        name: _embed(runtime, name, place(inputs, runtime.mesh), adapters=adapters) for name, inputs in tokens.items()
    }
    return runtime.model.prompt_arrays(tokens, embeddings)


def _embed(
    runtime: Runtime[Model],
    name: str,
    inputs: Sequence[jax.Array],
    *,
    images: bool = False,
    adapters: Mapping[str, Adapters] = NO_ADAPTERS,
) -> Any:
    """Return a text encoder's embeddings, on the host."""
    program, params = text_program(runtime, name, images=images, adapters=adapters)
    embeddings = jax.tree.map(lambda result: fetch(result, name), program(params, *inputs))
    for array in jax.tree.leaves(embeddings):
        check_finite(array, f"encoder, {name.replace('_', ' ')}")
    return embeddings


def text_program(
    runtime: Runtime[Model], name: str, *, images: bool = False, adapters: Mapping[str, Adapters] = NO_ADAPTERS
) -> tuple[Program, tuple[Params, ...]]:
    """Return a jitted text encoder, (params, *tokens [1, L]) -> embeddings [1, L, C], or several, and its params.

    The params are the weights of the encoder and of the components that are joined with it.

    Args:
        images: Whether it reads images with the prompt.
        adapters: What is applied to them, by component, from `Runtime.fetch_text_adapters`.
    """
    names = name, *runtime.model.joined_with(name, images=images)
    parts = [runtime.component(part, adapters.get(part, ())) for part in names]

    def run(params, *tokens):  # type: ignore[no-untyped-def]
        loaded = [Loaded(part.module, weights) for part, weights in zip(parts, params, strict=True)]
        encoded = runtime.model.encode_text(name, loaded, *tokens)
        return jax.lax.with_sharding_constraint(encoded, replicated_sharding(runtime.mesh))

    return runtime.program(f"{name}, images" if images else name, run), tuple(part.params for part in parts)


def image_inputs(runtime: Runtime[Model], request: ResolvedRequest) -> ImageInputs | None:
    """Put the encoder's inputs from a request's image, or video, on the devices; None when there is none.

    Raises:
        InvalidRequest: The prompt that is read with the image is too long, and may not be cut.
    """
    if all(getattr(request, name) is None for name in (*IMAGES, "video", "references")):
        return None
    model, dtype = runtime.model, DTYPES[runtime.dtype]
    if request.references is not None:
        return _reference_inputs(runtime, request)
    placements: dict[int, jax.Array] = {}
    chunks = model.video_condition(request)
    # All blank chunks are the same array, which is placed once.
    for chunk in chunks:
        if id(chunk) not in placements:
            placements[id(chunk)] = place(chunk.astype(dtype), runtime.mesh)
    clip = None
    if "image_encoder" in model.spec.components[ENCODER]:
        clip = place(model.clip_pixels(request).astype(dtype), runtime.mesh)
    frames = None
    if request.video is not None and model.spec.continues_video:
        assert isinstance(model, ChunkedModel)
        frames = model.count_source(request)
    inputs = ImageInputs(tuple(placements[id(chunk)] for chunk in chunks), clip, source_frames=frames)
    if not model.spec.reads_images:
        return inputs
    for name in model.tokenizers:
        runtime.prepare(name)
    with runtime.time_host_work():
        read, cuts = model.tokenize_with_images(request)
    if cuts and not model.spec.may_cut(request):
        raise cuts[0].refuse("prompt")
    return dataclasses.replace(inputs, read=place(read, runtime.mesh), cuts=tuple(cuts))


def _reference_inputs(runtime: Runtime[Model], request: ResolvedRequest) -> ImageInputs:
    model = runtime.model
    for name in model.tokenizers:
        runtime.prepare(name)
    with runtime.time_host_work():
        values, read, cuts = model.read_references(request)
    if cuts and not model.spec.may_cut(request):
        raise cuts[0].refuse("prompt")
    placed = tuple((name, place(value, runtime.mesh)) for name, value in values)
    return ImageInputs((), None, place(read, runtime.mesh) if read else None, tuple(cuts), references=placed)


def encode_image(runtime: Runtime[Model], request: ResolvedRequest, inputs: ImageInputs, bar: Bar) -> ImageCondition:
    """Return the experts' inputs from an image or a video; `bar` steps for each of the `ImageInputs.parts`."""
    prompt = None if inputs.read is None else _read_images(runtime, inputs.read, bar)
    features = None
    if inputs.clip is not None:
        features = _clip_features(runtime, inputs.clip)
        bar.step()
    if request.references is not None:
        encoded = []
        for name, value in inputs.references:
            encoded.append(_encode_reference(runtime, name, value))
            bar.step()
        for name in dict.fromkeys(name for name, _ in inputs.references):
            runtime.release_weights(name)
        with runtime.time_host_work():
            latents = runtime.model.reference_latents(encoded, request)
        return ImageCondition(image_latents=latents, prompt=prompt)
    moments = []
    for moment in vae_encode(runtime, inputs.chunks):
        moments.append(moment)
        bar.step()
    model, generator = runtime.model, None
    with runtime.time_host_work():
        # Chunks of another size are another condition.
        joined = [np.concatenate(list(chunks), axis=2) for _, chunks in itertools.groupby(moments, _frame_size)]
        if isinstance(model, ChunkedModel):
            latents, generator = model.condition(joined[0], request, inputs.source_frames)
            larger = None
        else:
            latents, larger, *_ = [*(model.image_latents(chunks, request) for chunks in joined), None]
    if request.video is not None:
        return ImageCondition(video_latents=latents, generator=generator)
    return ImageCondition(features, latents, larger, prompt=prompt, generator=generator)


def _frame_size(moments: np.ndarray) -> tuple[int, ...]:
    return moments.shape[3:]


def _read_images(runtime: Runtime[Model], read: Mapping[str, tuple[jax.Array, ...]], bar: Bar) -> Arrays:
    """Return the prompt's arrays from text encoders that read the images with it."""
    embeddings = {}
    for name, inputs in read.items():
        embeddings[name] = _embed(runtime, name, inputs, images=True)
        for part in (name, *runtime.model.joined_with(name, images=True)):
            runtime.release_weights(part)
        bar.step()
    return runtime.model.prompt_arrays(jax.tree.map(np.asarray, read), embeddings)


def _clip_features(runtime: Runtime[Model], pixels: jax.Array) -> np.ndarray:
    loaded = runtime.component("image_encoder")
    features = fetch(image_program(runtime, loaded.module)(loaded.params, pixels), "image_encoder")
    runtime.release_weights("image_encoder")
    check_finite(features, "encoder, image encoder")
    return features


def image_program(runtime: Runtime[Model], module: torch.nn.Module) -> Program:
    """Return the jitted image encoder: (params, pixels [1, 3, H, W]) -> features [1, L, C]."""

    def run(*args):  # type: ignore[no-untyped-def]
        return jax.lax.with_sharding_constraint(
            runtime.model.encode_image(module, *args), replicated_sharding(runtime.mesh)
        )

    return runtime.program("image_encoder", run)


def _encode_reference(runtime: Runtime[Model], name: str, value: jax.Array) -> np.ndarray:
    loaded = runtime.component(name)
    encoded = fetch(reference_program(runtime, name, loaded.module)(loaded.params, value), name)
    check_finite(encoded, f"encoder, {name.replace('_', ' ')} of a reference")
    return encoded


def reference_program(runtime: Runtime[Model], name: str, module: torch.nn.Module) -> Program:
    """Return the jitted encoder of a part of a reference: (params, pixels or samples) -> moments or latents."""

    def run(params, value):  # type: ignore[no-untyped-def]
        encoded = runtime.model.encode_reference(name, module, params, runtime.mesh, value)
        return jax.lax.with_sharding_constraint(encoded, replicated_sharding(runtime.mesh))

    return runtime.program(f"{name}, reference", run)


def vae_encode(runtime: Runtime[Model], chunks: Sequence[jax.Array]) -> Iterator[np.ndarray]:
    """Yield the VAE's moments [1, 2C, 1, H, W] of chunks of pixels (`ImageInputs.chunks`)."""
    loaded = runtime.component("vae_encoder")
    _, first, later = vae_programs(runtime, "vae_encoder", loaded.module, len(chunks))
    cache: Cache = ()
    for i, pixels in enumerate(chunks):
        # Nothing is cached between keyframes: each is encoded as a first chunk, and so is any single frame, because it
        # begins a video.
        if not cache or pixels.shape[2] == 1:
            moments, extremes, cache = first(loaded.params, pixels)
        else:
            moments, extremes, cache = later(loaded.params, pixels, cache)
        check_finite(are_finite(fetch(extremes, "vae_encoder")), f"encoder, VAE chunk {i + 1} of {len(chunks)}")
        yield np.asarray(moments)
    runtime.release_weights("vae_encoder")
