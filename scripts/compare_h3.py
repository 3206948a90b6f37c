#!/usr/bin/env python3
"""Compare MiniMax-H3 with mlx-h3, an independent program, on a small checkpoint in float32.

    python scripts/compare_h3.py [--python PYTHON]

mlx-h3 0.0.1a3 is fetched from PyPI into a temporary environment, with MLX for CPUs: 300 MB of disk. It needs Python
3.13. `--python` names an interpreter that has both already. Each line states the largest differences from what mlx-h3
makes, relative to its largest values: of the prompt's states, of the latents after all steps, and of the video.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from wan_tpu.families.minimax_h3.small import make_checkpoint
from wan_tpu.pipeline import Pipeline, load_pipeline
from wan_tpu.request import GenerationRequest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mlx-h3==0.0.1a3", "mlx[cpu]==0.32.4")
STEPS = 3
# The small tokenizer has one token for each letter.
PROMPTS = {"23 tokens": "A cat plays the piano. ", "1,500 tokens": ("the sea and the wind " * 100)[:1500]}
LIMITS = {"states": 1e-5, "video": 1e-4, "audio": 1e-4, "pixels": 2e-3, "sound": 2e-3}


def main() -> int:
    """Print the differences; return 1 if one is larger than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="an interpreter with mlx-h3 0.0.1a3")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = make_checkpoint(folder / "model")
        pipe = load_pipeline(checkpoint, "float32", mesh=(1, 1, 1))
        given, ours = dict[str, Any](), {}
        for case, prompt in PROMPTS.items():
            inputs, made = make_ours(pipe, prompt)
            given |= {f"{case} {part}": value for part, value in inputs.items()}
            ours[case] = made
        np.savez(folder / "given.npz", **given)
        script = ROOT / "scripts" / "published" / "h3_mlx.py"
        numbers = str(pipe.runtime.model.config.text_layer), str(STEPS)
        files = folder / "given.npz", folder / "made.npz"
        subprocess.run([python or install(folder), script, checkpoint, *files, *numbers], check=True)
        theirs, fails = np.load(folder / "made.npz"), False
        print(f"{'':16}" + "".join(f"{part:>10}" for part in LIMITS))
        for case, made in ours.items():
            errors = {part: measure(made[part], theirs[f"{case} {part}"]) for part in LIMITS}
            print(f"{case:16}" + "".join(f"{error:10.1e}" for error in errors.values()))
            fails |= any(error > LIMITS[part] for part, error in errors.items())
    return int(fails)


def install(folder: Path) -> Path:
    """Install mlx-h3 into a new environment, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    python = folder / "environment" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--pre", *PACKAGES, "numpy"], check=True)
    return python


def make_ours(pipe: Pipeline, prompt: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return what a video starts from, and what it becomes, in mlx-h3's shapes."""
    plan = pipe.plan(GenerationRequest(prompt=prompt, height=64, width=96, frames=107, steps=STEPS, seed=3))
    tokens, _ = pipe.runtime.model.tokenize(prompt)
    ids, [[count]] = tokens["text_encoder"]
    conditioning, start = pipe.encode(plan), pipe.initial_state(plan)
    end = pipe.denoise(plan, conditioning, start)
    sound, _ = pipe.decode_sound(end)
    pixels = np.concatenate(list(pipe.decode(np.asarray(end.latents))))
    inputs = {"ids": ids[0, :count], "video": np.asarray(start.latents), "audio": by_channel(start.audio)}
    made = {
        "states": np.asarray(conditioning.prompt["text"])[0, :count],
        "video": np.asarray(end.latents),
        "audio": by_channel(end.audio),
        "pixels": pixels.transpose(3, 0, 1, 2)[None],
        "sound": np.asarray(sound)[None],
    }
    return inputs, made


def by_channel(rows: object) -> np.ndarray:
    """Return latents of the sound [1, C, 2, A], given [1, 2 A, C]."""
    values = np.asarray(rows)
    return values.reshape(2, -1, values.shape[2]).transpose(2, 0, 1)[None]


def measure(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference relative to the largest value."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


if __name__ == "__main__":
    sys.exit(main())
