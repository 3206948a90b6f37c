"""A HunyuanVideo-1.5 model as its configuration describes it: stages, limits, defaults, shapes, its steps' numbers."""

import math
from collections.abc import Iterator
from typing import ClassVar

from wan_tpu.errors import CheckpointError
from wan_tpu.families.hunyuan15 import published
from wan_tpu.families.hunyuan15.config import read_config
from wan_tpu.families.hunyuan15.lettering import find_doubtful_marks
from wan_tpu.families.hunyuan15.published import HunyuanConfig
from wan_tpu.families.hunyuan15.sizes import STRIDE, default_size
from wan_tpu.families.shared.family_spec import DENOISE, FamilySpec
from wan_tpu.plan import DECODER, ENCODER
from wan_tpu.request import ResolvedRequest
from wan_tpu.schedules import flow
from wan_tpu.schedules.schedule import Schedule


class HunyuanSpec(FamilySpec):
    config: HunyuanConfig
    published: ClassVar = published
    read_config: ClassVar = staticmethod(read_config)
    spatial_stride = STRIDE
    own_keys = ("vae_tile",)

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
                raise CheckpointError(f"the VAE has {key} {vae[key]}; supported: {supported}")
        if transformer["in_channels"] != 2 * self.latent_channels + 1:
            raise CheckpointError(
                f"the transformer takes {transformer['in_channels']} channels; with latents of {self.latent_channels} "
                f"it must take {2 * self.latent_channels + 1}: the video's latents, an image's, and a mask"
            )

    @property
    def tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (str(self.config.transformer["task_type"]),)

    def size_like(self, picture: tuple[int, int], preset: str | None = None) -> tuple[int, int]:
        """Return the size for an image, among those that the model was trained on."""
        return default_size(int(self.config.transformer["target_size"]), *picture)

    def is_guided(self, request: ResolvedRequest) -> bool:
        """Return whether there are two branches; diffusers' guider also has them at a scale below 1."""
        return not math.isclose(request.guidance_scale, 1.0)

    def list_warnings(self, request: ResolvedRequest, *, images: int) -> Iterator[str]:
        """Yield what every model does, and what may become lettering without being meant to."""
        yield from super().list_warnings(request, images=images)
        for field in ("prompt", "negative_prompt")[: len(self.prompts(request))]:
            yield from find_doubtful_marks(field, getattr(request, field))

    @property
    def components(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        encoder = ["text_encoder", "glyph_encoder"]
        if "i2v" in self.tasks:
            encoder += ["image_encoder", "vae_encoder"]
        return {ENCODER: tuple(encoder), DENOISE: (DENOISE,), DECODER: (DECODER,)}

    @property
    def context_tokens(self) -> int:
        """The largest number of context tokens: those of image, quoted text and prompt."""
        image = self.config.image_encoder
        image_tokens = 0 if image is None else (image["image_size"] // image["patch_size"]) ** 2
        return published.TEXT_TOKENS + published.GLYPH_TOKENS + int(image_tokens)

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the transformer's longest sequence of video and context, for latents of a shape."""
        return math.prod(latent_shape[2:]) + self.context_tokens

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
