"""Counts the operations of a HunyuanVideo-1.5 model's stages on diffusers' and transformers' own modules."""

import math
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

from wan_tpu.families.hunyuan15 import components
from wan_tpu.families.hunyuan15.published import GLYPH_TOKENS, TEMPLATE_TOKENS, TEXT_TOKENS, HunyuanConfig
from wan_tpu.families.hunyuan15.sizes import STRIDE
from wan_tpu.families.shared import t5
from wan_tpu.families.shared.flop_count import Flops, count, count_t5, make_ids
from wan_tpu.request import ResolvedRequest


class HunyuanFlops(Flops):
    def __init__(self, config: HunyuanConfig, context_tokens: int) -> None:
        """Count a model whose transformer sees `context_tokens` tokens in addition to the video's, padding included."""
        self._config, self._context_tokens = config, context_tokens

    def encoder(self, request: ResolvedRequest, *, prompts: int) -> int:
        """Count the encoding of prompts, of the quoted text in the request's own prompt, and of the image."""
        config = self._config
        total = prompts * count(
            lambda: t5.from_transformers(transformers.Qwen2_5_VLTextModel, config.text_encoder),
            lambda module: _run_qwen(module, make_ids(TEMPLATE_TOKENS + TEXT_TOKENS)),
        )
        if extract_glyph_texts(request.prompt) is not None:
            build = components.glyph_encoder(config).build
            total += count_t5(build, GLYPH_TOKENS)
        if request.image is None or config.image_encoder is None:
            return total
        siglip = config.image_encoder | {"vision_use_head": False}
        picture = torch.empty(1, 3, siglip["image_size"], siglip["image_size"], device="meta")
        total += count(
            lambda: t5.from_transformers(transformers.SiglipVisionModel, siglip), lambda module: module(picture)
        )
        pixels = torch.empty(1, 3, 1, request.height, request.width, device="meta")
        return total + count(self._vae, lambda module: module.encode(pixels))

    def step(self, latent_shape: tuple[int, ...], *, branches: int, images: int = 0) -> int:
        return branches * count(
            components.transformer(self._config).build, lambda module: self._run(module, latent_shape)
        )

    def decoder(self, latent_shape: tuple[int, ...]) -> int:
        latents = torch.empty(latent_shape, device="meta")
        return count(self._vae, lambda module: module.decode(latents))

    def _run(self, module: Any, latent_shape: tuple[int, ...]) -> None:
        """Run the transformer's forward part by part; as a whole it would read values, which don't exist here."""
        config = self._config.transformer
        time = torch.empty(1, device="meta")
        text = torch.empty(1, TEXT_TOKENS, config["text_embed_dim"], device="meta")
        module.context_embedder(text, time, torch.ones(1, TEXT_TOKENS, dtype=torch.bool, device="meta"))
        module.context_embedder_2(torch.empty(1, GLYPH_TOKENS, config["text_embed_2_dim"], device="meta"))
        if images := self._context_tokens - TEXT_TOKENS - GLYPH_TOKENS:
            module.image_embedder(torch.empty(1, images, config["image_embed_dim"], device="meta"))
        embedding = module.time_embed(time, timestep_r=time if self._config.meanflow else None)
        latents = torch.empty(1, config["in_channels"], *latent_shape[2:], device="meta")
        video, rotations = module.x_embedder(latents), module.rope(latents)
        assert video.shape[1] == math.prod(latent_shape[2:])
        context = torch.empty(1, self._context_tokens, video.shape[2], device="meta")
        mask = torch.ones(1, self._context_tokens, dtype=torch.bool, device="meta")
        for block in module.transformer_blocks:
            video, context = block(video, context, embedding, mask, rotations)
        module.proj_out(module.norm_out(video, embedding))

    def _vae(self) -> torch.nn.Module:
        module, tile = AutoencoderKLHunyuanVideo15.from_config(self._config.vae), self._config.vae_tile
        if tile is not None:
            module.enable_tiling(tile, tile, tile // STRIDE, tile // STRIDE)
        for part in module.modules():
            if hasattr(part, "prepare_causal_attention_mask"):
                part.prepare_causal_attention_mask = _empty_mask
        return module


def _empty_mask(frames: int, pixels: int, dtype: torch.dtype, device: torch.device, batch_size: int) -> torch.Tensor:
    """Return a mask without values; diffusers fills it row by row, which takes seconds for a picture of full size."""
    return torch.empty(batch_size, frames * pixels, frames * pixels, dtype=dtype, device=device)


def _run_qwen(module: Any, ids: torch.Tensor) -> None:
    module(inputs_embeds=module.embed_tokens(ids), use_cache=False)
