"""Counts the operations of an LTX-2 model's stages on diffusers' and transformers' own modules."""

import math
from typing import Any

import torch

from wan_tpu.families.ltx2 import audio, components, connectors, diffusion_decoder, text, vae
from wan_tpu.families.ltx2.spec import Ltx2Spec
from wan_tpu.families.shared.flop_count import count
from wan_tpu.request import ResolvedRequest


class Ltx2Flops:
    """Floating-point operations (a multiply-add is two) of each stage of one model."""

    def __init__(self, spec: Ltx2Spec) -> None:
        """Count a model."""
        self._spec, self._config = spec, spec.config

    def encoder(self, request: ResolvedRequest, *, prompts: int) -> int:
        """Count the encoding of prompts, and of the request's image, if it has one, at each of its sizes."""
        total = prompts * text.count_flops(self._config)
        sizes = [] if request.image is None else self._spec.image_sizes(request)
        return total + sum(vae.count_encoding(self._config, (1, 3, 1, *size)) for size in sizes)

    def step(self, latent_shape: tuple[int, ...], *, branches: int, images: int = 0) -> int:
        """Count a denoising step over latents [1, C, T, H, W]; the branches are all evaluations that guidance takes."""
        build = components.transformer(self._config).build
        return branches * count(build, lambda module: self._run(module, latent_shape))

    def decoder(self, latent_shape: tuple[int, ...]) -> int:
        """Count the decoding of latents [1, C, T, H, W], and of the sound."""
        count = self._audio_tokens(latent_shape)
        decoder = self._config.diffusion_decoder
        if decoder is None:
            pixels = vae.count_decoding(self._config, latent_shape)
        else:
            pixels = diffusion_decoder.count_flops(decoder, latent_shape)
        return pixels + audio.count_flops(self._config, count)

    def _audio_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return the sound's tokens of a video at the model's own rate of frames."""
        frames = (latent_shape[2] - 1) * self._spec.frame_stride + 1
        return self._spec.audio_tokens(frames, self._spec.defaults.fps)

    def _run(self, module: Any, latent_shape: tuple[int, ...]) -> None:
        config = self._config.transformer

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="meta")

        grid, sound = latent_shape[2:], self._audio_tokens(latent_shape)
        time = empty(1)
        module(
            hidden_states=empty(1, math.prod(grid), config["in_channels"]),
            audio_hidden_states=empty(1, sound, config["audio_in_channels"]),
            encoder_hidden_states=empty(1, connectors.TEXT_TOKENS, self._spec.text_width("video")),
            audio_encoder_hidden_states=empty(1, connectors.TEXT_TOKENS, self._spec.text_width("audio")),
            timestep=time,
            sigma=time,
            num_frames=grid[0],
            height=grid[1],
            width=grid[2],
            fps=self._spec.defaults.fps,
            audio_num_frames=sound,
            use_cross_timestep=config["cross_attn_mod"],
        )
