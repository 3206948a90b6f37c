"""Train the two adapters that are shipped with the small model: one teaches something, one makes it quicker.

zigzag      things that zigzag and turn purple (`zigzag`), by flow matching on rendered clips
four-steps  four unguided steps of Euler's method. From each of the four noise levels the adapted expert goes straight
            to where the model's own guided way, in many small steps, is at the next: it learns the chord of that way,
            as the first stage of progressive distillation does (Salimans and Ho 2022, arXiv 2202.00512)

Shapes: B clips, Z latent channels, T latent frames, H W latent height and width.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wan_tpu.families.wan.sampling import SIGMAS

from . import sizes
from .captions import caption
from .experts import EXPERTS, attention_over_few_tokens, noise_levels
from .lora import add_adapter, fit, load_pipeline, save_adapter
from .scenes import Scene, draw_scene, first_frame, opposite
from .text import embed
from .vae import WholeClips, as_pixels
from .zigzag import draw_zigzag, mirror, render_zigzag, zigzag_caption

SIDES = ("high", "low")
RANKS = {"zigzag": 8, "four-steps": 16}
_BATCH, _PARTS = 32, 6  # small steps of the model's own way between two noise levels
_SEED = 7


@dataclass(frozen=True)
class Encoded:
    """Scenes of one width: clips and conditions [N, ..., T, H, W], normalised; conditions with their mask channels."""

    scenes: list[Scene]
    clips: torch.Tensor
    conditions: torch.Tensor


def train_zigzag(folder: Path, *, scenes: int = 480, steps: int = 500) -> None:
    """Train and write zigzag.high.safetensors and zigzag.low.safetensors."""
    pipeline = load_pipeline()
    drawn = [draw_zigzag(_SEED, i, width=64) for i in range(scenes)]
    drawn += [mirror(scene) for scene in drawn]
    encoded = encode(pipeline, drawn, [render_zigzag(scene) for scene in drawn])
    for side, name in zip(SIDES, EXPERTS, strict=True):
        expert = getattr(pipeline, name)
        layers = add_adapter(expert, RANKS["zigzag"])

        def loss_of(step: int, expert: Any = expert, side: str = side) -> torch.Tensor:
            rng = np.random.default_rng([_SEED, step])
            chosen = rng.integers(len(encoded.scenes), size=_BATCH)
            x, condition = encoded.clips[chosen], encoded.conditions[chosen]
            words = [zigzag_caption(replace(encoded.scenes[i], wording=int(rng.integers(4)))) for i in chosen]
            words = ["" if rng.random() < sizes.TEXT_DROPOUT else word for word in words]
            sigma = noise_levels(rng, _BATCH, high=side == "high")
            noise = torch.randn_like(x)
            at = sigma[:, None, None, None, None]
            predicted = velocity(expert, (1 - at) * x + at * noise, condition, sigma, text_of(pipeline, words))
            return (predicted - (noise - x)).square().mean()

        fit(layers, loss_of, steps=steps, rate=3e-3, name=f"zigzag, {side}")
        print(f"zigzag.{side}: {save_adapter(layers, folder / f'zigzag.{side}.safetensors'):.2f} MB")


def train_four_steps(folder: Path, *, scenes: int = 960, steps: int = 900) -> None:
    """Train and write four-steps.high.safetensors and four-steps.low.safetensors."""
    pipeline = load_pipeline()
    drawn = [draw_scene(_SEED, i, held_out=False, width=64) for i in range(scenes)]
    drawn = [opposite(scene) if i % 2 else scene for i, scene in enumerate(drawn)]
    pictures = [np.repeat(first_frame(scene)[None], 17, axis=0) for scene in drawn]
    conditions = encode(pipeline, drawn, pictures, only_conditions=True).conditions
    texts = text_of(pipeline, [caption(scene) for scene in drawn])
    ways = torch.cat(
        [
            _way(pipeline, conditions[i : i + _BATCH], texts[i : i + _BATCH], seed=i)
            for i in range(0, len(drawn), _BATCH)
        ],
        dim=1,
    )
    levels = [*SIGMAS, 0.0]
    for side, name in zip(SIDES, EXPERTS, strict=True):
        expert = getattr(pipeline, name)
        layers = add_adapter(expert, RANKS["four-steps"])
        mine = (0, 1) if side == "high" else (2, 3)

        def loss_of(step: int, expert: Any = expert, mine: tuple[int, int] = mine) -> torch.Tensor:
            rng = np.random.default_rng([_SEED, step])
            chosen, at = rng.integers(len(drawn), size=_BATCH), mine[step % 2]
            here, there = ways[at, chosen], ways[at + 1, chosen]
            chord = (here - there) / (levels[at] - levels[at + 1])
            sigma = torch.full((_BATCH,), levels[at])
            predicted = velocity(expert, here, conditions[chosen], sigma, texts[chosen])
            return (predicted - chord).square().mean()

        fit(layers, loss_of, steps=steps, rate=2e-3, name=f"four-steps, {side}")
        print(f"four-steps.{side}: {save_adapter(layers, folder / f'four-steps.{side}.safetensors'):.2f} MB")


@torch.no_grad()
def _way(pipeline: Any, conditions: torch.Tensor, texts: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Return where the model's own guided way is at each noise level, 0 included: [5, B, Z, T, H, W]."""
    generator = torch.Generator().manual_seed(_SEED * 1000 + seed)
    x = torch.randn(conditions[:, 4:].shape, generator=generator)
    empty = text_of(pipeline, [""] * len(x))[:, : texts.shape[1]]
    points, levels = [x], [*SIGMAS, 0.0]
    for start, stop in itertools.pairwise(levels):
        parts = np.linspace(start, stop, _PARTS + 1)
        for here, there in itertools.pairwise(parts):
            expert = getattr(pipeline, EXPERTS[int(here < sizes.BOUNDARY)])
            both = velocity(
                expert,
                torch.cat([x, x]),
                torch.cat([conditions, conditions]),
                torch.full((2 * len(x),), float(here)),
                torch.cat([texts, empty]),
            )
            with_text, without_text = both.chunk(2)
            x = x + (there - here) * (without_text + sizes.GUIDANCE * (with_text - without_text))
        points.append(x)
    print(f"the model's own way: {seed + len(x)} clips", flush=True)
    return torch.stack(points)


def velocity(
    expert: Any, x: torch.Tensor, condition: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    """Return an expert's velocity, float32 [B, Z, T, H, W]."""
    with attention_over_few_tokens(x.device):
        return expert(torch.cat([x, condition], dim=1), sigma * 1000, text, return_dict=False)[0].float()


@torch.no_grad()
def text_of(pipeline: Any, sentences: list[str]) -> torch.Tensor:
    """Return embeddings [B, L, C]; all calls with sentences of the grammar have one L."""
    embeddings = embed(pipeline.text_encoder, pipeline.tokenizer, sentences)
    longest = 65  # of the longest sentence, and one row for the padding
    return torch.nn.functional.pad(embeddings, (0, 0, 0, longest - embeddings.shape[1]))


@torch.no_grad()
def encode(pipeline: Any, scenes: list[Scene], clips: list[np.ndarray], *, only_conditions: bool = False) -> Encoded:
    """Encode clips uint8 [T, H, W, 3] and their first frames by the model's own VAE."""
    vae = WholeClips(pipeline.vae)
    shape = (1, -1, 1, 1, 1)
    mean = torch.tensor(pipeline.vae.config.latents_mean).view(shape)
    std = torch.tensor(pipeline.vae.config.latents_std).view(shape)
    latents: list[torch.Tensor] = []
    known: list[torch.Tensor] = []
    for i in range(0, len(clips), 8):
        pixels = as_pixels(clips[i : i + 8], torch.device("cpu"))
        first = pixels.clone()
        first[:, :, 1:] = 0
        batch = first if only_conditions else torch.cat([pixels, first])
        means = (vae.encode(batch.contiguous(memory_format=torch.channels_last_3d)).mode() - mean) / std
        known.append(means[-len(pixels) :])
        latents.append(means[: len(pixels)])
    condition = torch.cat(known)
    mask = torch.zeros_like(condition[:, :4])
    mask[:, :, 0] = 1
    return Encoded(scenes, torch.cat(latents), torch.cat([mask, condition], dim=1))
