"""The common part of the specs of this package's families. It imports no JAX and no torch."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.plan import Expert
from wan_tpu.request import (
    DIFFUSERS,
    NO_OVERRIDES,
    ORIGINAL,
    CheckpointOverrides,
    Defaults,
    GenerationRequest,
    Preset,
    ResolvedRequest,
)
from wan_tpu.spec import ModelSpec

_DIFFUSERS = "https://github.com/huggingface/diffusers/tree/v0.42.1/src/diffusers/pipelines"
DENOISE = "denoise"  # The stage of a model's only expert, and the name of its component.


class Publication(Protocol):
    """A family's module `published`."""

    def recognise(self, config: Any) -> str:
        """Return the name of the published model with a configuration, or `CUSTOM` for any other."""

    def defaults(self, config: Any) -> Defaults:
        """Return the sampling settings of the program that a model's authors published."""

    def diffusers_defaults(self, config: Any) -> Defaults | None:
        """Return the defaults of diffusers' pipeline for a model, or None if there is none."""

    def source(self, config: Any) -> str:
        """Return the address of the authors' program."""


@dataclass(frozen=True)
class FamilySpec(ModelSpec):
    """A spec determined by a checkpoint's configuration; the model has one expert unless a family overrides this.

    Attributes:
        config: Everything that determines the model's programs, a dataclass of the family.
        overrides: The checkpoint's own sampling settings.
        tokenizer: The folder of its tokenizer, with which a prompt's tokens are counted; None without a checkpoint.
        published: The family's module of that name.
        read_config: Reads a checkpoint's configuration; raises `CheckpointError` for one that the family doesn't run.
        own_keys: Keys that the family reads in a checkpoint's `wan_tpu.json` in addition to the sampling settings.
        spatial_stride: Pixels per pixel of the latents, in height and width.

    Raises:
        CheckpointError: The configuration contradicts itself.
    """

    config: Any
    overrides: CheckpointOverrides = NO_OVERRIDES
    tokenizer: str | None = dataclasses.field(default=None, compare=False)
    published: ClassVar[Publication]
    read_config: ClassVar["staticmethod[[Checkpoint], Any]"]
    own_keys: ClassVar[tuple[str, ...]] = ()
    spatial_stride: ClassVar[int]
    boundary_ratio = None

    def __post_init__(self) -> None:
        """Check that the parts of the configuration fit together."""

    @classmethod
    def open(cls, checkpoint: Checkpoint) -> Self:
        """Read a checkpoint's configuration; raises `CheckpointError`."""
        tokenizer = str((checkpoint.folder / "tokenizer").absolute())
        return cls(cls.read_config(checkpoint), checkpoint.sampling(*cls.own_keys), tokenizer)

    @functools.cached_property
    def name(self) -> str:  # type: ignore[override]
        """Name of the published model, or `published.CUSTOM`."""
        return self.published.recognise(self.config)

    @property
    def defaults(self) -> Defaults:  # type: ignore[override]
        """The checkpoint's own sampling settings, else the published ones."""
        overrides: dict[str, Any] = dict(self.overrides.defaults)
        return dataclasses.replace(self.published.defaults(self.config), **overrides)

    @property
    def presets(self) -> Mapping[str, Preset]:
        """The authors' settings, diffusers', those of adapters for few steps, and the checkpoint's own."""
        authors, diffusers = self.published.defaults(self.config), self.published.diffusers_defaults(self.config)
        presets = {ORIGINAL: Preset("what the model's authors' program makes", self.published.source(self.config), ())}
        if diffusers is not None:
            own = dict(self.overrides.defaults)
            # `defaults_for` has the size, which an image's shape may change.
            names = [
                field.name for field in dataclasses.fields(Defaults) if field.name not in ("height", "width", *own)
            ]
            pairs = [(name, getattr(diffusers, name)) for name in names]
            settings = tuple((name, value) for name, value in pairs if value != getattr(authors, name))
            presets[DIFFUSERS] = Preset("the defaults of diffusers' pipeline", _DIFFUSERS, settings)
        return {**presets, **self.few_step_presets, **super().presets}

    def defaults_for(self, request: GenerationRequest, picture: tuple[int, int] | None) -> Defaults:
        """Return the settings that fill a request's open fields; the preset `DIFFUSERS` has diffusers' size."""
        diffusers = self.published.diffusers_defaults(self.config)
        if request.preset != DIFFUSERS or diffusers is None:
            return super().defaults_for(request, picture)
        own = {"height": diffusers.height, "width": diffusers.width, **dict(self.overrides.defaults)}
        spec = dataclasses.replace(self, overrides=dataclasses.replace(self.overrides, defaults=tuple(own.items())))
        return super(FamilySpec, spec).defaults_for(request, picture)

    @property
    def few_step_presets(self) -> Mapping[str, Preset]:
        """Published ways to sample in few steps, by name."""
        return {}

    @property
    def heads(self) -> int:  # type: ignore[override]
        return int(self.config.transformer["num_attention_heads"])

    @property
    def latent_channels(self) -> int:
        return int(self.config.vae["latent_channels"])

    def latent_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of the video's latents."""
        frames, stride = self.latent_frames(request.frames), self.spatial_stride
        return 1, self.latent_channels, frames, request.height // stride, request.width // stride

    def experts(self, request: ResolvedRequest) -> tuple[Expert, ...]:
        """Return the one expert."""
        return (Expert(DENOISE, 0, request.steps, self.is_guided(request)),)
