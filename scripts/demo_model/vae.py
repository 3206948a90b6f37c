"""Train the VAE, measure its latents, and encode the clips that the experts learn from.

Shapes: B clips, T H W pixels or, of latents, frames, height and width; Z latent channels.
"""

import types
from collections.abc import Iterator
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, WanResidualBlock, patchify, unpatchify
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from . import sizes
from .scenes import WIDTHS, Scene, draw_scene, opposite, render
from .score import psnr, save_rows
from .training import Run, load_average, train


def new_vae() -> torch.nn.ModuleDict:
    """Return an untrained VAE, with convolutions in the memory layout that is fastest on CPUs."""
    vae = diffusers.AutoencoderKLWan.from_config(sizes.VAE)
    residual = []
    layouts = {5: torch.channels_last_3d, 4: torch.channels_last}
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            # Outputs have the variance of inputs. With torch's defaults, every layer would reduce it.
            torch.nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            torch.nn.init.zeros_(module.bias)
            module.weight.data = module.weight.data.contiguous(memory_format=layouts[module.weight.dim()])
        elif isinstance(module, WanResidualBlock):
            residual.append(module.conv2)
    with torch.no_grad():
        for convolution in residual:
            convolution.weight.mul_(0.1)
        vae.quant_conv.weight[sizes.Z :].mul_(0.1)
    # At first there is little noise: with a standard deviation of one, it would drown the encoder's signal.
    torch.nn.init.constant_(vae.quant_conv.bias[sizes.Z :], sizes.FIRST_LOGVAR)
    return torch.nn.ModuleDict({"vae": vae})


def train_vae(run: Run, schedule: sizes.Schedule = sizes.VAE_SCHEDULE) -> bool:
    """Train the VAE; return whether all steps are done."""
    torch.manual_seed(run.seed)
    modules = new_vae()
    vae = modules["vae"]
    whole = WholeClips(vae)

    def loss_of(step: int) -> dict[str, torch.Tensor]:
        pixels = _batch(run, step, schedule.batch)
        with torch.autocast(run.device.type, torch.bfloat16):
            posterior = whole.encode(pixels)
            rebuilt = whole.decode(posterior.sample())
        error = rebuilt.float() - pixels
        # The mean over all values; kl() of diffusers is for images, which have no time axis.
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        square = error.square().mean()
        return {"loss": error.abs().mean() + square + sizes.KL_WEIGHT * kl, "square": square, "kl": kl}

    def sheet(step: int) -> None:
        clips = [render(draw_scene(run.seed, i, held_out=True, width=64)) for i in range(6)]
        rebuilt = [reconstruct(vae, clip) for clip in clips]
        values = [psnr(clip / 255, again) for clip, again in zip(clips, rebuilt, strict=True)]
        print(f"reconstruction of held-out clips: {np.mean(values):.1f} dB")
        rows = [row for pair in zip(clips, rebuilt, strict=True) for row in pair]
        save_rows(run.folder / f"vae-{step:06d}.png", rows)

    return train("vae", run, schedule, modules, loss_of, sheet)


def load_vae(run: Run) -> diffusers.AutoencoderKLWan:
    """Return the trained VAE on the run's device."""
    modules = new_vae()
    load_average("vae", run, modules)
    return modules["vae"].requires_grad_(False)


@torch.no_grad()
def reconstruct(vae: diffusers.AutoencoderKLWan, clip: np.ndarray) -> np.ndarray:
    """Encode and decode a clip, uint8 [T, H, W, 3]; returns float32 in [0, 1]."""
    pixels = as_pixels([clip], vae.device)
    rebuilt = vae.decode(vae.encode(pixels).latent_dist.mode()).sample[0]
    return (rebuilt.permute(1, 2, 3, 0).cpu().numpy() / 2 + 0.5).clip(0, 1)


def as_pixels(clips: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """Return clips, uint8 [T, H, W, 3], as the VAE's input: float32 [B, 3, T, H, W] in [-1, 1]."""
    stacked = torch.from_numpy(np.stack(clips)).to(device)
    return stacked.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def _batch(run: Run, step: int, size: int) -> torch.Tensor:
    """Return clips; every fourth batch has the wider ones."""
    width = WIDTHS[step % 4 == 3]
    scenes = [draw_scene(run.seed, step * size + i, held_out=False, width=width) for i in range(size)]
    pixels = as_pixels([render(scene) for scene in scenes], run.device)
    return pixels.contiguous(memory_format=torch.channels_last_3d)


@torch.no_grad()
def encode_clips(run: Run, count: int = sizes.SCENES, chunk: int = 8) -> None:
    """Encode `count` scenes, each with its opposite, and their image conditions, into latents-*.pt; resumes.

    A file holds, of `chunk` scenes of one width: clips [2, B, Z, T, H, W] and conditions [B, Z, T, H, W], the VAE's
    means, not normalised, and the scenes' indices.
    """
    vae = WholeClips(load_vae(run))
    for width, indices in _by_width(run, count, chunk):
        file = run.folder / "latents" / f"{width}-{indices[0]:06d}.pt"
        if file.exists():
            continue
        file.parent.mkdir(exist_ok=True)
        scenes = [draw_scene(run.seed, i, held_out=False) for i in indices]
        pixels = as_pixels([render(scene) for scene in scenes], run.device)
        other = as_pixels([render(opposite(scene)) for scene in scenes], run.device)
        known = pixels.clone()
        known[:, :, 1:] = 0  # The pipeline's condition is the first frame, followed by grey.
        both = torch.cat([pixels, other, known]).contiguous(memory_format=torch.channels_last_3d)
        means = vae.encode(both).mode().cpu().half().unflatten(0, (3, -1))
        state = {
            "clips": means[:2],
            "conditions": means[2],
            "indices": torch.tensor(indices),
        }
        torch.save(state, file)


def statistics(clips: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel over latents, each [..., Z, T, H, W]."""
    channels = torch.cat([clip.float().movedim(-4, 0).flatten(1) for clip in clips], dim=1)
    return channels.mean(1).tolist(), channels.std(1).tolist()


def _by_width(run: Run, count: int, chunk: int) -> Iterator[tuple[int, list[int]]]:
    waiting: dict[int, list[int]] = {}
    for i in range(count):
        scene: Scene = draw_scene(run.seed, i, held_out=False)
        group = waiting.setdefault(scene.width, [])
        group.append(i)
        if len(group) == chunk:
            yield scene.width, waiting.pop(scene.width)
    # Incomplete chunks are dropped, so that batches have few sizes.


class WholeClips:
    """Encodes and decodes whole clips with a VAE's modules; `vae` itself works as before.

    AutoencoderKLWan processes a clip in chunks of four frames and caches the inputs of its causal convolutions from one
    to the next. Over a whole clip, convolutions pad with zeros, with which that cache begins, and only layers that
    change the frame rate treat the first frame separately. The values are the same, several times faster, in more
    memory.
    """

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
