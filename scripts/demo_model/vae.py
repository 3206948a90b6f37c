"""Train the VAE, measure its latents, and encode the clips that the experts learn from.

Shapes: B clips, T H W pixels or, of latents, frames, height and width; Z latent channels.
"""

from collections.abc import Iterator

import diffusers
import numpy as np
import torch

from . import sizes
from .scenes import Scene, draw_scene, opposite, render
from .score import psnr
from .sheets import save_rows
from .training import Run, load_average, train


def new_vae() -> torch.nn.ModuleDict:
    """Return an untrained VAE."""
    return torch.nn.ModuleDict({"vae": diffusers.AutoencoderKLWan.from_config(sizes.VAE)})


def train_vae(run: Run, schedule: sizes.Schedule = sizes.VAE_SCHEDULE, short_share: float = sizes.SHORT_SHARE) -> bool:
    """Train the VAE, a share of its steps on small pieces of clips; return whether all steps are done."""
    torch.manual_seed(run.seed)
    modules = new_vae()
    vae = modules["vae"]
    short = int(schedule.steps * short_share)

    def loss_of(step: int) -> dict[str, torch.Tensor]:
        pixels = _batch(run, step, schedule.batch, short=step < short)
        posterior = vae.encode(pixels).latent_dist
        rebuilt = vae.decode(posterior.sample()).sample
        error = rebuilt - pixels
        # A value's mean: diffusers' kl() is written for pictures, without the axis of time.
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
    """Return clips, uint8 [T, H, W, 3], as the VAE takes them: float32 [B, 3, T, H, W] in [-1, 1]."""
    stacked = torch.from_numpy(np.stack(clips)).to(device)
    return stacked.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def _batch(run: Run, step: int, size: int, *, short: bool) -> torch.Tensor:
    """Return whole clips of 64 x 64, or pieces of 32 x 32 and 9 frames around what moves."""
    rng = np.random.default_rng([run.seed, step])
    clips = []
    for i in range(size):
        scene = draw_scene(run.seed, step * size + i, held_out=False, width=64)
        if not short:
            clips.append(render(scene))
            continue
        # The actor lies in four of five pieces: a background alone teaches little.
        y, x = (scene.actor.y, scene.actor.x) if rng.random() < 0.8 else rng.uniform(16, 48, 2)
        top, left = (int(np.clip(at - 16 + rng.integers(-10, 11), 0, 32)) for at in (y, x))
        start = int(rng.integers(9))
        times = np.linspace(0, 1, 17)[start : start + 9]
        clips.append(render(scene, times)[:, top : top + 32, left : left + 32])
    return as_pixels(clips, run.device)


@torch.no_grad()
def encode_clips(run: Run, count: int = sizes.SCENES, chunk: int = 8) -> None:
    """Encode `count` scenes, each with its opposite, and their image conditions, into latents-*.pt; resumes.

    A file holds, of `chunk` scenes of one width: clips [2, B, Z, T, H, W] and conditions [B, Z, T, H, W], the VAE's
    means, not normalised, and the scenes' indices.
    """
    vae = load_vae(run)
    for width, indices in _by_width(run, count, chunk):
        file = run.folder / "latents" / f"{width}-{indices[0]:06d}.pt"
        if file.exists():
            continue
        file.parent.mkdir(exist_ok=True)
        scenes = [draw_scene(run.seed, i, held_out=False) for i in indices]
        both = [encode(vae, [render(s) for s in asked]) for asked in (scenes, [opposite(s) for s in scenes])]
        firsts = [render(scene) for scene in scenes]
        state = {
            "clips": torch.stack(both).half(),
            "conditions": encode(vae, firsts, first_only=True).half(),
            "indices": torch.tensor(indices),
        }
        torch.save(state, file)


def encode(vae: diffusers.AutoencoderKLWan, clips: list[np.ndarray], *, first_only: bool = False) -> torch.Tensor:
    """Return the VAE's means of clips; `first_only`: of the first frame and zeros, as the pipeline's condition is."""
    pixels = as_pixels(clips, vae.device)
    if first_only:
        pixels[:, :, 1:] = 0
    return vae.encode(pixels).latent_dist.mode().cpu()


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
    # Always whole chunks, so that batches have few sizes.
