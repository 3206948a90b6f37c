"""Predict a program's time from published and from measured figures, and find the figure that explains a difference.

Plans are made in a process of their own, which has no chips: it holds the compiler.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.doctor.finding import Finding, Machine
from actors.planning.calibration import FIGURES, Calibration
from actors.planning.slice_description import describe_slice
from cluster.slice_spec import SliceSpec
from wan_tpu.families import list_published, published_spec
from wan_tpu.plan import DECODER
from wan_tpu.request import GenerationRequest, ResolvedRequest
from wan_tpu.spec import ModelSpec

DTYPE = "bfloat16"
SIZE: dict[str, Any] = {"height": 720, "width": 1280, "frames": 81}  # The size of the full-size step.
PREDICT_S = 600.0  # Two programs of full size are compiled and priced.
PUBLISHED, MEASURED = "published", "measured"
_TOLERANCE = 0.07  # Share of a prediction by which kernels with published times took longer than predicted.
_SMALLEST_EFFECT = 0.01  # Share of a prediction from which on a figure's effect is mentioned.
_ADVICE = {
    "clock_hz": "the clock is below what the chip's peak implies: other work on it, its power, its cooling",
    "grid_step_s": "grid steps cost more than their bundles: larger tiles would be faster",
    "hbm_bytes_per_s": "device memory is slower than published: is another process using it?",
    "link_bytes_per_s": "links between chips are slower than published: try another slice",
    "core_bytes_per_s": "the link within a chip is slower than published: try another chip",
}
_PROGRAM = "no measured rate explains it, so the program itself is to blame: attach this report to an issue"

# Estimate and floor of one program in seconds: from published figures, from each measured one alone, from all.
Variants = Mapping[str, tuple[float, float]]


class NoPrediction(Exception):
    """The process that makes plans failed; the message is its own."""


def predict(
    kind: str,
    mesh: Sequence[int],
    programs: Sequence[str],
    machine: Machine,
    model: str,
    size: Mapping[str, Any] = SIZE,
) -> dict[str, Variants]:
    """Return what programs of a model are predicted to take on a slice, by name; raises `NoPrediction`."""
    assert machine.chip is not None
    task = {
        "kind": kind,
        "mesh": list(mesh),
        "programs": list(programs),
        "calibration": {**machine.calibration.figures, "chip": machine.chip.name},
        "folder": str(machine.folder / "plan"),
        "model": model,
        "size": dict(size),
    }
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", __name__, json.dumps(task)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PREDICT_S)
    except subprocess.TimeoutExpired:
        raise NoPrediction(f"planning took longer than {PREDICT_S:g} s") from None
    if done.returncode:
        raise NoPrediction((done.stderr.strip().splitlines() or ["no message"])[-1])
    predicted: dict[str, Variants] = json.loads(done.stdout.splitlines()[-1])
    return predicted


def find_model_of_two_experts() -> str:
    """Return the name of the published text-to-video model with two experts, which the full step is of."""
    specs = ((name, published_spec(name)) for name in list_published())
    return next(name for name, spec in specs if "t2v" in spec.tasks and spec.boundary_ratio is not None)


def request_of(spec: ModelSpec, size: Mapping[str, Any]) -> ResolvedRequest:
    """Return a request of that size, with the model's settings."""
    return spec.plan(GenerationRequest(**size), image="t2v" not in spec.tasks, last=False).request


def explain(name: str, measured_s: float, variants: Variants) -> Finding:
    """Return a program's prediction, and the figure of the machine that makes it take longer, if any does."""
    estimate, floor = variants[PUBLISHED]
    # Slower memory may show in the floor alone: the compiler's own estimates know nothing of it.
    longest, calibrated = max(variants[PUBLISHED]), max(variants[MEASURED])
    added = {
        figure: max(variants[figure][0] - estimate, variants[figure][1] - floor)
        for figure in FIGURES
        if figure in variants
    }
    parts = {figure: seconds for figure, seconds in added.items() if seconds > _SMALLEST_EFFECT * estimate}
    unexplained = measured_s - calibrated
    because = [f"{FIGURES[figure][0]} {seconds:+.3g} s" for figure, seconds in parts.items()]
    if unexplained > _TOLERANCE * calibrated:
        because.append(f"the program {unexplained:+.3g} s")
    figures = {"measured_s": measured_s, "predicted": dict(variants), "added_s": added, "left_s": unexplained}
    summary = (
        f"{measured_s:.4g} s, predicted {estimate:.4g} (floor {floor:.4g}), {calibrated:.4g} with what was measured"
    )
    if measured_s <= (1 + _TOLERANCE) * longest:
        return Finding(f"{name}, predicted", summary, "ok", "within 7 % of the prediction", "", figures)
    worst = max(parts, key=lambda figure: parts[figure], default=None)
    advice = _PROGRAM if worst is None or unexplained > max(_TOLERANCE * calibrated, parts[worst]) else _ADVICE[worst]
    measured = f"{summary}; off: {', '.join(because) or 'nothing by more than a hundredth'}"
    return Finding(f"{name}, predicted", measured, "warn", "within 7 % of the prediction", advice, figures)


def _predict(
    kind: str,
    mesh: Sequence[int],
    programs: Sequence[str],
    calibration: Mapping[str, Any],
    folder: str,
    model: str,
    size: Mapping[str, Any],
) -> dict[str, dict[str, tuple[float, float]]]:
    """Make the plans: the child's side of `predict`."""
    from wan_tpu.pricing.planner import SlicePlanner

    spec = published_spec(model)
    request, stages = request_of(spec, size), [spec.denoise_stages[0], DECODER]
    every = Calibration(**calibration)
    variants = {PUBLISHED: every.only(""), **{name: every.only(name) for name in every.figures}, MEASURED: every}
    seconds: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in programs}
    for variant, figures in variants.items():
        slice_ = describe_slice(SliceSpec(kind), figures)
        planner = SlicePlanner(model, request, slice_, dtype=DTYPE, cache=Path(folder), report=lambda text: None)
        for name in programs:
            [program] = planner.plan(mesh, name, stages).programs
            if program.optimistic is None:
                raise NoPrediction(program.compiled.refused)
            seconds[name][variant] = dataclasses.astuple(program.optimistic.total)
    return seconds


if __name__ == "__main__":
    print(json.dumps(_predict(**json.loads(sys.argv[1]))))
