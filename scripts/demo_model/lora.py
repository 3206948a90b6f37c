"""Low-rank adapters of the small model's experts: trained beside frozen weights, saved as LightX2V saves them."""

import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file

from wan_tpu.families.wan.components import ORIGINALS

from .experts import EXPERTS
from .text import PaddedText

CHECKPOINT = Path(__file__).parents[2] / "examples" / "small-wan2.2-i2v"
_TARGETS = re.compile(r"blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.net\.(0\.proj|2))")
_PREFIX = "diffusion_model."  # and the names of Wan's own files


class LoraLinear(torch.nn.Module):
    """A frozen linear layer and, beside it, up(down(x)) * alpha / rank, with alpha = rank."""

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
    """Return diffusers' pipeline of the shipped model, in float32, its weights frozen."""
    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(CHECKPOINT, torch_dtype=torch.float32)
    for name in ("text_encoder", "vae", *EXPERTS):
        getattr(pipeline, name).requires_grad_(False)
    for name in EXPERTS:
        for block in getattr(pipeline, name).blocks:
            block.attn2.set_processor(PaddedText())
    return pipeline


def add_adapter(expert: torch.nn.Module, rank: int) -> dict[str, LoraLinear]:
    """Put an adapter beside every matrix of an expert's blocks; return its layers by the module's name."""
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
    """Train an adapter by AdamW, with a rise of the learning rate and a cosine down; prints the loss now and then."""
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
