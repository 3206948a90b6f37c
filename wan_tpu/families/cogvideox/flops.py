"""Counts the operations of a CogVideoX model's stages on diffusers' own modules."""

import torch
from diffusers import AutoencoderKLCogVideoX

from wan_tpu.families.cogvideox import components
from wan_tpu.families.cogvideox.published import TEXT_TOKENS, CogVideoXConfig
from wan_tpu.families.shared.flop_count import Flops, count, count_t5
from wan_tpu.families.shared.t5 import text_encoder
from wan_tpu.request import ResolvedRequest


class CogVideoXFlops(Flops):
    def __init__(self, config: CogVideoXConfig) -> None:
        self._config = config

    def encoder(self, request: ResolvedRequest, *, prompts: int) -> int:
        build = text_encoder(self._config.text_encoder_class, self._config.text_encoder).build
        total = prompts * count_t5(build, TEXT_TOKENS)
        if request.image is None:
            return total
        pixels = torch.empty(1, 3, 1, request.height, request.width, device="meta")
        return total + count(self._vae, lambda module: module.encode(pixels))

    def step(self, latent_shape: tuple[int, ...], *, branches: int, images: int = 0) -> int:
        config = self._config.transformer
        _, _, frames, height, width = latent_shape
        latents = torch.empty(1, frames, config["in_channels"], height, width, device="meta")
        text = torch.empty(1, TEXT_TOKENS, config["text_embed_dim"], device="meta")
        time = torch.empty(1, device="meta")
        ofs = None if config.get("ofs_embed_dim") is None else time
        build = components.transformer(self._config).build
        return branches * count(build, lambda module: module(latents, text, time, ofs=ofs))

    def decoder(self, latent_shape: tuple[int, ...]) -> int:
        latents = torch.empty(latent_shape, device="meta")
        return count(self._vae, lambda module: module.decode(latents))

    def _vae(self) -> torch.nn.Module:
        return AutoencoderKLCogVideoX.from_config(self._config.vae)
