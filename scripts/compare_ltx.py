#!/usr/bin/env python3
"""Compare LTX-2's latents with those of Lightricks' own pipelines, for small checkpoints of every kind, in float32.

    python scripts/compare_ltx.py [--python PYTHON]

Lightricks' packages, ltx-core and ltx-pipelines 1.0.0, are fetched from PyPI into a temporary environment with their
own versions of torch and transformers: several GB of disk, and ten minutes on two cores. `--python` names an
interpreter that has them already. Each line states the largest difference from Lightricks' latents, relative to the
largest of these: of wan-tpu, and of the rules in plain torch that the tests use (scripts/published/ltx_rules.py). It
also names the settings that differ from their command line's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from published.ltx_rules import Lightricks, make_adapter

from wan_tpu.families.ltx2.config import is_25
from wan_tpu.families.ltx2.published import NEGATIVE_PROMPT, PUBLISHED, SECOND_STAGE_SIGMAS, TWO_STAGES
from wan_tpu.families.ltx2.small import make_checkpoint
from wan_tpu.media.image import load_image
from wan_tpu.pipeline import Pipeline, load_pipeline
from wan_tpu.request import GenerationRequest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ltx-core==1.0.0", "ltx-pipelines==1.0.0")
IMAGE = ROOT / "examples" / "cat.png"
REQUEST: dict[str, Any] = {"prompt": "A cat in the rain.", "seed": 5, "height": 64, "width": 128, "frames": 9}
STEPS = 3  # With guidance.
LIMIT = 1e-4
# In their encoder, each downsampling multiplies the number of channels by a whole number.
VAE = {"block_out_channels": [32, 64, 128, 128]}


def main() -> int:
    """Print the differences; return 1 if one is larger than `LIMIT`, or if a default differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="an interpreter with ltx-core and ltx-pipelines 1.0.0")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as folder:
        cases = make_cases(Path(folder))
        theirs = run_lightricks(python or install(Path(folder), *PACKAGES), cases, Path(folder))
        fails = False
        print(f"{'':32}{'wan-tpu':>12}{'plain torch':>16}")
        for name, case in cases.items():
            pipe = load_pipeline(case["folder"], "float32", mesh=(1, 1, 1))
            settings, defaults = json.loads(str(theirs[f"{name} settings"])), pipe.plan(make_request(case)).request
            differing = [field for field, value in settings.items() if getattr(defaults, field) != value]
            video, audio = (theirs[f"{name} {part}"] for part in ("video", "audio"))
            expected = video, audio.transpose(0, 2, 1, 3).reshape(1, audio.shape[2], -1)
            errors = [
                max(measure(latents, part) for latents, part in zip(made, expected, strict=True))
                for made in (make_ours(pipe, case), make_reference(case))
            ]
            print(f"{name:32}{errors[0]:12.1e}{errors[1]:16.1e}", *differing)
            fails |= bool(differing) or max(errors) > LIMIT
    return int(fails)


def make_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Write a checkpoint of each kind, and return what is made of each, from text and from an image.

    Guided models make it in one stage, and in two with an adapter.
    """
    cases: dict[str, dict[str, Any]] = {}
    for kind in (kind for kind, config in PUBLISHED.items() if not is_25(config)):  # LTX-2.5 is later than these.
        checkpoint = make_checkpoint(folder / kind, kind, vae=VAE)
        case = REQUEST | {"kind": kind, "folder": str(checkpoint), "steps": STEPS, "adapter": None}
        programs = {kind: case}
        if not PUBLISHED[kind].distilled:
            adapter = make_adapter(checkpoint, folder / f"{kind}.safetensors")
            programs[f"{kind}, two stages"] = case | {"adapter": str(adapter)}
        for name, program in programs.items():
            cases |= {f"{name}, text": program | {"image": None}, f"{name}, image": program | {"image": str(IMAGE)}}
    return cases


def install(folder: Path, *packages: str) -> Path:
    """Install packages into a new environment, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    python = folder / "environment" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run_lightricks(python: Path, cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, np.ndarray]:
    """Return the latents and settings of Lightricks' pipelines."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [python, ROOT / "scripts" / "published" / "ltx_latents.py", folder / "cases.json", folder / "latents.npz"]
    subprocess.run(command, check=True)
    return dict(np.load(folder / "latents.npz"))


def make_request(case: dict[str, Any], **fields: Any) -> GenerationRequest:
    """Return a request for the program of a case."""
    if case["adapter"]:
        fields |= {"preset": TWO_STAGES, "loras": [f"{case['adapter']}@refine"]}
    return GenerationRequest(**fields)


def make_ours(pipe: Pipeline, case: dict[str, Any]) -> list[np.ndarray]:
    """Return the latents of video and sound."""
    image = load_image(case["image"]) if case["image"] else None
    steps: dict[str, Any] = {} if case["kind"].endswith("distilled") else {"steps": STEPS}
    if case["adapter"]:
        steps["steps"] += len(SECOND_STAGE_SIGMAS)
    plan = pipe.plan(make_request(case, image=image, **REQUEST, **steps))
    state = pipe.denoise(plan, pipe.encode(plan, warn=lambda _: None), pipe.initial_state(plan))
    return [np.asarray(state.latents), np.asarray(state.audio)]


def make_reference(case: dict[str, Any]) -> list[np.ndarray]:
    """Return the same by the rules that the tests use."""
    reference, image = Lightricks(Path(case["folder"])), load_image(case["image"]) if case["image"] else None
    size: Any = tuple(REQUEST[name] for name in ("height", "width", "frames"))
    if case["kind"].endswith("distilled"):
        return reference.make_in_two_stages(REQUEST["prompt"], REQUEST["seed"], size, image)[-1]
    guided = REQUEST["prompt"], NEGATIVE_PROMPT, STEPS, REQUEST["seed"], size
    if case["adapter"]:
        return reference.make_and_refine(*guided, Path(case["adapter"]), image)[-1]
    return reference.make_in_one_stage(*guided, image)


def measure(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference relative to the largest value."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


if __name__ == "__main__":
    sys.exit(main())
