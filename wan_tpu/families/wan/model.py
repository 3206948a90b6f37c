"""The Wan family: Wan 2.1 T2V, I2V and FLF2V, Wan 2.2 T2V A14B, I2V A14B and TI2V 5B.

Everything specific to these models is here and in the files beside it: components, conditioning, guidance, the latents'
normalisation, limits. The reference for every formula is diffusers 0.42, pipelines/wan.

Shapes: B batch (guidance branches), T latent frames, H W latent height and width, L tokens, C channels.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.video_processor import VideoProcessor
from jax.sharding import Mesh
from PIL import Image

from wan_tpu.families.model import Model, StepInputs, apply_guidance
from wan_tpu.families.shared.causal_vae import CausalChunks
from wan_tpu.families.shared.convolutions import patchify, unpatchify
from wan_tpu.families.shared.image_processing import ImageProcessor
from wan_tpu.families.shared.t5 import text_encoder
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import tokenize
from wan_tpu.families.wan import components, transformer, vae
from wan_tpu.families.wan.flops import WanFlops
from wan_tpu.families.wan.published import TEXT_TOKENS, WanConfig
from wan_tpu.families.wan.spec import WanSpec
from wan_tpu.families.wan.text_keys import TextKeys, key_sharding, text_keys
from wan_tpu.families.wan.tokens import unpatchify as unpatchify_tokens
from wan_tpu.media.image import fit_image, has_shape
from wan_tpu.media.reading import read_frames
from wan_tpu.plan import VIDEO
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.bridge import Params, call
from wan_tpu.runtime.components import Component, Loaded


class WanModel(Model):
    spec: WanSpec
    config: WanConfig

    # ---- Components.

    @functools.cached_property
    def components(self) -> dict[str, Component]:
        config = self.config
        parts = {
            "text_encoder": text_encoder(config.text_encoder_class, config.text_encoder),
            "vae_encoder": components.vae_half(config, "decoder", "post_quant_conv"),
            "decoder": components.vae_half(config, "encoder", "quant_conv"),
        }
        if config.image_encoder is not None:
            parts["image_encoder"] = components.image_encoder(config)
        for stage, folder in zip(self.spec.denoise_stages, ("transformer", "transformer_2"), strict=False):
            parts[stage] = components.transformer(config, folder)
        return parts

    # ---- Shapes.

    @property
    def text_shape(self) -> tuple[int, int]:
        return TEXT_TOKENS, self.config.transformer["text_dim"]

    @property
    def image_pixels_shape(self) -> tuple[int, int, int, int]:
        """(images, 3, height, width) of CLIP's input."""
        assert self.config.image_encoder is not None
        size = self.config.image_encoder["image_size"]
        return 1 + (self.spec.last_images == "required"), 3, size, size

    @property
    def image_features_shape(self) -> tuple[int, int, int]:
        """(images, L, C) of CLIP's features: a token for each patch, and one for the whole image."""
        assert self.config.image_encoder is not None
        clip = self.config.image_encoder
        tokens = (clip["image_size"] // clip["patch_size"]) ** 2 + 1
        return self.image_pixels_shape[0], tokens, self.config.transformer["image_dim"]

    def image_latents_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of an image's mask and latents, or of its latents only (TI2V 5B)."""
        if self.config.expand_timesteps:
            return (*latent_shape[:2], 1, *latent_shape[3:])
        extra = self.config.transformer["in_channels"] - latent_shape[1]
        return (1, extra, *latent_shape[2:]) if extra else None

    def image_chunks(self, request: ResolvedRequest, images: int) -> list[tuple[int, int, int, int, int]]:
        """Return the shapes of the VAE encoder's chunks: one frame, then four each; TI2V 5B encodes only the image."""
        size = request.height, request.width
        alone = request.strength is None and self.config.expand_timesteps
        later = 0 if alone else self.spec.latent_frames(request.frames) - 1
        return [(1, 3, 1, *size), *[(1, 3, self.spec.frame_stride, *size)] * later]

    # ---- The encoder stage.

    def tokenize(self, prompt: str) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return token ids and mask, both int32 [1, 512], and the cut if the prompt is too long."""
        ids, mask, cuts = tokenize(self.tokenizers["text_encoder"], prompt_clean(prompt), TEXT_TOKENS)
        return {"text_encoder": (ids, mask)}, cuts

    def encode_text(self, component: str, loaded: Sequence[Loaded], *tokens: jax.Array) -> jax.Array:
        """Encode ids and mask [B, L] as embeddings [B, L, C], zero where the mask is."""

        def method(module: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return module(ids, mask).last_hidden_state

        return call(loaded[0].module, loaded[0].params, method, *tokens) * tokens[1][:, :, None]

    def clip_pixels(self, request: ResolvedRequest) -> np.ndarray:
        """Return the image or images as CLIP expects them, float32 [1 or 2, 3, 224, 224] (sizes from the checkpoint).

        CLIP sees the video's first frame, which is the middle of an image whose shape differs from the video's.
        """
        size, slack = (request.height, request.width), self.spec.shape_slack
        images = [
            image if has_shape(image, *size, slack) else fit_image(image, *size, slack=slack)
            for image in (request.image, request.last_image)
            if isinstance(image, Image.Image)
        ]
        assert self.image_processor is not None
        return self.image_processor(images)

    @functools.cached_property
    def image_processor(self) -> ImageProcessor | None:
        if self.config.image_encoder is None:
            return None
        assert self.checkpoint is not None
        folder = self.checkpoint.path("image_processor")
        return ImageProcessor(transformers.CLIPImageProcessor, folder, self.image_pixels_shape[1:])

    def encode_image(self, module: torch.nn.Module, params: Params, pixels: jax.Array) -> jax.Array:
        """Encode pixels [n, 3, 224, 224] as features [n, L, C] of CLIP's last layer but one, the last one kept."""

        def method(module: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
            vision = getattr(module, "vision_model", module)
            hidden = vision.pre_layrnorm(vision.embeddings(pixels))
            for layer in vision.encoder.layers:
                hidden = layer(hidden, attention_mask=None)
            return hidden

        return call(module, params, method, pixels)

    def video_condition(self, request: ResolvedRequest) -> list[np.ndarray]:
        """Return the chunks of pixels that the VAE encodes for an image: float32 [1, 3, 1 or 4, H, W] in [-1, 1].

        The chunks hold the image, then grey (zero) frames up to the request's length, the last of which may be replaced
        by the last image; TI2V 5B takes only the image. For a video, the chunks hold its frames.
        """
        if request.video is not None:
            pictures = read_frames(request.video, request.frames, step=self.spec.frame_step)
            frames = [self.prepare_frame(request, picture) for picture in pictures]
            later = range(1, request.frames, self.spec.frame_stride)
            return [frames[0], *(np.concatenate(frames[i : i + self.spec.frame_stride], axis=2) for i in later)]
        first = self.prepare_frame(request, request.image)
        if self.config.expand_timesteps:
            return [first]
        blank = np.zeros((1, 3, self.spec.frame_stride, *first.shape[3:]), np.float32)
        chunks = [first, *[blank] * ((request.frames - 1) // self.spec.frame_stride)]
        if request.last_image is not None:
            chunks[-1] = np.concatenate([blank[:, :, 1:], self.prepare_frame(request, request.last_image)], axis=2)
        return chunks

    def prepare_frame(self, request: ResolvedRequest, image: object) -> np.ndarray:
        """Return an image as the VAE expects it, at the request's size, float32 [1, 3, 1, H, W] in [-1, 1]."""
        assert isinstance(image, Image.Image)
        processor = VideoProcessor(vae_scale_factor=self.spec.spatial_stride)
        image = fit_image(image, request.height, request.width, slack=self.spec.shape_slack)
        pixels = processor.preprocess(image, height=request.height, width=request.width)
        frame: np.ndarray = pixels[:, :, None].numpy().astype(np.float32)
        return frame

    def image_latents(self, moments: np.ndarray, request: ResolvedRequest) -> np.ndarray:
        """Turn the VAE encoder's output [1, 2C, T, H, W] into the image condition of `Conditioning`, float32."""
        mean, std = self._latent_statistics()
        latents = (moments[:, : self.spec.latent_channels].astype(np.float32) - mean) * (1 / std)
        if self.config.expand_timesteps or request.video is not None:
            return latents
        # There is a mask channel for each pixel frame of a latent frame: ones for the request's image, then zeros.
        mask = np.zeros((1, self.spec.frame_stride, *latents.shape[2:]), np.float32)
        mask[:, :, 0] = 1
        if request.last_image is not None:
            mask[:, -1, -1] = 1
        return np.concatenate([mask, latents], axis=1)

    def vae_encoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Return the functions that encode pixels [1, 3, 1 or 4, H, W] as moments [1, 2C, 1, H, W], chunk by chunk."""
        size = self.config.vae.get("patch_size") or 1
        return CausalChunks(
            module,
            mesh,
            vae.encoder,
            before=lambda pixels: patchify(pixels, size),
            after=lambda moments: moments,
            scale=self.spec.spatial_stride // size,
            later_frames=self.spec.frame_stride,
        )

    # ---- Experts.

    def text_keys(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        text: Mapping[str, jax.Array],
        image: jax.Array | None,
    ) -> TextKeys:
        """Return the cross-attention keys and values of every layer, once per request and expert, not in every step.

        Args:
            text: "text" [B, L, C]: embeddings of the prompt only, or of the prompt and the negative prompt.
            image: [1 or 2, L, C], CLIP features.
        """
        return text_keys(module, params, mesh, text["text"], image)

    def key_shapes(self, mesh: Mesh, keys: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        branches = keys["key"].shape[1]
        return {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=key_sharding(mesh, name, branches))
            for name, value in keys.items()
        }

    def velocity(self, module: torch.nn.Module, params: Params, mesh: Mesh, inputs: StepInputs) -> dict[str, jax.Array]:
        """Return the guided velocity, float32 [1, C, T, H, W]."""
        return self.cached_velocity(module, params, mesh, inputs, None)[0]

    def residual_shape(self, mesh: Mesh, branches: int, latent_shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the shape and sharding of the residual that `cached_velocity` returns, [B, L, C]."""
        tokens = self.spec.tokens(latent_shape)
        return transformer.residual_shape(mesh, self.config.transformer, branches, tokens, dtype)

    def cached_velocity(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        inputs: StepInputs,
        reuse: tuple[jax.Array, jax.Array | None] | None,
    ) -> tuple[dict[str, jax.Array], jax.Array | None]:
        """Return the guided velocity, as `velocity` does, and the residual to reuse (`transformer.Reuse`)."""
        latents, image = inputs.latents, inputs.image_latents
        times, first_tokens, x = inputs.timestep[None], 0, latents
        if image is not None and self.config.expand_timesteps:
            # The request's image has no noise: the tokens of the first latent frame have timestep 0.
            x = latents.at[:, :, :1].set(image)
            times = jnp.stack([jnp.zeros_like(inputs.timestep), inputs.timestep])
            first_tokens = self.spec.tokens((*latents.shape[:2], 1, *latents.shape[3:]))
        elif image is not None:
            x = jnp.concatenate([latents, image], axis=1)
        tokens, residual = transformer.velocity(
            module,
            params,
            mesh,
            x.astype(inputs.keys["key"].dtype),
            times,
            first_tokens,
            inputs.keys,
            None if reuse is None else transformer.Reuse(*reuse),
            attention_density=self.config.attention_density,
        )
        guided = apply_guidance(tokens, inputs.guidance)
        velocity = unpatchify_tokens(guided, latents.shape, self.spec.patch, self.spec.latent_channels)
        return {VIDEO: velocity}, residual

    def finish(self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest) -> np.ndarray:
        """Return the latents to decode: TI2V 5B puts the request's first frame back in place."""
        if image_latents is None or not self.config.expand_timesteps:
            return latents
        return np.concatenate([image_latents, latents[:, :, 1:]], axis=2)

    # ---- The decoder stage.

    def vae_latents(self, latents: np.ndarray) -> np.ndarray:
        """Undo the normalisation with the VAE's own statistics; float32 [1, C, T, H, W]."""
        mean, std = self._latent_statistics()
        return latents * std + mean

    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Return the functions that decode latents [1, C, 1, H, W] to pixels [1, 3, 1 or 4, H, W] around [-1, 1]."""
        size = self.config.vae.get("patch_size") or 1
        return CausalChunks(
            module,
            mesh,
            vae.decoder,
            before=lambda latents: latents,
            after=lambda pixels: unpatchify(pixels, size),
            scale=1,
            later_frames=1,
            planes=lambda planes: planes,
        )

    @functools.cached_property
    def flops(self) -> WanFlops:
        return WanFlops(self.config)

    def _latent_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of the latents from the VAE's configuration, [1, C, 1, 1, 1]."""
        return tuple(  # type: ignore[return-value]
            np.asarray(self.config.vae[key], np.float32).reshape(1, -1, 1, 1, 1)
            for key in ("latents_mean", "latents_std")
        )
