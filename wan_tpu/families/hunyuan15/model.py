"""The HunyuanVideo-1.5 family: text to video and image to video, distilled or not.

The reference for every formula is diffusers 0.42, pipelines/hunyuan_video1_5.

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
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from jax.sharding import Mesh
from PIL import Image

from wan_tpu.families.hunyuan15 import components, text, transformer, vae
from wan_tpu.families.hunyuan15.context import Encodings
from wan_tpu.families.hunyuan15.flops import HunyuanFlops
from wan_tpu.families.hunyuan15.published import GLYPH_TOKENS, TEMPLATE_TOKENS, TEXT_TOKENS, HunyuanConfig
from wan_tpu.families.hunyuan15.sizes import OVERLAP, STRIDE
from wan_tpu.families.hunyuan15.spec import HunyuanSpec
from wan_tpu.families.model import Model, StepInputs, apply_guidance
from wan_tpu.families.shared.causal_vae import CausalChunks
from wan_tpu.families.shared.family_spec import DENOISE
from wan_tpu.families.shared.flop_count import Flops
from wan_tpu.families.shared.image_processing import ImageProcessor
from wan_tpu.families.shared.tiles import TiledChunks
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.plan import VIDEO
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.bridge import Params, call
from wan_tpu.runtime.components import Component, Loaded


class HunyuanModel(Model):
    spec: HunyuanSpec
    config: HunyuanConfig

    @functools.cached_property
    def components(self) -> dict[str, Component]:
        config = self.config
        parts = {
            "text_encoder": components.text_encoder(config),
            "glyph_encoder": components.glyph_encoder(config),
            DENOISE: components.transformer(config),
            "decoder": components.vae_half(config, "encoder"),
            "vae_encoder": components.vae_half(config, "decoder"),  # Without images, only for previews.
        }
        if "i2v" in self.spec.tasks:
            parts["image_encoder"] = components.image_encoder(config)
        return parts

    @property
    def flops(self) -> Flops:
        return HunyuanFlops(self.config, self.spec.context_tokens)

    # ---- Shapes.

    @property
    def text_shape(self) -> tuple[int, int]:
        return TEXT_TOKENS, self.config.transformer["text_embed_dim"]

    @property
    def token_shapes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Ids and masks of the prompt in its chat, and of its quoted text."""
        lengths = {"text_encoder": TEMPLATE_TOKENS + TEXT_TOKENS, "glyph_encoder": GLYPH_TOKENS}
        return {name: ((1, length),) * 2 for name, length in lengths.items()}

    @property
    def prompt_shapes(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Embeddings of both encoders, and the number of their real tokens."""
        glyphs = GLYPH_TOKENS, self.config.transformer["text_embed_2_dim"]
        return {
            "text": (self.text_shape, False),
            "text_tokens": ((), True),
            "glyphs": (glyphs, False),
            "glyph_tokens": ((), True),
        }

    @property
    def image_pixels_shape(self) -> tuple[int, int, int, int]:
        """(images, 3, height, width) of SigLIP's input."""
        size = (self.config.image_encoder or {})["image_size"]
        return 1, 3, size, size

    @property
    def image_features_shape(self) -> tuple[int, int, int]:
        """(images, L, C) of SigLIP's features: a token for each patch."""
        siglip = self.config.image_encoder or {}
        return 1, (siglip["image_size"] // siglip["patch_size"]) ** 2, siglip["hidden_size"]

    def image_latents_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of an image's latents; the frames after it are zeros."""
        return (*latent_shape[:2], 1, *latent_shape[3:]) if "i2v" in self.spec.tasks else None

    # ---- The encoder stage.

    @functools.cached_property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        """Qwen's and ByT5's tokenizers."""
        return {
            "text_encoder": self.open_tokenizer("tokenizer", self.config.text_encoder),
            "glyph_encoder": self.open_tokenizer("tokenizer_2", self.config.glyph_encoder),
        }

    def tokenize(self, prompt: str) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return ids and mask of the prompt and of its quoted text, if any, and the cuts of those that are too long."""
        ids, mask, cuts = text.tokenize_prompt(self.tokenizers["text_encoder"], prompt)
        tokens: dict[str, tuple[np.ndarray, ...]] = {"text_encoder": (ids, mask)}
        glyph_tokens = text.tokenize_glyphs(self.tokenizers["glyph_encoder"], prompt)
        if glyph_tokens is not None:
            tokens["glyph_encoder"] = glyph_tokens[:2]
            cuts = cuts + glyph_tokens[2]
        return tokens, cuts

    def encode_text(self, component: str, loaded: Sequence[Loaded], *tokens: jax.Array) -> jax.Array:
        """Encode ids and mask [B, L] as embeddings [B, L, C], for the prompt without the instructions' start."""
        encode = {"text_encoder": text.encode_prompt, "glyph_encoder": text.encode_glyphs}[component]
        return encode(loaded[0].module, loaded[0].params, *tokens)

    def prompt_arrays(
        self, tokens: Mapping[str, tuple[np.ndarray, ...]], encoded: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return both encoders' embeddings, and the number of their real tokens; zeros if nothing is quoted."""
        embeddings = encoded["text_encoder"]
        shape, _ = self.prompt_shapes["glyphs"]
        glyphs, count = np.zeros((1, *shape), embeddings.dtype), np.zeros(1, np.int32)
        if "glyph_encoder" in encoded:
            glyphs, count = encoded["glyph_encoder"], tokens["glyph_encoder"][1].sum(1, dtype=np.int32)
        text_count = tokens["text_encoder"][1][:, TEMPLATE_TOKENS:].sum(1, dtype=np.int32)
        return {"text": embeddings, "text_tokens": text_count, "glyphs": glyphs, "glyph_tokens": count}

    def clip_pixels(self, request: ResolvedRequest) -> np.ndarray:
        """Return the image, cropped to the video's shape, as SigLIP takes it, float32 [1, 3, 384, 384]."""
        assert self.image_processor is not None
        return self.image_processor([self.resize_image(request)])

    @functools.cached_property
    def image_processor(self) -> ImageProcessor | None:
        """SigLIP's image processor."""
        if "i2v" not in self.spec.tasks:
            return None
        assert self.checkpoint is not None
        folder = self.checkpoint.path("feature_extractor")
        return ImageProcessor(transformers.SiglipImageProcessor, folder, self.image_pixels_shape[1:])

    def encode_image(self, module: torch.nn.Module, params: Params, pixels: jax.Array) -> jax.Array:
        """Encode pixels [1, 3, 384, 384] as features [1, L, C]."""

        def method(module: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
            return module(pixels).last_hidden_state

        return call(module, params, method, pixels)

    @functools.cached_property
    def _processor(self) -> HunyuanVideo15ImageProcessor:
        return HunyuanVideo15ImageProcessor(vae_scale_factor=STRIDE, do_resize=False)

    def resize_image(self, request: ResolvedRequest) -> Image.Image:
        """Return the request's image at the video's size, cropped equally on both sides."""
        assert isinstance(request.image, Image.Image)
        return self._processor.resize(request.image, height=request.height, width=request.width, resize_mode="crop")

    def video_condition(self, request: ResolvedRequest) -> list[np.ndarray]:
        """Return the pixels that the VAE encodes: the image, float32 [1, 3, 1, H, W] in [-1, 1]."""
        pixels = self._processor.preprocess(self.resize_image(request), height=request.height, width=request.width)
        return [pixels[:, :, None].numpy().astype(np.float32)]

    def image_latents(self, moments: np.ndarray, request: ResolvedRequest) -> np.ndarray:
        """Return the most likely latents of the image, from the VAE encoder's output [1, 2C, 1, H, W]."""
        mean, _ = np.split(moments.astype(np.float32), 2, axis=1)
        return mean * np.float32(self.config.vae["scaling_factor"])

    def vae_encoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Return the functions that encode pixels [1, 3, T, H, W] as moments [1, 2C, T, H, W], chunk by chunk."""
        return self._make_chunks(module, mesh, vae.encoder, scale=STRIDE, later_frames=self.spec.frame_stride)

    # ---- The transformer.

    def text_keys(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        text: Mapping[str, jax.Array],
        image: jax.Array | None,
    ) -> dict[str, jax.Array]:
        """Return the prompt's arrays unchanged; all that the transformer computes from them depends on the step."""
        return {**text} if image is None else {**text, "image": image}

    def velocity(self, module: torch.nn.Module, params: Params, mesh: Mesh, inputs: StepInputs) -> dict[str, jax.Array]:
        """Return the guided velocity, float32 [1, C, T, H, W]."""
        latents, keys = inputs.latents, inputs.keys
        condition, mask = jnp.zeros_like(latents), jnp.zeros_like(latents[:, :1])
        if inputs.image_latents is not None:
            condition, mask = condition.at[:, :, :1].set(inputs.image_latents), mask.at[:, :, :1].set(1)
        x = jnp.concatenate([latents, condition, mask], axis=1).astype(keys["text"].dtype)
        times = jnp.atleast_1d(inputs.timestep)
        encodings = Encodings(**{name: keys.get(name) for name in Encodings._fields})  # type: ignore[arg-type]
        tokens = transformer.predict(module, params, mesh, x, times[:1], times[-1:], encodings)
        return {VIDEO: apply_guidance(tokens, inputs.guidance).T.reshape(latents.shape)}

    # ---- The decoder stage.

    def vae_latents(self, latents: np.ndarray) -> np.ndarray:
        """Undo the scaling; float32 [1, C, T, H, W]."""
        return latents / np.float32(self.config.vae["scaling_factor"])

    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Return the functions that decode latents [1, C, T, H, W] to pixels [1, 3, 4T or 1, H, W] around [-1, 1]."""
        return self._make_chunks(module, mesh, vae.decoder, scale=1, later_frames=1)

    def _make_chunks(
        self, module: torch.nn.Module, mesh: Mesh, run: Any, *, scale: int, later_frames: int
    ) -> CausalChunks:
        same = lambda x: x  # noqa: E731
        arguments = (module, mesh, run, same, same, scale, later_frames)
        if self.config.vae_tile is None:
            return CausalChunks(*arguments, history_of=vae.make_history)
        tile = self.config.vae_tile // STRIDE
        return TiledChunks(*arguments, history_of=vae.make_history, tile=tile, overlap=tile // OVERLAP)
