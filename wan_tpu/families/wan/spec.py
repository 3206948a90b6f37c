"""A Wan model as its configuration describes it: stages, limits, defaults, shapes, and each expert's steps."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np

from wan_tpu.checkpoint import SETTINGS, Checkpoint
from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.shared.family_spec import FamilySpec
from wan_tpu.families.wan import published, sampling, sizes
from wan_tpu.families.wan.config import read_config, read_model_name
from wan_tpu.families.wan.published import WanConfig
from wan_tpu.plan import DECODER, ENCODER, Expert
from wan_tpu.request import DIFFUSERS, Defaults, GenerationRequest, Preset, ResolvedRequest
from wan_tpu.schedules import flow
from wan_tpu.schedules.magcache import Curve
from wan_tpu.schedules.schedule import TRAIN_TIMESTEPS, Schedule

SOLVERS: dict[str, tuple[Callable[..., Schedule], Callable[..., Schedule]]] = {
    "unipc": (flow.unipc, flow.unipc_at),
    "euler": (flow.euler, flow.euler_at),
    "rcm": (flow.rcm, flow.rcm_at),
}


_LONGEST = 4  # The longest shape that a video takes from an image.


class WanSpec(FamilySpec):
    config: WanConfig
    published: ClassVar = published
    read_config: ClassVar = staticmethod(read_config)
    own_keys = ("model",)

    def __post_init__(self) -> None:
        for key in ("latents_mean", "latents_std"):
            if len(self.config.vae[key]) != self.latent_channels:
                raise CheckpointError(
                    f"vae/config.json has {len(self.config.vae[key])} numbers in {key}; with z_dim "
                    f"{self.latent_channels} it must have as many"
                )
        stride = self.config.vae["scale_factor_temporal"]
        if stride != self.frame_stride:
            raise CheckpointError(f"the VAE compresses time by {stride}; supported: {self.frame_stride}")

    @classmethod
    def open(cls, checkpoint: Checkpoint) -> Self:
        spec, model = super().open(checkpoint), read_model_name(checkpoint)
        if model not in (None, spec.name):
            raise CheckpointError(
                f"{checkpoint.folder / SETTINGS} has model {model}, but the checkpoint's configuration is "
                f"that of {spec.name}; correct it"
            )
        return spec

    @property
    def tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.config.transformer["in_channels"] > self.latent_channels:
            return ("i2v",)
        return ("t2v", "i2v") if self.config.expand_timesteps else ("t2v",)

    @property
    def solvers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The checkpoint's own scheduler first; rCM before it with sparse-linear attention, and only there."""
        others = sorted((name for name in SOLVERS if name != "rcm"), key=lambda name: name != self.config.solver)
        return (*(() if self.config.attention_density is None else ("rcm",)), *others)

    @property
    def components(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        """The components of each stage; a denoising stage has the transformer of the same name."""
        encoder = ["text_encoder", "vae_encoder"] if self.tasks == ("t2v",) else ["text_encoder"]
        if "i2v" in self.tasks:
            encoder += ["image_encoder", "vae_encoder"] if self.takes_image_features else ["vae_encoder"]
        denoise = ("denoise_high", "denoise_low") if self.config.two_experts else ("denoise",)
        return {ENCODER: tuple(encoder), **{stage: (stage,) for stage in denoise}, DECODER: (DECODER,)}

    @property
    def last_images(self) -> Literal["none", "optional", "required"]:  # type: ignore[override]
        """Wan 2.1 has checkpoints for both frames and for the first only; Wan 2.2 I2V takes one or both."""
        if not self.takes_image_features:
            return "optional" if self.tasks == ("i2v",) else "none"
        return "none" if self.config.transformer["pos_embed_seq_len"] is None else "required"

    @property
    def takes_video(self) -> bool:  # type: ignore[override]
        """Whether a request may start from a video: as in diffusers, models of text only do."""
        return self.tasks == ("t2v",)

    @property
    def takes_image_features(self) -> bool:
        """Whether the transformer takes CLIP features of the image (Wan 2.1 I2V)."""
        return self.config.transformer["image_dim"] is not None and self.config.image_encoder is not None

    @property
    def latent_channels(self) -> int:
        return int(self.config.vae["z_dim"])

    @property
    def spatial_stride(self) -> int:  # type: ignore[override]
        return int(self.config.vae["scale_factor_spatial"])

    @property
    def patch(self) -> list[int]:
        patch: list[Any] = self.config.transformer["patch_size"]
        return patch

    @property
    def boundary_ratio(self) -> float | None:  # type: ignore[override]
        """The high-noise expert runs steps with t >= boundary_ratio x 1000; None with one expert."""
        return self.config.boundary_ratio

    @property
    def size_multiple(self) -> int:
        return self.spatial_stride * self.patch[1]

    def size_like(self, picture: tuple[int, int], preset: str | None = None) -> tuple[int, int]:
        """Return the (height, width) of a video that takes the shape of an image, as Wan's own program chooses it."""
        if preset == DIFFUSERS:
            return super().size_like(picture)
        height, width = picture
        if max(picture) > _LONGEST * min(picture):  # A video shows the middle of a longer image.
            picture = (_LONGEST, 1) if height > width else (1, _LONGEST)
        choose = sizes.closest_shape if self.config.expand_timesteps else sizes.below_area
        return choose(self.defaults.height * self.defaults.width, picture, self.size_multiple)

    def defaults_for(self, request: GenerationRequest, picture: tuple[int, int] | None) -> Defaults:
        """Return the settings that fill a request's open fields; the shift of Wan 2.1 I2V depends on the size."""
        settings = super().defaults_for(request, picture)
        if not self._shift_follows_size or self.follows_diffusers(request):
            return settings
        area = (request.height or settings.height) * (request.width or settings.width)
        shift = published.SHIFT_480P if area <= published.AREA_480P else published.SHIFT_720P
        return dataclasses.replace(settings, shift=shift)

    @property
    def _shift_follows_size(self) -> bool:
        is_own = "shift" in dict(self.overrides.defaults) or not published.has_published_shift(self.config)
        return self.name.startswith("wan2.1-i2v") and not is_own

    def check(self, request: ResolvedRequest, *, image: bool, last: bool, video: bool | None = None) -> None:
        """Check a request as every model does, and check that rCM has noise levels for its steps.

        Raises:
            InvalidRequest: The model can't make the video.
        """
        most = len(flow.RCM_ANGLES)
        if request.solver == "rcm" and request.sigmas is None and request.steps > most:
            raise InvalidRequest(
                f"steps is {request.steps}; with solver rcm, allowed: 1 to {most}, nearest {most}; for more, give "
                "your own sigmas",
                "steps",
            )
        super().check(request, image=image, last=last, video=video)

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the transformer's sequence length, for latents of a shape."""
        return int(np.prod([n // p for n, p in zip(latent_shape[2:], self.patch, strict=True)]))

    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return the experts of a resolved request with their steps, without experts that have none.

        As in diffusers, the first expert's guidance scale decides whether there is guidance at all. With a scale of 1,
        the second expert computes only the prompt's branch.
        """
        ends = [max(end, self.first_step(request)) for end in (0, self._high_noise_steps(request), request.steps)]
        guided = self.is_guided(request)
        branches = (guided, guided and request.guidance_scale_2 != 1)
        experts = [Expert(stage, ends[i], ends[i + 1], branches[i]) for i, stage in enumerate(self.denoise_stages)]
        return tuple(expert for expert in experts if expert.start < expert.stop)

    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the numbers of every step; each expert has its own guidance."""
        high = self._high_noise_steps(request)
        scales = [request.guidance_scale] * high + [request.guidance_scale_2] * (request.steps - high)
        return self._unguided_schedule(request).with_guidance(scales)

    @property
    def few_step_presets(self) -> Mapping[str, Preset]:
        """Four steps by distilled adapters; all models with sparse attention are distilled themselves."""
        if self.config.attention_density is not None:
            return {"turbo": sampling.TURBO}
        return sampling.FEW_STEP_PRESETS.get(self.name, {})

    @property
    def curves(self) -> tuple[Curve, ...]:
        """MagCache's curves: the checkpoint's own before the published one."""
        curve = sampling.CURVES.get(self.name)
        return self.overrides.curves if curve is None else (*self.overrides.curves, curve)

    def _unguided_schedule(self, request: ResolvedRequest) -> Schedule:
        by_steps, by_sigmas = SOLVERS[request.solver]
        first = self.first_step(request)
        if request.sigmas is None:
            return by_steps(request.steps, request.shift, first)
        return by_sigmas(request.sigmas, first)

    def _high_noise_steps(self, request: ResolvedRequest) -> int:
        """Return the number of steps before the boundary; with one expert, that of all steps."""
        if self.boundary_ratio is None:
            return request.steps
        if request.switch_step is not None:
            return request.switch_step
        timesteps = self._unguided_schedule(request).timesteps
        return int((timesteps >= self.boundary_ratio * TRAIN_TIMESTEPS).sum())
