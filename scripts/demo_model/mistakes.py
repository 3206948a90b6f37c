"""Mistakes that checks of shapes and NaN never see, made on purpose: the gate has to notice them."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import safetensors.torch

from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.families.wan.published import VAE_21
from wan_tpu.pipeline import Pipeline

from . import intervals, sizes
from .gate import DECIBELS, Generate, Sampling, ScoredClip
from .score import SUB_SCORES

_LEAST_DB = 0.1  # A smaller fall can't be seen, so it doesn't count as noticed.
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


def _swap(checkpoint: Path) -> None:
    first, second = (checkpoint / name / _WEIGHTS for name in _EXPERTS)
    first.rename(first.with_suffix(".aside"))
    second.rename(first)
    first.with_suffix(".aside").rename(second)


def _only(expert: int) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        shutil.copyfile(checkpoint / _EXPERTS[expert] / _WEIGHTS, checkpoint / _EXPERTS[1 - expert] / _WEIGHTS)

    return damage


def _blind(checkpoint: Path) -> None:
    """Zero the weights of the four mask channels, so that their content is lost."""
    for name in _EXPERTS:
        file = checkpoint / name / _WEIGHTS
        weights = safetensors.torch.load_file(file)
        weights["patch_embedding.weight"][:, sizes.Z : sizes.Z + 4] = 0
        safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


def _others_statistics(checkpoint: Path) -> None:
    file = checkpoint / "vae" / "config.json"
    config = json.loads(file.read_text())
    config |= {name: VAE_21[name] for name in ("latents_mean", "latents_std")}
    file.write_text(json.dumps(config))


MISTAKES = {
    "shift ignored": Mistake(
        sampling=Sampling(shift=1.0),
        caught_by="tests/wan_tpu/test_known_mistakes.py::test_shift_changes_the_schedule_and_the_video",
    ),
    "experts swapped": Mistake(_swap),
    "the high-noise expert throughout": Mistake(_only(0)),
    "the low-noise expert throughout": Mistake(_only(1)),
    "mask channels zeroed": Mistake(_blind),
    "latent statistics of Wan 2.1's VAE": Mistake(_others_statistics),
    "guidance off": Mistake(
        sampling=Sampling(guidance=1.0),
        caught_by="tests/wan_tpu/test_parity.py::test_same_latents_and_pixels_as_diffusers",
    ),
    "solver history dropped at the boundary": Mistake(
        forgets=True, caught_by="tests/wan_tpu/test_known_mistakes.py::test_history_crosses_the_boundary"
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
        return lambda request: _forgetful(pipeline, request)
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


def _forgetful(pipeline: Pipeline, request: GenerationRequest) -> np.ndarray:
    plan = pipeline.plan(request)
    state = first_state = pipeline.initial_state(plan)
    conditioning = pipeline.encode(plan)
    for expert in plan.experts:
        state = dataclasses.replace(state, history=first_state.history)
        state = pipeline.denoise(plan, conditioning, state, stop=expert.stop)
    return np.concatenate(list(pipeline.decode(state.latents)))
