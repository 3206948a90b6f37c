"""Counts the operations of a Helios model's stages on diffusers' own modules."""

from typing import Any

import torch

from wan_tpu.families.helios import components
from wan_tpu.families.helios.conditioning import SOURCE_CHUNKS
from wan_tpu.families.helios.published import CHUNK_FRAMES, HISTORY, TEXT_TOKENS, HeliosConfig
from wan_tpu.families.shared.flop_count import Flops, count, count_t5
from wan_tpu.families.shared.t5 import text_encoder
from wan_tpu.families.wan.flops import count_decoding, count_encoding
from wan_tpu.request import ResolvedRequest


class HeliosFlops(Flops):
    def __init__(self, config: HeliosConfig) -> None:
        self._config = config

    def encoder(self, request: ResolvedRequest, *, prompts: int) -> int:
        """Count the encoding of prompts, and of an image or of the part of a video that is encoded."""
        build = text_encoder(self._config.text_encoder_class, self._config.text_encoder).build
        total = prompts * count_t5(build, TEXT_TOKENS)
        if request.image is None and request.video is None:
            return total
        frames = 1 + (CHUNK_FRAMES - 1) * self._config.vae["scale_factor_temporal"]
        encoding = count_encoding(self._config.vae, frames, request.height, request.width)
        return total + (1 if request.video is None else SOURCE_CHUNKS) * encoding

    def step(
        self,
        latent_shape: tuple[int, ...],
        *,
        branches: int,
        images: int = 0,
        finished_shape: tuple[int, ...] | None = None,
    ) -> int:
        """Count a denoising step with a whole history.

        Args:
            latent_shape: [1, C, T, H, W] of the latents.
            images: Has no effect: an image takes the place of the history.
            finished_shape: [1, C, T, H, W] of a finished chunk, whose size the history has; that of the latents if
                None.
        """
        history_size = (finished_shape or latent_shape)[3:]
        config = self._config.transformer
        names = "long", "mid", "short"
        sizes = *HISTORY[:2], 1 + HISTORY[2]

        def empty(frames: int, size: tuple[int, ...]) -> torch.Tensor:
            return torch.empty(1, config["in_channels"], frames, *size, device="meta")

        history = {
            f"latents_history_{name}": empty(frames, history_size) for name, frames in zip(names, sizes, strict=True)
        }
        indices = {
            f"indices_latents_history_{name}": torch.empty(1, size, device="meta")
            for name, size in zip(names, sizes, strict=True)
        }
        text = torch.empty(1, TEXT_TOKENS, config["text_dim"], device="meta")
        chunk = torch.empty(1, latent_shape[2], device="meta")
        time = torch.empty(1, device="meta")

        def predict(module: Any) -> None:
            del module.rope
            module.rope = self._angles  # diffusers' can't run on the meta device.
            module(empty(latent_shape[2], latent_shape[3:]), time, text, chunk, **indices, **history)

        return branches * count(components.transformer(self._config).build, predict)

    def _angles(self, frame_indices: torch.Tensor, height: int, width: int, device: torch.device) -> torch.Tensor:
        values = 2 * self._config.transformer["attention_head_dim"]
        return torch.empty(1, values, frame_indices.shape[1], height, width, device="meta")

    def decoder(self, latent_shape: tuple[int, ...]) -> int:
        chunk = (*latent_shape[:2], CHUNK_FRAMES, *latent_shape[3:])
        return latent_shape[2] // CHUNK_FRAMES * count_decoding(self._config.vae, chunk)
