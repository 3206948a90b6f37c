"""Run diffusers' VAE over all frames of a clip at once, equal to its own way in chunks and several times faster.

AutoencoderKLWan takes a clip in chunks of four frames and carries what its causal convolutions have seen from one to
the next. Over a whole clip they pad with zeros, which is what its cache begins with; only the layers that change the
frame rate treat the first frame on its own. For training, where memory for a short clip is no question.

Shapes: B clips, T H W pixels or, of latents, frames, height and width.
"""

import types
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution


class WholeClips:
    """A VAE's encoder and decoder over whole clips, the modules its own; `vae` itself stays as it was."""

    def __init__(self, vae: diffusers.AutoencoderKLWan):
        self._vae = vae
        for module in vae.modules():
            if isinstance(module, WanResample):
                module.forward = types.MethodType(_resample, module)

    def encode(self, pixels: torch.Tensor) -> DiagonalGaussianDistribution:
        """Return the posterior of pixels [B, 3, T, H, W] in [-1, 1]."""
        vae = self._vae
        return DiagonalGaussianDistribution(vae.quant_conv(vae.encoder(patchify(pixels, vae.config.patch_size))))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Return pixels [B, 3, T, H, W], not clamped, of latents [B, Z, T, H, W]."""
        vae = self._vae
        return unpatchify(vae.decoder(vae.post_quant_conv(latents)), vae.config.patch_size)


def _resample(
    self: WanResample, x: torch.Tensor, feat_cache: list[Any] | None = None, feat_idx: Any = None
) -> torch.Tensor:
    if feat_cache is not None:
        return WanResample.forward(self, x, feat_cache, feat_idx)
    if self.mode == "upsample3d" and x.shape[2] > 1:
        later = self.time_conv(x[:, :, 1:])
        b, c, t, h, w = later.shape
        later = later.view(b, 2, c // 2, t, h, w).permute(0, 2, 3, 1, 4, 5).reshape(b, c // 2, 2 * t, h, w)
        x = torch.cat([x[:, :, :1], later], dim=2)
    b, c, t, h, w = x.shape
    x = self.resample(x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w))
    x = x.view(b, t, *x.shape[1:]).permute(0, 2, 1, 3, 4)
    if self.mode == "downsample3d" and x.shape[2] > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)
    return x
