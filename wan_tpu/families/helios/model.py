"""The Helios family: text, image or video to video, chunk after chunk, with Wan 2.1's text encoder and VAE.

The reference for every formula is diffusers 0.42, pipelines/helios.

Shapes: B batch (guidance branches), T latent frames, H W latent height and width, L tokens, C channels.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh

from wan_tpu.families.chunked import ChunkedModel
from wan_tpu.families.helios import chunks, components, conditioning, noise, positions, transformer
from wan_tpu.families.helios.flops import HeliosFlops
from wan_tpu.families.helios.published import CHUNK_FRAMES, HeliosConfig
from wan_tpu.families.helios.spec import HeliosSpec
from wan_tpu.families.model import StepInputs, apply_guidance
from wan_tpu.families.wan.model import WanModel
from wan_tpu.families.wan.tokens import unpatchify
from wan_tpu.media.reading import count_frames, read_ends
from wan_tpu.plan import VIDEO, Expert
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import Component

_HISTORY = (chunks.LONG, chunks.MID, chunks.SHORT)
_COS, _SIN = "cos", "sin"  # The tables of the tokens' positions, among the constants.


class HeliosModel(ChunkedModel, WanModel):
    spec: HeliosSpec  # type: ignore[assignment]
    config: HeliosConfig  # type: ignore[assignment]

    @functools.cached_property
    def components(self) -> dict[str, Component]:
        return components.components(self.config)

    @functools.cached_property
    def flops(self) -> HeliosFlops:  # type: ignore[override]
        return HeliosFlops(self.config)

    @property
    def image_processor(self) -> None:
        """There is no image encoder."""
        return None

    # ---- The image, or the video, before the first chunk.

    def image_latents_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the first frame and the history that a request provides, at the final size."""
        height, width = (side << (self.spec.sizes - 1) for side in latent_shape[3:])
        return (*latent_shape[:2], conditioning.ANCHORED, height, width)

    def image_chunks(self, request: ResolvedRequest, images: int) -> list[tuple[int, int, int, int, int]]:
        """Return the shapes of the VAE encoder's chunks: each video begins with one frame, and goes on with four."""
        size, videos = (request.height, request.width), 1 if images else conditioning.SOURCE_CHUNKS
        return [(1, 3, 1, *size), *[(1, 3, self.spec.frame_stride, *size)] * ((CHUNK_FRAMES - 1) * videos)]

    def video_condition(self, request: ResolvedRequest) -> list[np.ndarray]:
        """Return the chunks of pixels that the VAE encodes, float32 [1, 3, 1 or 4, H, W] in [-1, 1].

        An image is a still video of a chunk's length. Of a video they are the first frame, and then its end, cut into
        videos of a chunk's length each.
        """
        if request.video is None:
            still = self.prepare_frame(request, request.image)
            return [still, *[still.repeat(self.spec.frame_stride, axis=2)] * (CHUNK_FRAMES - 1)]
        starts = conditioning.source_starts(self.count_source(request), self.spec.frame_step)
        first, *last = (
            self.prepare_frame(request, frame) for frame in read_ends(request.video, starts[0], request.fps)
        )
        chunks = [first]
        for start in range(0, len(last), self.spec.frame_step):
            frames = last[start : start + self.spec.frame_step]
            later = range(1, len(frames), self.spec.frame_stride)
            chunks += [frames[0], *(np.concatenate(frames[i : i + self.spec.frame_stride], axis=2) for i in later)]
        return chunks

    def count_source(self, request: ResolvedRequest) -> int:
        """Return how many frames a request's video has."""
        assert request.video is not None
        frames = count_frames(request.video, request.fps)
        self.spec.check_source(frames)
        return frames

    def condition(
        self, moments: np.ndarray, request: ResolvedRequest, source_frames: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the first frame and the history that a request provides, and its generator's state after them."""
        generator = self._first_generator(request)
        statistics = self._latent_statistics()
        if source_frames is None:
            latents = conditioning.condition_on_image(moments, statistics, generator)
        else:
            count = source_frames // self.spec.frame_step
            latents = conditioning.condition_on_video(moments, statistics, count, generator)
        return latents, generator.get_state().numpy()

    def finish(self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest) -> np.ndarray:
        return latents

    # ---- Chunks.

    def chunk_noise(
        self, request: ResolvedRequest, expert: Expert, generator: np.ndarray | None, images: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a chunk's initial noise, or the noise that is added when its latents are enlarged."""
        drawn = self._first_generator(request)
        if generator is not None:
            drawn.set_state(torch.from_numpy(np.array(generator)))
        if expert.enlarges:
            shape = self.spec.latent_shapes(request, expert.stop)[VIDEO]
            array = noise.draw_between(shape, self.spec.patch, self.config.pyramid.gamma, drawn)
        else:
            array = noise.draw_first(self.spec.latent_shape(request), self.spec.sizes, drawn)
        return array, drawn.get_state().numpy()

    def renoising(self, request: ResolvedRequest, expert: Expert) -> tuple[float, float]:
        """Return the factors of the enlarged latents and of their noise."""
        shape = self.spec.latent_shapes(request, expert.stop)[VIDEO]
        stage = next(stage for stage in self.spec.pyramid_stages(request, expert.chunk) if stage.shape == shape)
        assert stage.mixing is not None
        return stage.mixing

    def enlarge_chunk(self, latents: jax.Array) -> jax.Array:
        """Return latents twice as high and wide."""
        return chunks.enlarge(latents)

    def chunk_history(
        self, request: ResolvedRequest, before: Sequence[np.ndarray], image_latents: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Return the last frames of the earlier chunks, and the very first frame."""
        return chunks.make_history(self.spec.latent_shape(request), before, image_latents)

    def count_step(self, request: ResolvedRequest, expert: Expert, *, images: int) -> int:
        """Return the operations of one of an expert's steps, which attend to the earlier chunks at their final size."""
        shape = self.spec.latent_shapes(request, expert.stop)[VIDEO]
        branches = self.spec.count_evaluations(request, expert)
        return self.flops.step(shape, branches=branches, finished_shape=self.spec.latent_shape(request))

    # ---- Experts.

    def constants(
        self, request: ResolvedRequest, latent_shape: tuple[int, ...], text: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the tables of the tokens' positions, those of the history included."""
        patch, finished = self.spec.patch, self.spec.latent_shape(request)
        grid = [n // p for n, p in zip(latent_shape[2:], patch, strict=True)]
        history_size = [n // p for n, p in zip(finished[3:], patch[1:], strict=True)]
        cos, sin = positions.rotary_tables(self.config.transformer, grid, history_size)
        return {_COS: cos, _SIN: sin}

    def velocity(self, module: torch.nn.Module, params: Params, mesh: Mesh, inputs: StepInputs) -> dict[str, jax.Array]:
        """Return the guided velocity, float32 [1, C, T, H, W]."""
        latents, dtype = inputs.latents, inputs.keys["key"].dtype
        tokens = transformer.velocity(
            module,
            params,
            mesh,
            latents.astype(dtype),
            inputs.timestep,
            {name: inputs.keys[name].astype(dtype) for name in _HISTORY},
            (inputs.keys[_COS], inputs.keys[_SIN]),
            {name: inputs.keys[name] for name in ("key", "value")},
        )
        guide = guide_scaled if self.config.scaled_guidance else apply_guidance
        guided = guide(tokens, inputs.guidance)
        return {VIDEO: unpatchify(guided, latents.shape, self.spec.patch, self.spec.latent_channels)}


def guide_scaled(branches: jax.Array, guidance: jax.Array) -> jax.Array:
    """Combine the branches' velocities [B, L, ...] as CFG-Zero* does.

    Args:
        branches: The prompt's and, under guidance, the negative prompt's, which is scaled to fit the prompt's best.
        guidance: [2]: the scale, and 0 if the step leaves the latents unchanged.
    """
    scale, changes = guidance
    if len(branches) == 1:
        return branches[0].astype(jnp.float32)
    prompt, negative = branches.astype(jnp.float32)
    fit = (prompt * negative).sum() / ((negative**2).sum() + 1e-8)
    return changes * (fit * negative + scale * (prompt - fit * negative))
