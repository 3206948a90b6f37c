#!/usr/bin/env python3
"""Make clips of held-out scenes with a checkpoint and say how good they are: figures with intervals, contact sheets.

Exit code 1 when a figure is below its limit.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from demo_model import gate

from wan_tpu import GenerationRequest, load_pipeline

# Shares, and decibels: what the model card promises.
LIMITS = {
    "vae_db": 28.0,
    "first_frame_db": 24.0,
    "direction": 0.85,
    "colour": 0.90,
    "sentence": 0.80,
}


def main() -> int:
    """Run the gate; return 1 when a limit isn't met."""
    args = _parser().parse_args()
    pipeline = load_pipeline(args.checkpoint, dtype=args.dtype, mesh=(1, 1, 1))
    sampling = gate.Sampling(args.steps, args.guidance, args.shift)
    scenes = gate.held_out_scenes(args.requests)

    def generate(request: GenerationRequest) -> np.ndarray:
        return pipeline.generate(request).pixels

    made = gate.make(generate, scenes, sampling)
    made_opposite = [] if args.no_opposites else gate.make(generate, gate.opposites(scenes), sampling)
    found = {"vae_db": gate.reconstruction(args.checkpoint, scenes)} | gate.figures(made, made_opposite)
    gate.write(args.out, made, found)
    print(gate.table(found))
    failed = [name for name, limit in LIMITS.items() if name in found and found[name].value < limit]
    for name in failed:
        print(f"below its limit: {name} is {found[name].value:.3g}, the limit {LIMITS[name]:g}", file=sys.stderr)
    print(f"figures and contact sheets are in {args.out}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    default = gate.Sampling()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("build/quality"))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--guidance", type=float, default=default.guidance)
    parser.add_argument("--shift", type=float, help="the checkpoint's when left out")
    parser.add_argument("--no-opposites", action="store_true", help="half the time, without the figure for sentences")
    return parser


if __name__ == "__main__":
    sys.exit(main())
