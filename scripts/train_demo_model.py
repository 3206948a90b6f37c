#!/usr/bin/env python3
"""Train the small Wan 2.2 I2V that the demo and the tests use, and write it as a diffusers directory.

The stages are vae, latents (encode the clips), experts, export and examples (requests that the model hasn't seen). Each
continues where it was stopped. All together take two hours on two cores.
"""

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

import torch
from demo_model import sizes
from demo_model.experts import export, train_experts
from demo_model.gate import write_examples
from demo_model.training import Run
from demo_model.vae import encode_clips, train_vae

STAGES = ("vae", "latents", "experts", "export", "examples")


def main() -> int:
    """Run the stages that were asked for; return 1 when time ran out before one was done."""
    parser = _parser()
    args = parser.parse_args()
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"no stage is called {', '.join(sorted(unknown))}; stages are {', '.join(STAGES)}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    compiled = device == "cpu" and shutil.which("g++") is not None
    run = Run(args.folder, torch.device(device), args.seed, args.minutes * 60, compiled)
    run.folder.mkdir(parents=True, exist_ok=True)
    for stage in args.stages or STAGES:
        if stage == "vae":
            done = train_vae(run, _schedule(sizes.VAE_SCHEDULE, args.vae_steps))
        elif stage == "latents":
            encode_clips(run, args.scenes)
            done = True
        elif stage == "experts":
            done = train_experts(run, _schedule(sizes.EXPERTS_SCHEDULE, args.experts_steps))
        elif stage == "export":
            print(f"{args.target}: {export(run, args.target):.1f} MB")
            done = True
        else:
            print(write_examples(args.examples))
            done = True
        if not done:
            print(f"stopped in stage {stage} after {args.minutes:g} minutes; call again to go on")
            return 1
    return 0


def _schedule(schedule: sizes.Schedule, steps: int | None) -> sizes.Schedule:
    return schedule if steps is None else dataclasses.replace(schedule, steps=steps)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}; all in this order when left out")
    parser.add_argument("--folder", type=Path, default=Path("build/demo-model"), help="logs, sheets and states")
    parser.add_argument("--target", type=Path, default=Path("build/demo-model/checkpoint"), help="what export writes")
    parser.add_argument("--examples", type=Path, default=Path("build/demo-model/examples"), help="what examples writes")
    parser.add_argument("--minutes", type=float, default=600, help="stop each stage, saved, after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu or cuda; the GPU when there is one")
    parser.add_argument("--threads", type=int, help="of torch; all cores when left out")
    parser.add_argument("--vae-steps", type=int, help="in place of the plan's")
    parser.add_argument("--experts-steps", type=int, help="in place of the plan's")
    parser.add_argument("--scenes", type=int, default=sizes.SCENES, help="to encode, each with its opposite")
    return parser


if __name__ == "__main__":
    sys.exit(main())
