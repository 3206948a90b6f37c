"""A CogVideoX model as its configuration describes it: stages, limits, defaults, shapes, and its steps' numbers."""

import math
from typing import ClassVar

from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families.cogvideox import published
from wan_tpu.families.cogvideox.config import read_config
from wan_tpu.families.cogvideox.published import TEXT_TOKENS, CogVideoXConfig
from wan_tpu.families.shared.family_spec import DENOISE, FamilySpec
from wan_tpu.plan import DECODER, ENCODER
from wan_tpu.request import ResolvedRequest, nearest_multiple
from wan_tpu.schedules import diffusion
from wan_tpu.schedules.schedule import Schedule

LATER_FRAMES = 2  # Latent frames of each of the decoder's chunks but the first.
_STRIDE = 8  # Pixels per pixel of the latents, in height and width.
_SOLVERS = {"ddim": diffusion.ddim, "dpm": diffusion.dpm}


class CogVideoXSpec(FamilySpec):
    config: CogVideoXConfig
    published: ClassVar = published
    read_config: ClassVar = staticmethod(read_config)
    spatial_stride = _STRIDE
    seeds_images = True

    # The VAE decodes pairs of latent frames, and a single one only at the start: 8n + 1 pixel frames.
    frame_step = 8

    def __post_init__(self) -> None:
        strides = 2 ** (len(self.config.vae["block_out_channels"]) - 1)
        if strides != _STRIDE:
            raise CheckpointError(f"the VAE compresses height and width by {strides}; supported: {_STRIDE}")
        if self.config.transformer["in_channels"] not in (self.latent_channels, 2 * self.latent_channels):
            raise CheckpointError(
                f"the transformer takes {self.config.transformer['in_channels']} channels; with latents of "
                f"{self.latent_channels} it must take as many, or twice as many with an image"
            )

    @property
    def tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("i2v",) if self.config.transformer["in_channels"] > self.latent_channels else ("t2v",)

    @property
    def solvers(self) -> tuple[str, ...]:  # type: ignore[override]
        """DPM-Solver++ and DDIM, that of the authors' program first."""
        return tuple(sorted(_SOLVERS, key=lambda name: name != self.defaults.solver))

    @property
    def unused(self) -> tuple[str, ...]:
        return (*super().unused, "shift", "sigmas")

    @property
    def components(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        encoder = ("text_encoder", "vae_encoder") if "i2v" in self.tasks else ("text_encoder",)
        return {ENCODER: encoder, DENOISE: (DENOISE,), DECODER: (DECODER,)}

    @property
    def patch(self) -> tuple[int, int, int]:
        size = int(self.config.transformer["patch_size"])
        return self.config.frames_a_patch, size, size

    @property
    def size_multiple(self) -> int:
        return _STRIDE * self.patch[1]

    @property
    def follows_image(self) -> bool:
        """Whether the model takes images, and has positions for more than one size."""
        return super().follows_image and not self.config.transformer["use_learned_positional_embeddings"]

    def size_like(self, picture: tuple[int, int], preset: str | None = None) -> tuple[int, int]:
        """Return the size of the model cards: the shorter side of the model's own size, and at most the longer one.

        If that has more rows or columns than there are positions, return the model's own size.
        """
        size = self.defaults.height, self.defaults.width
        shape = max(picture) / min(picture)
        sides = min(size), min(max(size), nearest_multiple(min(size) * shape, self.size_multiple))
        height, width = sides if picture[0] < picture[1] else sides[::-1]
        rows, columns = (_STRIDE * int(self.config.transformer[f"sample_{side}"]) for side in ("height", "width"))
        return (height, width) if height <= rows and width <= columns else size

    def check_size(self, request: ResolvedRequest) -> None:
        """Check the size as every model does, and check that the model has positions for it.

        Raises:
            InvalidRequest: The model can't make a video of this size.
        """
        super().check_size(request)
        config = self.config.transformer
        for name in ("height", "width"):
            value, trained = getattr(request, name), _STRIDE * int(config[f"sample_{name}"])
            if config["use_learned_positional_embeddings"] and value != trained:
                raise InvalidRequest(f"{name} is {value}; {self.name} supports only {trained}", name)
            if self.config.frames_a_patch > 1 and value > trained:
                raise InvalidRequest(f"{name} is {value}; {self.name} has positions for at most {trained}", name)
        if config["use_learned_positional_embeddings"] and request.frames != config["sample_frames"]:
            raise InvalidRequest(
                f"frames is {request.frames}; {self.name} supports only {config['sample_frames']}", "frames"
            )

    def padding(self, request: ResolvedRequest) -> int:
        """Return the number of latent frames that are denoised before the video's, to fill its first token."""
        return -self._decoded_frames(request) % self.config.frames_a_patch

    def latent_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of the latents that are denoised, `padding` included."""
        frames = self._decoded_frames(request) + self.padding(request)
        return (
            1,
            self.latent_channels,
            frames,
            request.height // _STRIDE,
            request.width // _STRIDE,
        )

    def decoded_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of the latents that are decoded."""
        _, channels, _, height, width = self.latent_shape(request)
        return 1, channels, self._decoded_frames(request), height, width

    def decoder_chunks(self, latent_frames: int) -> tuple[int, ...]:
        """Return how many latent frames the decoder takes at a time: two, but first three if their number is odd."""
        first = min(latent_frames, LATER_FRAMES + latent_frames % LATER_FRAMES)
        return (first, *[LATER_FRAMES] * ((latent_frames - first) // LATER_FRAMES))

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the transformer's sequence length of text and video, for latents of a shape."""
        return TEXT_TOKENS + math.prod(n // p for n, p in zip(latent_shape[2:], self.patch, strict=True))

    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the numbers of every step. With DPM, guidance depends on the timestep, as in the published demo.

        diffusers' formula (`use_dynamic_cfg`) compares a timestep of 1,000 with the number of steps.
        """
        schedule = _SOLVERS[request.solver](self.config.noise, request.steps)
        scale, steps = request.guidance_scale, request.steps
        if request.solver == "ddim":
            return schedule.with_guidance([scale] * steps)
        ratios = [(steps - timestep) / steps for timestep in schedule.timesteps.astype(int).tolist()]
        return schedule.with_guidance([1 + scale * ((1 - math.cos(math.pi * ratio**5.0)) / 2) for ratio in ratios])

    def _decoded_frames(self, request: ResolvedRequest) -> int:
        return self.latent_frames(request.frames)
