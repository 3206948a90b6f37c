"""Counts the operations of a Wan model's stages on diffusers' own modules."""

import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKLWan

from wan_tpu.families.shared.flop_count import Flops, count, count_t5
from wan_tpu.families.shared.t5 import text_encoder
from wan_tpu.families.wan import components
from wan_tpu.families.wan.published import TEXT_TOKENS, WanConfig
from wan_tpu.request import ResolvedRequest


class WanFlops(Flops):
    def __init__(self, config: WanConfig) -> None:
        self._config = config

    def encoder(self, request: ResolvedRequest, *, prompts: int) -> int:
        """Count the encoding of prompts and the image; CLIP, at most 0.1 % of this, is left out."""
        build = text_encoder(self._config.text_encoder_class, self._config.text_encoder).build
        total = prompts * count_t5(build, TEXT_TOKENS)
        if request.image is None:
            return total
        frames = 1 if self._config.expand_timesteps else request.frames
        return total + count_encoding(self._config.vae, frames, request.height, request.width)

    def step(self, latent_shape: tuple[int, ...], *, branches: int, images: int = 0) -> int:
        config = self._config.transformer
        latents = torch.empty(1, config["in_channels"], *latent_shape[2:], device="meta")
        text = torch.empty(1, TEXT_TOKENS, config["text_dim"], device="meta")
        time = torch.empty(1, device="meta")
        image = None
        if config.get("image_dim") is not None and self._config.image_encoder is not None:
            clip = self._config.image_encoder
            patches = (clip["image_size"] // clip["patch_size"]) ** 2 + 1
            images = 1 if config.get("pos_embed_seq_len") is None else 2
            image = torch.empty(images, patches, config["image_dim"], device="meta")
        build = components.transformer(self._config, "transformer").build
        operations = count(build, lambda module: module(latents, time, text, image))
        if self._config.attention_density is not None:  # diffusers' module attends to all keys.
            tokens = math.prod(n // p for n, p in zip(latent_shape[2:], config["patch_size"], strict=True))
            channels = config["num_attention_heads"] * config["attention_head_dim"]
            skipped = 1 - self._config.attention_density
            operations -= int(skipped * 4 * tokens**2 * channels * config["num_layers"])
        return branches * operations

    def decoder(self, latent_shape: tuple[int, ...]) -> int:
        return count_decoding(self._config.vae, latent_shape)


def count_encoding(vae: dict[str, Any], frames: int, height: int, width: int) -> int:
    """Count the encoding of pixels by a VAE of this configuration."""

    def encode(frames: int) -> int:
        pixels = torch.empty(1, 3, frames, height, width, device="meta")
        return count(lambda: AutoencoderKLWan.from_config(vae), lambda module: module.encode(pixels))

    return _extrapolate(encode, frames, vae["scale_factor_temporal"])


def count_decoding(vae: dict[str, Any], latent_shape: tuple[int, ...]) -> int:
    """Count the decoding of latents [1, C, T, H, W] by a VAE of this configuration."""

    def decode(frames: int) -> int:
        latents = torch.empty(*latent_shape[:2], frames, *latent_shape[3:], device="meta")
        return count(lambda: AutoencoderKLWan.from_config(vae), lambda module: module.decode(latents))

    return _extrapolate(decode, latent_shape[2], 1)


def _extrapolate(work: Callable[[int], int], frames: int, stride: int) -> int:
    """Count `frames` frames from the first three chunks: one frame, `stride` frames, and one like all that follow."""
    sample_frames = min(frames, 1 + 2 * stride)
    if frames == sample_frames:
        return work(frames)
    three, two = work(sample_frames), work(1 + stride)
    return three + (frames - sample_frames) // stride * (three - two)
