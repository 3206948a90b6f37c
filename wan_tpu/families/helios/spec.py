"""A Helios model as its configuration describes it: stages, limits, shapes, and the steps of every chunk."""

import functools
import itertools
import math
from typing import ClassVar

import numpy as np

from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.helios import published
from wan_tpu.families.helios.chunks import PyramidStage, list_stages
from wan_tpu.families.helios.config import read_config
from wan_tpu.families.helios.published import CHUNK_FRAMES, HeliosConfig, PyramidConfig
from wan_tpu.families.shared.family_spec import DENOISE, FamilySpec
from wan_tpu.plan import DECODER, ENCODER, VIDEO, Expert
from wan_tpu.request import ResolvedRequest
from wan_tpu.schedules.schedule import Schedule

# Steps at the smallest size that CFG-Zero* leaves out: a chunk's latents stay as they are.
_ZERO_STEPS = 2


class HeliosSpec(FamilySpec):
    """One Helios model. The steps of a request are those of one chunk, over all sizes at which it is denoised."""

    config: HeliosConfig
    published: ClassVar = published
    read_config: ClassVar = staticmethod(read_config)
    spatial_stride = 8

    tasks = ("t2v", "i2v")
    takes_video = continues_video = True
    seeds_images = True
    chunk_frames = CHUNK_FRAMES

    def __post_init__(self) -> None:
        strides = self.config.vae["scale_factor_temporal"], self.config.vae["scale_factor_spatial"]
        if strides != (self.frame_stride, self.spatial_stride):
            raise CheckpointError(f"the VAE compresses time and space by {strides}; supported: (4, 8)")
        if self.config.transformer["in_channels"] != self.latent_channels:
            raise CheckpointError(
                f"the transformer takes {self.config.transformer['in_channels']} channels, but the VAE makes "
                f"{self.latent_channels}; give a checkpoint whose components belong together"
            )

    @property
    def frame_step(self) -> int:
        """Frames of a chunk, which is decoded as a video of its own.

        diffusers leaves out the last frames of two, three or four chunks, as if they were one video of 4n + 1 frames.
        """
        return (CHUNK_FRAMES - 1) * self.frame_stride + 1

    @property
    def frame_offset(self) -> int:  # type: ignore[override]
        """Frames of the shortest video, one chunk."""
        return self.frame_step

    @property
    def solvers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The checkpoint's own solver: distilled models allow no other, and all others are published with one."""
        return (self.config.pyramid.solver,)

    @property
    def unused(self) -> tuple[str, ...]:
        """A schedule is shifted by the number of tokens; distilled models have no guidance."""
        return (*super().unused, "shift", "sigmas", *(("guidance_scale",) if self.config.distilled else ()))

    @property
    def components(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        return {ENCODER: ("text_encoder", "vae_encoder"), DENOISE: (DENOISE,), DECODER: (DECODER,)}

    @property
    def latent_channels(self) -> int:
        return int(self.config.vae["z_dim"])

    @property
    def patch(self) -> tuple[int, ...]:
        return tuple(self.config.transformer["patch_size"])

    @property
    def sizes(self) -> int:
        """The number of sizes at which a chunk is denoised, each twice the previous one."""
        return self.config.pyramid.stages

    @property
    def size_multiple(self) -> int:
        """Heights and widths are multiples of this, in pixels: at the smallest size there are whole tokens, too."""
        return int(self.spatial_stride * self.patch[1]) << (self.sizes - 1)

    def _check_settings(self, request: ResolvedRequest) -> None:
        super()._check_settings(request)
        if request.steps % self.sizes:
            nearest = self.sizes * max(1, round(request.steps / self.sizes))
            raise InvalidRequest(
                f"steps is {request.steps}; {self.name} denoises each chunk at {self.sizes} sizes, with equally "
                f"many steps at each: nearest {nearest}",
                "steps",
            )

    # ---- Shapes.

    def latent_frames(self, frames: int) -> int:
        return frames // self.frame_step * CHUNK_FRAMES

    def latent_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of a chunk's latents."""
        batch, channels, _, height, width = super().latent_shape(request)
        return batch, channels, CHUNK_FRAMES, height, width

    def decoded_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of the latents of all chunks."""
        return super().latent_shape(request)

    def latent_shapes(self, request: ResolvedRequest, step: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of a chunk's latents after `step` steps, counted over all chunks."""
        stretch = next(i for i, expert in enumerate(self.experts(request)) if step <= expert.stop)
        return {VIDEO: self.pyramid_stages(request, 0)[stretch % self.sizes].shape}

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the tokens of a chunk, without those of earlier chunks."""
        return math.prod(n // p for n, p in zip(latent_shape[2:], self.patch, strict=True))

    # ---- Steps.

    def is_guided(self, request: ResolvedRequest) -> bool:
        """Return whether there is guidance: distilled models never have any."""
        return not self.config.distilled and super().is_guided(request)

    def pyramid_stages(self, request: ResolvedRequest, chunk: int) -> list[PyramidStage]:
        """Return the stages of a chunk."""
        shape, each = self.latent_shape(request), request.steps // self.sizes
        amplified = chunk == 0 and self._amplifies_first(request)
        return list_stages(self.config.pyramid, shape, self.patch, (each,) * self.sizes, amplified=amplified)

    def _amplifies_first(self, request: ResolvedRequest) -> bool:
        """Return whether the first chunk has twice as many steps, as a distilled model's authors have it."""
        return self.config.distilled and not self.follows_diffusers(request)

    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return the only expert, once for each chunk and each size at which it denoises."""
        first, later = (
            tuple(stage.schedule.steps for stage in self.pyramid_stages(request, chunk)) for chunk in (0, 1)
        )
        return _list_experts(first, later, request.frames // self.frame_step, guided=self.is_guided(request))

    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the numbers of every step of all chunks; CFG-Zero* also has whether a step changes anything."""
        return _join_schedules(
            self.config.pyramid,
            self.latent_shape(request),
            self.patch,
            request.steps // self.sizes,
            request.frames // self.frame_step,
            request.guidance_scale if self.is_guided(request) else None,
            scaled_guidance=self.config.scaled_guidance,
            amplifies_first=self._amplifies_first(request),
        )


@functools.lru_cache(maxsize=64)
def _list_experts(first: tuple[int, ...], later: tuple[int, ...], chunks: int, *, guided: bool) -> tuple[Expert, ...]:
    """Return the ranges of steps, given the steps at each size in the first chunk and in later ones."""
    steps = [*first, *later * (chunks - 1)]
    stops = itertools.accumulate(steps)
    return tuple(
        Expert(DENOISE, stop - count, stop, guided, i % len(first) > 0, i // len(first))
        for i, (stop, count) in enumerate(zip(stops, steps, strict=True))
    )


@functools.lru_cache(maxsize=64)
def _join_schedules(
    pyramid: PyramidConfig,
    shape: tuple[int, ...],
    patch: tuple[int, ...],
    steps: int,
    chunks: int,
    scale: float | None,
    *,
    scaled_guidance: bool,
    amplifies_first: bool,
) -> Schedule:
    """Return the schedule of all chunks.

    Args:
        shape: [1, C, T, H, W] of a chunk.
        patch: Latent frames, rows and columns of a token.
        steps: Steps at each size.
        scale: The scale of guidance; None without guidance.
        scaled_guidance: Whether guidance is CFG-Zero*.
        amplifies_first: Whether the first chunk has twice as many steps.
    """

    def guide(schedule: Schedule, *, is_smallest: bool) -> Schedule:
        scales = np.full(schedule.steps, 1.0 if scale is None else scale)
        if not scaled_guidance:
            return schedule.with_guidance(scales)
        zero = _ZERO_STEPS if is_smallest and scale is not None else 0
        return schedule.with_guidance(np.stack([scales, np.arange(schedule.steps) >= zero], axis=1))

    each = (steps,) * pyramid.stages
    first, later = (
        [
            guide(stage.schedule, is_smallest=i == 0)
            for i, stage in enumerate(list_stages(pyramid, shape, patch, each, amplified=amplified))
        ]
        for amplified in (amplifies_first, False)
    )
    return functools.reduce(Schedule.followed_by, [*first, *later * (chunks - 1)])
