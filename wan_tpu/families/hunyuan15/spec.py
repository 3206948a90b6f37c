"""A HunyuanVideo-1.5 model as its configuration describes it: stages, limits, defaults, shapes, its steps' numbers."""

import dataclasses
import functools
import math
from dataclasses import dataclass

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.hunyuan15 import published
from wan_tpu.families.hunyuan15.config import read_config
from wan_tpu.families.hunyuan15.published import HunyuanConfig
from wan_tpu.families.hunyuan15.sizes import STRIDE, default_size
from wan_tpu.plan import DECODER, ENCODER, Expert
from wan_tpu.request import NOTHING_OWN, CheckpointOverrides, Defaults, ResolvedRequest
from wan_tpu.schedules import flow
from wan_tpu.schedules.schedule import Schedule
from wan_tpu.spec import ModelSpec

DENOISE = "denoise"


@dataclass(frozen=True)
class HunyuanSpec(ModelSpec):
    """One HunyuanVideo-1.5 model.

    Attributes:
        config: The model's configuration.
        own: The checkpoint's own sampling settings.

    Raises:
        CheckpointError: The configuration contradicts itself.
    """

    config: HunyuanConfig
    own: CheckpointOverrides = NOTHING_OWN

    boundary_ratio = None
    solvers = ("euler",)
    size_multiple = STRIDE
    shape_slack = 0  # diffusers and the published program crop images of any shape.

    def __post_init__(self) -> None:
        vae, transformer = self.config.vae, self.config.transformer
        for key, supported in (
            ("spatial_compression_ratio", STRIDE),
            ("temporal_compression_ratio", self.frame_stride),
        ):
            if vae[key] != supported:
                raise CheckpointError(f"the VAE has {key} {vae[key]}, supported is {supported}")
        if transformer["in_channels"] != 2 * self.latent_channels + 1:
            raise CheckpointError(
                f"the transformer takes {transformer['in_channels']} channels; with latents of {self.latent_channels} "
                f"it takes {2 * self.latent_channels + 1}: latents, an image's, and a mask"
            )

    @classmethod
    def open(cls, checkpoint: Checkpoint) -> "HunyuanSpec":
        """Read a checkpoint's configuration; raises `CheckpointError`."""
        return cls(read_config(checkpoint), checkpoint.sampling("vae_tile"))

    @functools.cached_property
    def name(self) -> str:  # type: ignore[override]
        """Name of the published model, or `published.CUSTOM`."""
        return published.recognise(self.config)

    @property
    def tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        """Text to video, or image to video."""
        return (str(self.config.transformer["task_type"]),)

    @property
    def defaults(self) -> Defaults:  # type: ignore[override]
        """The checkpoint's own sampling settings, else the published ones; shift and guidance are the checkpoint's."""
        return dataclasses.replace(published.defaults(self.config), **dict(self.own.defaults))  # type: ignore[arg-type]

    def size_like(self, picture: tuple[int, int]) -> tuple[int, int]:
        """Return the size for an image, of those that the model knows."""
        return default_size(int(self.config.transformer["target_size"]), *picture)

    def guided(self, request: ResolvedRequest) -> bool:
        """Return whether there are two branches; diffusers' guider also has them at a scale below 1."""
        return not math.isclose(request.guidance_scale, 1.0)

    @property
    def components(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        """The components of each stage."""
        encoder = ["text_encoder", "glyph_encoder"]
        if "i2v" in self.tasks:
            encoder += ["image_encoder", "vae_encoder"]
        return {ENCODER: tuple(encoder), DENOISE: (DENOISE,), DECODER: (DECODER,)}

    @property
    def heads(self) -> int:  # type: ignore[override]
        """Attention heads of the transformer."""
        return int(self.config.transformer["num_attention_heads"])

    @property
    def latent_channels(self) -> int:
        """C of the latents."""
        return int(self.config.vae["latent_channels"])

    @property
    def context_tokens(self) -> int:
        """The largest number of tokens beside the video's: of image, quoted text and prompt."""
        image = self.config.image_encoder
        image_tokens = 0 if image is None else (image["image_size"] // image["patch_size"]) ** 2
        return published.TEXT_TOKENS + published.GLYPH_TOKENS + int(image_tokens)

    def latent_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of the latents of a resolved request."""
        frames = self.latent_frames(request.frames)
        return 1, self.latent_channels, frames, request.height // STRIDE, request.width // STRIDE

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the transformer's longest sequence of video and context, for latents of a shape."""
        return math.prod(latent_shape[2:]) + self.context_tokens

    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return the one expert."""
        return (Expert(DENOISE, 0, request.steps, self.guided(request)),)

    def shapes(self, request: ResolvedRequest, *, images: int) -> dict[str, str]:
        """Name the programs as every model does, the decoder's also by frames: it keeps the keys of all frames."""
        size = f"{request.height}x{request.width}x{request.frames}"
        return super().shapes(request, images=images) | {DECODER: f"{DECODER} {size}"}

    def schedule(self, request: ResolvedRequest) -> Schedule:
        """Return the numbers of every step: Euler's method on even steps of the flow, shifted once."""
        if request.sigmas is None:
            schedule = flow.euler_even(request.steps, request.shift)
        else:
            schedule = flow.euler_at(request.sigmas)
        schedule = schedule.with_guidance([request.guidance_scale] * request.steps)
        return schedule.with_following() if self.config.meanflow else schedule
