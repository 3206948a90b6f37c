#!/usr/bin/env python3
"""Make clips of held-out scenes with a checkpoint and say how good they are: figures with intervals, contact sheets.

Exit code 1 when a figure is below its limit.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from demo_model import gate, intervals
from demo_model.cheaper import EIGHT_BITS, cheaper, errors_of_layers
from demo_model.mistakes import MISTAKES, fallen, mistaken
from demo_model.score import psnr
from demo_model.ways import WAYS

from wan_tpu.commands.parser import PRECISIONS, add_precision

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
    sampling = gate.Sampling(args.steps, args.guidance, args.shift)
    scenes = gate.held_out_scenes(args.requests)
    with WAYS[args.through](args.checkpoint, args.dtype) as generate:
        made = gate.make(generate, scenes, sampling)
        made_opposite = [] if args.no_opposites else gate.make(generate, gate.opposites(scenes), sampling)
    found = {"vae_db": gate.reconstruction(args.checkpoint, scenes)} | gate.figures(made, made_opposite)
    gate.write(args.out, made, found)
    print(gate.table(found))
    failed = [name for name, limit in LIMITS.items() if name in found and found[name].value < limit]
    for name in failed:
        print(f"below its limit: {name} is {found[name].value:.3g}, the limit {LIMITS[name]:g}", file=sys.stderr)
    print(f"figures and contact sheets are in {args.out}")
    if args.mistakes:
        _try_mistakes(args, made)
    if args.cheaper:
        _compare({name: (sampling, args.dtype) for name, sampling in cheaper(args.checkpoint).items()}, args, made)
    if args.precisions:
        _compare({name: (sampling, name) for name in args.precisions}, args, made)
        print(errors_of_layers(args.checkpoint, [name for name in args.precisions if name in EIGHT_BITS]))
    return 1 if failed else 0


def _compare(
    ways: Mapping[str, tuple[gate.Sampling, str]], args: argparse.Namespace, right: Sequence[gate.Made]
) -> None:
    """Print, as a table for docs/quality.md, what cheaper ways, sampling and precision, make of the figures."""
    lines = [
        "| way | score (95 % interval) | likeness | like the model's own clip | what it lowers |",
        "|---|---|---|---|---|",
    ]
    for name, (sampling, precision) in ways.items():
        print(f"{name}:")
        with WAYS[args.through](args.checkpoint, precision) as generate:
            made = gate.make(generate, gate.held_out_scenes(args.requests), sampling)
        found = gate.figures(made)
        gate.write(args.out / name.replace(" ", "-"), made, found)
        own = intervals.mean([psnr(one.clip, other.clip) for one, other in zip(made, right, strict=True)])
        figures = (
            gate.text("score", found["score"]),
            gate.text("likeness_db", found["likeness_db"]),
            own.text(1, 1) + " dB",
        )
        lines.append(f"| {name} | {' | '.join(figures)} | {_fell(right, made, found) or 'nothing'} |")
    print("\n".join(lines))


def _fell(right: Sequence[gate.Made], made: Sequence[gate.Made], found: gate.Figures) -> str:
    return ", ".join(
        f"{key.removesuffix('_db').replace('_', ' ')} to {gate.text(key, found[key])}" for key in fallen(right, made)
    )


def _try_mistakes(args: argparse.Namespace, right: Sequence[gate.Made]) -> None:
    """Print, as a table for docs/quality.md, what each mistake makes of the figures."""
    scenes = gate.held_out_scenes(args.requests)
    lines = ["| mistake | score (95 % interval) | what it lowers |", "|---|---|---|"]
    for name, mistake in MISTAKES.items():
        print(f"{name}:")
        with tempfile.TemporaryDirectory() as folder:
            generate = mistaken(mistake, args.checkpoint, Path(folder), args.dtype)
            made = gate.make(generate, scenes, mistake.sampling)
        found = gate.figures(made)
        gate.write(args.out / name.replace(" ", "-"), made, found)
        noticed = _fell(right, made, found) or f"nothing; `{mistake.caught_by}`"
        lines.append(f"| {name} | {gate.text('score', found['score'])} | {noticed} |")
    print("\n".join(lines))


def _parser() -> argparse.ArgumentParser:
    default = gate.Sampling()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path("examples/small-wan2.2-i2v"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("build/quality"))
    parser.add_argument("--through", choices=list(WAYS), default="process", help="which way the requests are made")
    add_precision(parser, default="float32")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--guidance", type=float, default=default.guidance)
    parser.add_argument("--shift", type=float, help="the checkpoint's when left out")
    parser.add_argument("--no-opposites", action="store_true", help="half the time, without the figure for sentences")
    parser.add_argument("--cheaper", action="store_true", help="then with four steps, adapters, a cache: what it costs")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="then in each of these: what it costs")
    parser.add_argument("--mistakes", action="store_true", help="then make each known mistake, and say what it costs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
