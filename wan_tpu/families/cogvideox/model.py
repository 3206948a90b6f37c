"""The CogVideoX family: CogVideoX 2B and 5B, and CogVideoX 1.5, for text to video and image to video.

Everything specific to these models is here and in the files beside it. The reference for every formula is diffusers
0.42, pipelines/cogvideo.

Shapes: B batch (guidance branches), T latent frames, H W latent height and width, L tokens, C channels.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.video_processor import VideoProcessor
from jax.sharding import Mesh
from PIL import Image

from wan_tpu.families.cogvideox import components, transformer, vae
from wan_tpu.families.cogvideox.flops import CogVideoXFlops
from wan_tpu.families.cogvideox.published import TEXT_TOKENS, CogVideoXConfig
from wan_tpu.families.cogvideox.spec import LATER_FRAMES, CogVideoXSpec
from wan_tpu.families.model import Model, StepInputs, apply_guidance
from wan_tpu.families.shared.causal_vae import CausalChunks, RepeatedStart
from wan_tpu.families.shared.family_spec import DENOISE
from wan_tpu.families.shared.t5 import text_encoder
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import tokenize
from wan_tpu.families.shared.tokens import unpatchify
from wan_tpu.media.image import fit_image
from wan_tpu.plan import VIDEO
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.bridge import Params, call
from wan_tpu.runtime.components import Component, Loaded


class CogVideoXModel(Model):
    spec: CogVideoXSpec
    config: CogVideoXConfig

    @functools.cached_property
    def components(self) -> dict[str, Component]:
        return {
            "text_encoder": text_encoder(self.config.text_encoder_class, self.config.text_encoder),
            DENOISE: components.transformer(self.config),
            "decoder": components.vae_half(self.config, "encoder"),
            "vae_encoder": components.vae_half(self.config, "decoder"),  # Without images, only for previews.
        }

    @functools.cached_property
    def flops(self) -> CogVideoXFlops:
        return CogVideoXFlops(self.config)

    # ---- Shapes.

    @property
    def text_shape(self) -> tuple[int, int]:
        return TEXT_TOKENS, self.config.transformer["text_embed_dim"]

    @property
    def token_shapes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Ids only, because T5 reads all of them."""
        return {"text_encoder": ((1, TEXT_TOKENS),)}

    def image_latents_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of an image's latents; the frames after it are zeros."""
        return (*latent_shape[:2], 1, *latent_shape[3:]) if "i2v" in self.spec.tasks else None

    # ---- The encoder stage.

    def tokenize(self, prompt: str) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return token ids, int32 [1, 226], and the cut if the prompt is too long."""
        ids, _, cuts = tokenize(self.tokenizers["text_encoder"], prompt, TEXT_TOKENS)
        return {"text_encoder": (ids,)}, cuts

    def encode_text(self, component: str, loaded: Sequence[Loaded], *tokens: jax.Array) -> jax.Array:
        """Encode ids [B, L] as embeddings [B, L, C]; T5 reads the padding just as it reads words."""

        def method(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
            return module(ids).last_hidden_state

        return call(loaded[0].module, loaded[0].params, method, *tokens)

    def video_condition(self, request: ResolvedRequest) -> list[np.ndarray]:
        """Return the pixels that the VAE encodes: the image, float32 [1, 3, 1, H, W] in [-1, 1]."""
        assert isinstance(request.image, Image.Image)
        processor = VideoProcessor(vae_scale_factor=8)
        image = fit_image(request.image, request.height, request.width, slack=self.spec.shape_slack)
        pixels = processor.preprocess(image, height=request.height, width=request.width)
        return [pixels[:, :, None].numpy().astype(np.float32)]

    def image_latents(self, moments: np.ndarray, request: ResolvedRequest) -> np.ndarray:
        """Draw the image's latents from the VAE encoder's output [1, 2C, 1, H, W], float32 [1, C, 1, H, W]."""
        mean, log_variance = np.split(moments.astype(np.float32), 2, axis=1)
        sample, _ = self._draw_image(request)
        latents = mean + np.exp(0.5 * np.clip(log_variance, -30, 20)) * sample
        scale = self.config.vae["scaling_factor"]
        return latents / scale if self.config.vae.get("invert_scale_latents") else latents * scale

    def vae_encoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Return the functions that encode pixels [1, 3, T, H, W] as moments [1, 2C, T, H, W], chunk by chunk."""
        return _make_chunks(module, mesh, vae.encoder, scale=8, later_frames=self.spec.frame_step)

    # ---- The transformer.

    def _first_generator(self, request: ResolvedRequest) -> torch.Generator:
        return self._draw_image(request)[1]

    def _draw_noise(self, request: ResolvedRequest, generator: torch.Generator) -> np.ndarray:
        """Draw noise, frames before channels."""
        batch, channels, frames, height, width = self.spec.latent_shape(request)
        noise = torch.randn((batch, frames, channels, height, width), generator=generator)
        return noise.numpy().transpose(0, 2, 1, 3, 4)

    def text_keys(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        text: Mapping[str, jax.Array],
        image: jax.Array | None,
    ) -> dict[str, jax.Array]:
        """Turn the text's embeddings, "text" [B, 226, I], into tokens [B, 226, C]."""
        return transformer.embed_text(module, params, mesh, text["text"])

    def key_shapes(self, mesh: Mesh, keys: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=transformer.text_sharding(mesh, value.shape[0])
            )
            for name, value in keys.items()
        }

    def velocity(self, module: torch.nn.Module, params: Params, mesh: Mesh, inputs: StepInputs) -> dict[str, jax.Array]:
        """Return the guided prediction of v, float32 [1, C, T, H, W]."""
        x, image, text = inputs.latents, inputs.image_latents, inputs.keys["text"]
        if image is not None:
            behind = x.shape[2] - image.shape[2]
            x = jnp.concatenate([x, jnp.pad(image, ((0, 0), (0, 0), (0, behind), (0, 0), (0, 0)))], axis=1)
        tokens = transformer.predict(module, params, mesh, x.astype(text.dtype), inputs.timestep[None], text)
        guided = apply_guidance(tokens, inputs.guidance)
        return {VIDEO: unpatchify(guided, inputs.latents.shape, self.spec.patch)}

    def finish(self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest) -> np.ndarray:
        """Return the latents to decode, without the frames that fill the first token."""
        return latents[:, :, self.spec.padding(request) :]

    # ---- The decoder stage.

    def vae_latents(self, latents: np.ndarray) -> np.ndarray:
        """Undo the scaling; float32 [1, C, T, H, W]."""
        return 1 / self.config.vae["scaling_factor"] * latents

    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Return the functions that decode latents to pixels [1, 3, 4T or 4T-3, H, W] around [-1, 1]."""
        return _make_chunks(module, mesh, vae.decoder, scale=1, later_frames=LATER_FRAMES)

    def _draw_image(self, request: ResolvedRequest) -> tuple[np.ndarray, torch.Generator]:
        """Return the noise of an image's latents, which is drawn before all other noise, and the generator after it."""
        generator, shape = torch.Generator("cpu").manual_seed(request.seed), self.spec.latent_shape(request)
        if "i2v" not in self.spec.tasks:
            return np.zeros((*shape[:2], 1, *shape[3:]), np.float32), generator
        return torch.randn((*shape[:2], 1, *shape[3:]), generator=generator).numpy(), generator


def _make_chunks(module: torch.nn.Module, mesh: Mesh, run: Any, *, scale: int, later_frames: int) -> CausalChunks:
    return CausalChunks(module, mesh, run, lambda x: x, lambda x: x, scale, later_frames, history=RepeatedStart)
