"""Train the two adapters that are shipped with the small model: one teaches it a motion, one makes it faster.

The adapter zigzag makes things zigzag and turn purple (`zigzag`). It is trained by flow matching on rendered clips.

The adapter four-steps samples in four unguided steps of Euler's method. From each of the four noise levels, the adapted
expert steps to the point that the model itself reaches at the next one with guidance and many small steps: it learns
the chord of that trajectory, as in the first stage of progressive distillation (Salimans and Ho 2022, arXiv
2202.00512).

Adapters are low-rank, trained while the weights are frozen, and saved in LightX2V's format.

Shapes: B clips, Z latent channels, T latent frames, H W latent height and width.
"""

import itertools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from safetensors.torch import save_file

from wan_tpu.families.wan.components import ORIGINALS
from wan_tpu.families.wan.sampling import SIGMAS

from . import sizes
from .experts import EXPERTS, PaddedText, attention_over_few_tokens, embed, noise_levels
from .scenes import Scene, caption, draw_scene, first_frame, opposite
from .vae import WholeClips, as_pixels
from .zigzag import draw_zigzag, render_zigzag, zigzag_caption

CHECKPOINT = Path(__file__).parents[2] / "examples" / "small-wan2.2-i2v"
_TARGETS = re.compile(r"blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.net\.(0\.proj|2))")
_PREFIX = "diffusion_model."  # Names in Wan's original files follow it.


class LoraLinear(torch.nn.Module):
    """A frozen linear layer to whose output up(down(x)) is added; alpha equals the rank, so the scale is 1."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.empty(rank, base.in_features))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))
        torch.nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., I] -> [..., O]."""
        return self.base(x) + torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up)


def load_pipeline() -> diffusers.WanImageToVideoPipeline:
    """Return diffusers' pipeline of the shipped model, in float32, with frozen weights."""
    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(CHECKPOINT, torch_dtype=torch.float32)
    for name in ("text_encoder", "vae", *EXPERTS):
        getattr(pipeline, name).requires_grad_(False)
    for name in EXPERTS:
        for block in getattr(pipeline, name).blocks:
            block.attn2.set_processor(PaddedText())
    return pipeline


def add_adapter(expert: torch.nn.Module, rank: int) -> dict[str, LoraLinear]:
    """Add an adapter to every matrix of an expert's blocks, and return its layers by the module's name."""
    layers = {}
    for name, module in list(expert.named_modules()):
        if _TARGETS.fullmatch(name):
            parent, _, leaf = name.rpartition(".")
            layers[name] = LoraLinear(module, rank)
            setattr(expert.get_submodule(parent), leaf, layers[name])
    return layers


def fit(
    layers: dict[str, LoraLinear],
    loss_of: Callable[[int], torch.Tensor],
    *,
    steps: int,
    rate: float,
    name: str,
    warm_up: int = 30,
) -> None:
    """Train an adapter with AdamW, warm-up and cosine decay of the learning rate; print the loss every 50 steps."""
    parameters = [parameter for layer in layers.values() for parameter in (layer.down, layer.up)]
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    began, seen = time.monotonic(), []
    for step in range(steps):
        part = min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = rate * part
        torch.manual_seed(step)
        loss = loss_of(step)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        seen.append(float(loss.detach()))
        if (step + 1) % 50 == 0:
            each = (time.monotonic() - began) / (step + 1)
            print(
                f"{name}: step {step + 1} of {steps}, loss {sum(seen) / len(seen):.4f}, {each:.2f} s a step", flush=True
            )
            seen = []


def save_adapter(layers: dict[str, LoraLinear], path: Path) -> float:
    """Write an adapter in float16, under Wan's own names; return its size in MB."""
    tensors = {}
    for name, layer in layers.items():
        original = f"{name}.weight"
        for pattern, replacement in ORIGINALS:
            original = re.sub(pattern, replacement, original)
        module = _PREFIX + original.removesuffix(".weight")
        tensors[f"{module}.lora_down.weight"] = layer.down.detach().half().contiguous()
        tensors[f"{module}.lora_up.weight"] = layer.up.detach().half().contiguous()
        tensors[f"{module}.alpha"] = torch.tensor(float(len(layer.down)))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path.stat().st_size / 1e6


SIDES = ("high", "low")
RANKS = {"zigzag": 8, "four-steps": 16}
_BATCH = 32
_PARTS = 6  # The small steps of the guided trajectory between two noise levels.
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
    drawn += [opposite(scene) for scene in drawn]
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
    trajectories = torch.cat(
        [
            _follow_guided(pipeline, conditions[i : i + _BATCH], texts[i : i + _BATCH], seed=i)
            for i in range(0, len(drawn), _BATCH)
        ],
        dim=1,
    )
    levels = [*SIGMAS, 0.0]
    for side, name in zip(SIDES, EXPERTS, strict=True):
        expert = getattr(pipeline, name)
        layers = add_adapter(expert, RANKS["four-steps"])
        numbers = (0, 1) if side == "high" else (2, 3)

        def loss_of(step: int, expert: Any = expert, numbers: tuple[int, int] = numbers) -> torch.Tensor:
            rng = np.random.default_rng([_SEED, step])
            chosen, at = rng.integers(len(drawn), size=_BATCH), numbers[step % 2]
            start, end = trajectories[at, chosen], trajectories[at + 1, chosen]
            chord = (start - end) / (levels[at] - levels[at + 1])
            sigma = torch.full((_BATCH,), levels[at])
            predicted = velocity(expert, start, conditions[chosen], sigma, texts[chosen])
            return (predicted - chord).square().mean()

        fit(layers, loss_of, steps=steps, rate=2e-3, name=f"four-steps, {side}")
        print(f"four-steps.{side}: {save_adapter(layers, folder / f'four-steps.{side}.safetensors'):.2f} MB")


@torch.no_grad()
def _follow_guided(pipeline: Any, conditions: torch.Tensor, texts: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Return the points of the model's guided trajectory at the four noise levels and at 0: [5, B, Z, T, H, W]."""
    generator = torch.Generator().manual_seed(_SEED * 1000 + seed)
    x = torch.randn(conditions[:, 4:].shape, generator=generator)
    empty = text_of(pipeline, [""] * len(x))[:, : texts.shape[1]]
    points, levels = [x], [*SIGMAS, 0.0]
    for start, stop in itertools.pairwise(levels):
        parts = np.linspace(start, stop, _PARTS + 1)
        for before, after in itertools.pairwise(parts):
            expert = getattr(pipeline, EXPERTS[int(before < sizes.BOUNDARY)])
            both = velocity(
                expert,
                torch.cat([x, x]),
                torch.cat([conditions, conditions]),
                torch.full((2 * len(x),), float(before)),
                torch.cat([texts, empty]),
            )
            with_text, without_text = both.chunk(2)
            x = x + (after - before) * (without_text + sizes.GUIDANCE * (with_text - without_text))
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
    """Return embeddings [B, L, C]; L is the same for all sentences of the grammar."""
    embeddings = embed(pipeline.text_encoder, pipeline.tokenizer, sentences)
    longest = 65  # The rows of the longest sentence, and one for the padding.
    return torch.nn.functional.pad(embeddings, (0, 0, 0, longest - embeddings.shape[1]))


@torch.no_grad()
def encode(pipeline: Any, scenes: list[Scene], clips: list[np.ndarray], *, only_conditions: bool = False) -> Encoded:
    """Encode clips, uint8 [T, H, W, 3], and their first frames with the model's VAE."""
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
