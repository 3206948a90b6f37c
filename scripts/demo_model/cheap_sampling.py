"""Fewer and cheaper steps: what four of them, adapters, a cache and 8 bits cost; and mistakes with adapters."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from wan_tpu.families.wan.transformer import MATRICES

from . import sizes
from .gate import Sampling, held_out_scenes, request_of

PRESET = "four-steps"


def list_cheaper(checkpoint: Path) -> dict[str, Sampling]:
    """Return the kinds of sampling that are compared with the model's own, by name."""
    few = Sampling(steps=None, guidance=None, preset=PRESET)
    files = {side: checkpoint / "adapters" / f"{PRESET}.{side}.safetensors" for side in ("high", "low")}

    def with_(*adapters: str, **more: tuple[float, ...]) -> Sampling:
        return Sampling(steps=None, guidance=None, preset=PRESET, loras=adapters, **more)  # type: ignore[arg-type]

    right = f"{files['high']}@high", f"{files['low']}@low"
    return {
        "four steps, with the adapter": few,
        "four steps, without": with_(),
        "four steps, with the adapter, and MagCache": replace(few, cache="magcache"),
        "four steps, with the adapter, and MagCache, threshold 0.2": replace(few, cache="magcache:0.2"),
        "MagCache": Sampling(cache="magcache"),
        "MagCache, threshold 0.2, five in a row": Sampling(cache="magcache:0.2,5,0.1"),
        "mistake: each adapter on the other expert": with_(f"{files['high']}@low", f"{files['low']}@high"),
        "mistake: half the scale": with_(*(f"{path}:0.5@{side}" for side, path in files.items())),
        "mistake: three times the scale": with_(*(f"{path}:3@{side}" for side, path in files.items())),
        "mistake: even sigmas": with_(*right, sigmas=(1.0, 0.75, 0.5, 0.25)),
    }


EIGHT_BITS = {"int8": (torch.int8, 127.0), "float8": (torch.float8_e4m3fn, 448.0)}
_SCENES = 2


def round_rows(x: torch.Tensor, precision: str) -> torch.Tensor:
    """Return rows as 8 bits hold them: the nearest numbers times a scale for each row."""
    kind, most = EIGHT_BITS[precision]
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
    scaled = x / scales
    return (scaled.round() if kind == torch.int8 else scaled.to(kind).to(x.dtype)) * scales


def errors_of_layers(checkpoint: Path, precisions: Sequence[str]) -> str:
    """Return a table of how far the output of each kind of layer is from exact, relative to the output's size.

    Inputs are those of the layers of both experts while diffusers' pipeline makes a few clips.
    """
    squares: dict[tuple[str, str], list[float]] = defaultdict(list)

    def watch(kind: str) -> Callable[[torch.nn.Module, Any, torch.Tensor], None]:
        def hook(layer: torch.nn.Module, inputs: Any, exact: torch.Tensor) -> None:
            for precision in precisions:
                parts = round_rows(inputs[0], precision), round_rows(layer.weight, precision), layer.bias
                error = torch.nn.functional.linear(*parts) - exact
                squares[kind, precision].append(float(error.square().mean() / exact.square().mean()))

        return hook

    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(checkpoint, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    for expert in (pipe.transformer, pipe.transformer_2):
        for name, layer in expert.named_modules():
            if re.fullmatch(MATRICES, f"{name}.weight"):
                layer.register_forward_hook(watch(name.split(".", 2)[2].removesuffix(".0").removesuffix(".proj")))
    for seed, scene in enumerate(held_out_scenes(_SCENES)):
        request = request_of(scene, seed, Sampling())
        with torch.no_grad():
            pipe(
                image=request.image,
                prompt=request.prompt,
                height=request.height,
                width=request.width,
                num_frames=request.frames,
                num_inference_steps=sizes.STEPS,
                guidance_scale=sizes.GUIDANCE,
                generator=torch.Generator().manual_seed(seed),
                output_type="latent",
            )
    titles = " | ".join(f"{precision}: mean, worst" for precision in precisions)
    lines = [f"| layer | {titles} |", "|---" * (len(precisions) + 1) + "|"]
    for kind in sorted({kind for kind, _ in squares}):
        errors = (100 * np.sqrt(squares[kind, precision]) for precision in precisions)
        cells = " | ".join(f"{error.mean():.2f} %, {error.max():.2f} %" for error in errors)
        lines.append(f"| `{kind}` | {cells} |")
    return "\n".join(lines)
