"""Pipelines that the gate compares with the correct one: cheaper sampling, and deliberate mistakes.

Checks of shapes and NaN never notice these mistakes, so the gate has to. Cheaper sampling means fewer steps, adapters,
a cache or 8 bits; some mistakes involve adapters, too.
"""

import dataclasses
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import safetensors.torch
import torch

from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.families.wan.published import VAE_21
from wan_tpu.families.wan.transformer import MATRICES
from wan_tpu.pipeline import Pipeline

from . import intervals, sizes
from .gate import DECIBELS, Generate, Sampling, ScoredClip, held_out_scenes, request_of
from .score import SUB_SCORES

_LEAST_DB = 0.1  # A smaller fall is invisible, so it doesn't count as noticed.
_EXPERTS = ("transformer", "transformer_2")
_WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        damage: A function that damages a copy of the checkpoint, or None.
        sampling: The sampling of the requests, which may be the mistake.
        forgets: Whether the solver's history is lost where the second expert takes over.
        caught_by: The test that notices the mistake if this gate doesn't, or None.
    """

    damage: Callable[[Path], None] | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    forgets: bool = False
    caught_by: str | None = None


def _swap_experts(checkpoint: Path) -> None:
    first, second = (checkpoint / name / _WEIGHTS for name in _EXPERTS)
    first.rename(first.with_suffix(".aside"))
    second.rename(first)
    first.with_suffix(".aside").rename(second)


def _replace_other_expert(expert: int) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        shutil.copyfile(checkpoint / _EXPERTS[expert] / _WEIGHTS, checkpoint / _EXPERTS[1 - expert] / _WEIGHTS)

    return damage


def _zero_mask_channels(checkpoint: Path) -> None:
    """Zero the weights of the four mask channels."""
    for name in _EXPERTS:
        file = checkpoint / name / _WEIGHTS
        weights = safetensors.torch.load_file(file)
        weights["patch_embedding.weight"][:, sizes.Z : sizes.Z + 4] = 0
        safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


def _use_wan21_statistics(checkpoint: Path) -> None:
    file = checkpoint / "vae" / "config.json"
    config = json.loads(file.read_text())
    config |= {name: VAE_21[name] for name in ("latents_mean", "latents_std")}
    file.write_text(json.dumps(config))


PARITY = "tests/wan_tpu/test_parity.py::test_same_latents_and_pixels_as_diffusers"
MISTAKES = {
    "shift ignored": Mistake(
        sampling=Sampling(shift=1.0),
        caught_by=PARITY,
    ),
    "experts swapped": Mistake(_swap_experts),
    "the high-noise expert throughout": Mistake(_replace_other_expert(0)),
    "the low-noise expert throughout": Mistake(_replace_other_expert(1)),
    "mask channels zeroed": Mistake(_zero_mask_channels),
    "latent statistics of Wan 2.1's VAE": Mistake(_use_wan21_statistics),
    "guidance off": Mistake(
        sampling=Sampling(guidance=1.0),
        caught_by=PARITY,
    ),
    "solver history dropped at the boundary": Mistake(
        forgets=True,
        caught_by=PARITY,
    ),
    "a quarter of the steps": Mistake(sampling=Sampling(steps=sizes.STEPS // 4)),
}


def load_mistaken(mistake: Mistake, checkpoint: Path, folder: Path, dtype: str = "float32") -> Generate:
    """Return a function that makes videos with a mistake; a damaged checkpoint is written into `folder`."""
    if mistake.damage is not None:
        checkpoint = Path(shutil.copytree(checkpoint, folder / "checkpoint"))
        mistake.damage(checkpoint)
    pipeline = load_pipeline(checkpoint, dtype=dtype, mesh=(1, 1, 1))
    if mistake.forgets:
        return lambda request: _generate_without_history(pipeline, request)
    return lambda request: pipeline.generate(request).pixels


def find_lowered(right: Sequence[ScoredClip], wrong: Sequence[ScoredClip]) -> list[str]:
    """Return the figures that a mistake lowers: the 99.9 % interval of their fall, by request, is above zero."""
    lowered = []
    for name in ("whole", *SUB_SCORES, *DECIBELS):
        falls = [
            float(getattr(good.score, name)) - float(getattr(bad.score, name))
            for good, bad in zip(right, wrong, strict=True)
        ]
        fall = intervals.mean(falls, percent=99.9)
        if fall.low > 0 and fall.value >= (_LEAST_DB if name in DECIBELS else 0):
            lowered.append("score" if name == "whole" else name)
    return lowered


def _generate_without_history(pipeline: Pipeline, request: GenerationRequest) -> np.ndarray:
    plan = pipeline.plan(request)
    state = first_state = pipeline.initial_state(plan)
    conditioning = pipeline.encode(plan)
    for expert in plan.experts:
        state = dataclasses.replace(state, history=first_state.history)
        state = pipeline.denoise(plan, conditioning, state, stop=expert.stop)
    return np.concatenate(list(pipeline.decode(state.latents)))


PRESET = "four-steps"


def list_cheaper(checkpoint: Path) -> dict[str, Sampling]:
    """Return the kinds of sampling that are compared with the model's own, by name."""
    four_steps = Sampling(steps=None, guidance=None, preset=PRESET)
    files = {side: checkpoint / "adapters" / f"{PRESET}.{side}.safetensors" for side in ("high", "low")}

    def adapt(*adapters: str, **settings: tuple[float, ...]) -> Sampling:
        return Sampling(steps=None, guidance=None, preset=PRESET, loras=adapters, **settings)  # type: ignore[arg-type]

    right = f"{files['high']}@high", f"{files['low']}@low"
    return {
        "four steps, with the adapter": four_steps,
        "four steps, without": adapt(),
        "four steps, with the adapter, and MagCache": replace(four_steps, cache="magcache"),
        "four steps, with the adapter, and MagCache, threshold 0.2": replace(four_steps, cache="magcache:0.2"),
        "MagCache": Sampling(cache="magcache"),
        "MagCache, threshold 0.2, five in a row": Sampling(cache="magcache:0.2,5,0.1"),
        "mistake: each adapter on the other expert": adapt(f"{files['high']}@low", f"{files['low']}@high"),
        "mistake: half the scale": adapt(*(f"{path}:0.5@{side}" for side, path in files.items())),
        "mistake: three times the scale": adapt(*(f"{path}:3@{side}" for side, path in files.items())),
        "mistake: even sigmas": adapt(*right, sigmas=(1.0, 0.75, 0.5, 0.25)),
    }


EIGHT_BITS = {"int8": (torch.int8, 127.0), "float8": (torch.float8_e4m3fn, 448.0)}
_SCENES = 2


def round_rows(x: torch.Tensor, precision: str) -> torch.Tensor:
    """Return rows rounded to 8 bits: the nearest numbers times a scale for each row."""
    kind, most = EIGHT_BITS[precision]
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
    scaled = x / scales
    return (scaled.round() if kind == torch.int8 else scaled.to(kind).to(x.dtype)) * scales


def errors_of_layers(checkpoint: Path, precisions: Sequence[str]) -> str:
    """Return a table of the error of each kind of layer in 8 bits, relative to its output.

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
