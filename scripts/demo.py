#!/usr/bin/env python3
"""Build a small checkpoint in the shape of Wan 2.2 I2V A14B and turn a photograph into a video with it."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import transformers

from wan_tpu.tiny import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "demo"
EXPERT = {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 512, "num_layers": 4, "text_dim": 64}
VAE = {"base_dim": 16}


def main() -> int:
    """Make checkpoint and video; return the exit code of the command that a user would type."""
    shutil.rmtree(FOLDER / "checkpoint", ignore_errors=True)
    transformers.logging.disable_progress_bar()  # the checkpoint is written in no time
    print("Building a small checkpoint with random weights: the program is the real one, the picture will be noise.")
    checkpoint = make_checkpoint(FOLDER / "checkpoint", "wan2.2-i2v-a14b", transformer=EXPERT, vae=VAE)
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    print(f"{checkpoint.relative_to(ROOT)}: {size / 1e6:.1f} MB\n")
    command = [sys.executable, "scripts/generate.py", "--model_id", "demo/checkpoint"]
    command += ["--image", "examples/cat.png", "--prompt", "A cat looks into the camera, its whiskers moving."]
    command += ["--negative_prompt", "static, overexposed, blurred details", "--size", "160*240", "--frames", "17"]
    command += ["--fps", "8", "--num_steps", "8", "--guidance_scale", "3.5", "--shift", "5", "--seed", "0"]
    command += ["--dtype", "float32", "--output", "demo/video.mp4", "--overwrite"]
    print("$", shlex.join([os.path.relpath(sys.executable, ROOT), *command[1:]]), flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
