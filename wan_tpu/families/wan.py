"""The Wan family: Wan 2.1 T2V and I2V, Wan 2.2 T2V A14B, I2V A14B and TI2V 5B.

Everything particular to these models is here and in the files beside it named wan_*: components, conditioning,
guidance, the latents' normalisation, limits. The reference for every formula is diffusers 0.42, pipelines/wan.

Shapes: R requests stepped together, B batch (guidance branches), T latent frames, H W latent height and width, L
tokens, C channels.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.video_processor import VideoProcessor
from jax.sharding import Mesh
from PIL import Image

from wan_tpu.bridge import Params, call
from wan_tpu.checkpoint import Checkpoint, Component
from wan_tpu.errors import CheckpointError, InvalidRequest
from wan_tpu.families import wan_components, wan_presets, wan_tokens, wan_transformer, wan_vae
from wan_tpu.families.causal_vae import CausalChunks
from wan_tpu.families.wan_flops import WanFlops
from wan_tpu.families.wan_presets import TEXT_TOKENS, WanConfig
from wan_tpu.families.wan_transformer import TextKeys
from wan_tpu.request import FRAME_STRIDE, Defaults, ResolvedRequest, nearest_multiple


class WanModel:
    """One Wan model: its components and the pure functions of its stages.

    Functions that take `module` and `params` are traced by `jax.jit`; all others run on the host.
    """

    family = "wan"

    def __init__(self, config: WanConfig, checkpoint: Checkpoint | None = None) -> None:
        """checkpoint: for the tokenizer and the image processor; a preset compiles without."""
        self.config = config
        self.checkpoint = checkpoint
        self.preset = wan_presets.recognise(config)
        self.heads: int = config.transformer["num_attention_heads"]
        self.boundary_ratio = config.boundary_ratio
        self.latent_channels: int = config.vae["z_dim"]
        self._spatial: int = config.vae.get("scale_factor_spatial", 8)
        self._patch: list[int] = config.transformer["patch_size"]
        self._video_processor = VideoProcessor(vae_scale_factor=self._spatial)
        for key in ("latents_mean", "latents_std"):
            if len(config.vae[key]) != self.latent_channels:
                raise CheckpointError(
                    f"vae/config.json has {len(config.vae[key])} {key} for z_dim {self.latent_channels}"
                )
        if (config.vae.get("scale_factor_temporal") or FRAME_STRIDE) != FRAME_STRIDE:
            raise CheckpointError(f"the VAE compresses time by {config.vae['scale_factor_temporal']}, supported is 4")

    # ---- what it accepts

    @property
    def tasks(self) -> tuple[str, ...]:
        """Which of "t2v" and "i2v" this model does."""
        if self.config.transformer["in_channels"] > self.latent_channels:
            return ("i2v",)
        return ("t2v", "i2v") if self.config.expand_timesteps else ("t2v",)

    @property
    def defaults(self) -> Defaults:
        """The published sampling settings; the shift is the checkpoint's."""
        return wan_presets.defaults(self.preset, self.tasks[0], self.config.shift)

    def check(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest` when this model can't make what a (resolved) request asks for."""
        if request.task not in self.tasks:
            does = f"this checkpoint ({self.preset}) does {' and '.join(self.tasks)} only"
            if request.image is None:
                raise InvalidRequest(f"image is missing, and {does}; give one")
            raise InvalidRequest(f"image was given, but {does}; leave it out, or use an I2V checkpoint")
        self.check_size(request)

    def check_size(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest` when this model can't make videos of a (resolved) request's size."""
        for name, patch in (("height", self._patch[1]), ("width", self._patch[2])):
            value, multiple = getattr(request, name), self._spatial * patch
            if value % multiple:
                nearest = nearest_multiple(value, multiple)
                raise InvalidRequest(
                    f"{name} is {value}; {self.preset} needs a multiple of {multiple}, nearest {nearest}"
                )

    def latent_shape(self, request: ResolvedRequest) -> tuple[int, int, int, int, int]:
        """Return [1, C, T, H, W] of the latents of a resolved request."""
        frames = (request.frames - 1) // FRAME_STRIDE + 1
        return 1, self.latent_channels, frames, request.height // self._spatial, request.width // self._spatial

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return L, the transformer's sequence length for latents of a shape."""
        return int(np.prod([n // p for n, p in zip(latent_shape[2:], self._patch, strict=True)]))

    # ---- components

    @functools.cached_property
    def components(self) -> dict[str, Component]:
        """Every component by the name of the work it does; "vae" in the checkpoint serves two."""
        config = self.config
        found = {
            "text_encoder": wan_components.text_encoder(config),
            "vae_encoder": wan_components.vae_half(config, "decoder", "post_quant_conv"),
            "denoise_high": wan_components.transformer(config, "transformer"),
            "decoder": wan_components.vae_half(config, "encoder", "quant_conv"),
        }
        if config.image_encoder is not None:
            found["image_encoder"] = wan_components.image_encoder(config)
        if config.two_experts:
            found["denoise_low"] = wan_components.transformer(config, "transformer_2")
        return found

    @property
    def needs_image_features(self) -> bool:
        """Whether the transformer takes CLIP features of the image (Wan 2.1 I2V)."""
        return self.config.transformer.get("image_dim") is not None and self.config.image_encoder is not None

    # ---- encoder stage

    def tokenize(self, prompts: list[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Return token ids and mask, both int32 [B, 512], and a warning for each prompt that was cut."""
        assert self.checkpoint is not None
        folder = self.checkpoint.path("tokenizer")
        cleaned = [prompt_clean(prompt) for prompt in prompts]
        settings = {"padding": "max_length", "max_length": TEXT_TOKENS, "truncation": True, "return_tensors": "np"}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder.resolve()))
            tokens = tokenizer(cleaned, **settings)
        except Exception as error:  # tokenizers raises bare Exception for damaged files
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise CheckpointError(f"{folder} holds no working tokenizer ({reason}); fetch it again") from error
        warnings = []
        for prompt, ids in zip(cleaned, tokens["input_ids"], strict=True):
            length = len(tokenizer(prompt, verbose=False)["input_ids"])
            if length > TEXT_TOKENS:
                end = tokenizer.decode(ids[-9:-1], skip_special_tokens=True)
                warnings.append(
                    f"the prompt is {length} tokens long, the model reads {TEXT_TOKENS}: cut after «… {end.strip()}»"
                )
        return tokens["input_ids"].astype(np.int32), tokens["attention_mask"].astype(np.int32), warnings

    @staticmethod
    def encode_text(module: torch.nn.Module, params: Params, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """ids, mask [B, L] -> embeddings [B, L, C], zero where the mask is."""

        def method(module: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return module(ids, mask).last_hidden_state

        return call(module, params, method, ids, mask) * mask[:, :, None]

    def clip_pixels(self, image: Image.Image) -> np.ndarray:
        """Return the image as CLIP takes it, float32 [1, 3, 224, 224] (sizes from the checkpoint)."""
        assert self.checkpoint is not None
        folder = str(self.checkpoint.path("image_processor"))
        processor = transformers.CLIPImageProcessor.from_pretrained(folder)
        return np.asarray(processor(images=image, return_tensors="np")["pixel_values"], np.float32)

    @staticmethod
    def encode_image(module: torch.nn.Module, params: Params, pixels: jax.Array) -> jax.Array:
        """pixels [1, 3, 224, 224] -> features [1, L, C] of CLIP's last layer but one (`adapt` dropped the last)."""

        def method(module: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
            vision = getattr(module, "vision_model", module)
            hidden = vision.pre_layrnorm(vision.embeddings(pixels))
            for layer in vision.encoder.layers:
                hidden = layer(hidden, attention_mask=None)
            return hidden

        return call(module, params, method, pixels)

    def video_condition(self, request: ResolvedRequest) -> list[np.ndarray]:
        """Return the chunks of pixels the VAE encodes for an image: float32 [1, 3, 1 or 4, H, W] in [-1, 1].

        The image, then black-in-the-middle (zero) frames up to the request's length; TI2V 5B takes the image alone.
        """
        assert isinstance(request.image, Image.Image)
        pixels = self._video_processor.preprocess(request.image, height=request.height, width=request.width)
        first = pixels[:, :, None].numpy().astype(np.float32)
        if self.config.expand_timesteps:
            return [first]
        blank = np.zeros((1, 3, FRAME_STRIDE, *first.shape[3:]), np.float32)
        return [first, *[blank] * ((request.frames - 1) // FRAME_STRIDE)]

    def image_latents(self, moments: np.ndarray) -> np.ndarray:
        """Turn the VAE encoder's output [1, 2C, T, H, W] into the image condition of `Conditioning`, float32."""
        mean, std = self._latent_statistics()
        latents = (moments[:, : self.latent_channels].astype(np.float32) - mean) * (1 / std)
        if self.config.expand_timesteps:
            return latents
        # One mask channel for each pixel frame of a latent frame: ones for the given image, then zeros.
        mask = np.zeros((1, FRAME_STRIDE, *latents.shape[2:]), np.float32)
        mask[:, :, 0] = 1
        return np.concatenate([mask, latents], axis=1)

    def vae_encoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Pixels [1, 3, 1 or 4, H, W] -> moments [1, 2C, 1, H, W], chunk by chunk."""
        size = self.config.vae.get("patch_size") or 1
        return CausalChunks(
            module,
            mesh,
            wan_vae.encoder,
            before=lambda pixels: wan_vae.patchify(pixels, size),
            after=lambda moments: moments,
            scale=self._spatial // size,
            later_frames=FRAME_STRIDE,
        )

    # ---- experts

    @staticmethod
    def text_keys(
        module: torch.nn.Module, params: Params, mesh: Mesh, text: jax.Array, image: jax.Array | None
    ) -> TextKeys:
        """Return the cross-attention keys and values of every layer: once a request and expert, not every step.

        text   [B, L, C]: the prompt's embeddings alone, or the prompt's and the negative prompt's
        image  [1, L, C] CLIP features
        """
        return wan_transformer.text_keys(module, params, mesh, text, image)

    @staticmethod
    def key_shapes(mesh: Mesh, keys: TextKeys) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and shardings of what `text_keys` makes, to compile a step without it."""
        branches = keys["key"].shape[1]
        return {
            name: jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=wan_transformer.key_sharding(mesh, name, branches)
            )
            for name, value in keys.items()
        }

    def velocity(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        latents: jax.Array,
        timesteps: jax.Array,
        guidance: jax.Array,
        keys: Sequence[TextKeys],
        image_latents: jax.Array | None,
    ) -> jax.Array:
        """Return the guided velocities of R requests of equal shape, float32 [R, C, T, H, W].

        latents  float32 [R, C, T, H, W]; timesteps, guidance  float32 [R]
        keys     R, from `text_keys`; image_latents as in `Conditioning`, their first dimension R
        """
        times, first_tokens = timesteps[:, None], 0
        if image_latents is None:
            given = latents
        elif self.config.expand_timesteps:
            # The given image has no noise: the tokens of the first latent frame are at time 0.
            given = latents.at[:, :, :1].set(image_latents)
            times = jnp.stack([jnp.zeros_like(timesteps), timesteps], axis=1)
            first_tokens = self.tokens((*latents.shape[:2], 1, *latents.shape[3:]))
        else:
            given = jnp.concatenate([latents, image_latents], axis=1)
        dtype = keys[0]["key"].dtype
        tokens = wan_transformer.velocity(module, params, mesh, given.astype(dtype), times, first_tokens, keys)
        if tokens.shape[1] == 1:
            guided = tokens[:, 0]
        else:
            conditional, unconditional = tokens[:, 0], tokens[:, 1]
            guided = unconditional + guidance[:, None, None] * (conditional - unconditional)
        return wan_tokens.unpatchify(guided, latents.shape, self._patch, self.latent_channels)

    def finish(self, latents: np.ndarray, image_latents: np.ndarray | None) -> np.ndarray:
        """Return the latents to decode: TI2V 5B puts the given first frame back in place."""
        if image_latents is None or not self.config.expand_timesteps:
            return latents
        return np.concatenate([image_latents, latents[:, :, 1:]], axis=2)

    # ---- decoder stage

    def vae_latents(self, latents: np.ndarray) -> np.ndarray:
        """Undo the normalisation with the VAE's own statistics; float32 [1, C, T, H, W]."""
        mean, std = self._latent_statistics()
        return latents * std + mean

    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Latents [1, C, 1, H, W] -> pixels [1, 3, 1 or 4, H, W] around [-1, 1], chunk by chunk."""
        size = self.config.vae.get("patch_size") or 1
        return CausalChunks(
            module,
            mesh,
            wan_vae.decoder,
            before=lambda latents: latents,
            after=lambda pixels: wan_vae.unpatchify(pixels, size),
            scale=1,
            later_frames=1,
        )

    @staticmethod
    def pixels(decoded: np.ndarray) -> np.ndarray:
        """Return what the decoder gave, [1, 3, T, H, W], as float32 [T, H, W, 3] in [0, 1]."""
        unit = np.clip(decoded[0].astype(np.float32), -1, 1) / 2 + 0.5
        return unit.transpose(1, 2, 3, 0)

    @functools.cached_property
    def flops(self) -> WanFlops:
        """The floating-point operations of each stage."""
        return WanFlops(self.config)

    def _latent_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the latents from the VAE's config, [1, C, 1, 1, 1]."""
        return tuple(  # type: ignore[return-value]
            np.asarray(self.config.vae[key], np.float32).reshape(1, -1, 1, 1, 1)
            for key in ("latents_mean", "latents_std")
        )
