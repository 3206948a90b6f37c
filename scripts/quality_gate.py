#!/usr/bin/env python3
"""Make clips of held-out scenes with a checkpoint and report their quality: figures with intervals, contact sheets.

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
from demo_model.generators import GENERATORS
from demo_model.score import psnr
from demo_model.variants import EIGHT_BITS, MISTAKES, errors_of_layers, find_lowered, list_cheaper, load_mistaken

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
    with GENERATORS[args.through](args.checkpoint, args.dtype) as generate:
        clips = gate.make_clips(generate, scenes, sampling)
        opposite_clips = [] if args.no_opposites else gate.make_clips(generate, gate.make_opposites(scenes), sampling)
    figures = {"vae_db": gate.measure_reconstruction(args.checkpoint, scenes)} | gate.compute_figures(
        clips, opposite_clips
    )
    gate.write(args.out, clips, figures)
    print(gate.format_table(figures))
    failed = [name for name, limit in LIMITS.items() if name in figures and figures[name].value < limit]
    for name in failed:
        print(f"below its limit: {name} is {figures[name].value:.3g}, the limit {LIMITS[name]:g}", file=sys.stderr)
    print(f"figures and contact sheets are in {args.out}")
    if args.mistakes:
        _try_mistakes(args, clips)
    if args.cheaper:
        _compare(
            {name: (sampling, args.dtype) for name, sampling in list_cheaper(args.checkpoint).items()}, args, clips
        )
    if args.precisions:
        _compare({name: (sampling, name) for name in args.precisions}, args, clips)
        print(errors_of_layers(args.checkpoint, [name for name in args.precisions if name in EIGHT_BITS]))
    return 1 if failed else 0


def _compare(
    ways: Mapping[str, tuple[gate.Sampling, str]], args: argparse.Namespace, right: Sequence[gate.ScoredClip]
) -> None:
    """Print the figures of cheaper sampling and precisions, as a table for docs/quality.md."""
    lines = [
        "| way | score (95 % interval) | likeness | like the model's own clip | what it lowers |",
        "|---|---|---|---|---|",
    ]
    for name, (sampling, precision) in ways.items():
        print(f"{name}:")
        with GENERATORS[args.through](args.checkpoint, precision) as generate:
            clips = gate.make_clips(generate, gate.held_out_scenes(args.requests), sampling)
        figures = gate.compute_figures(clips)
        gate.write(args.out / name.replace(" ", "-"), clips, figures)
        likeness = intervals.mean([psnr(clip.clip, other.clip) for clip, other in zip(clips, right, strict=True)])
        cells = (
            gate.format_estimate("score", figures["score"]),
            gate.format_estimate("likeness_db", figures["likeness_db"]),
            likeness.text(1, 1) + " dB",
        )
        lines.append(f"| {name} | {' | '.join(cells)} | {_fell(right, clips, figures) or 'nothing'} |")
    print("\n".join(lines))


def _fell(right: Sequence[gate.ScoredClip], clips: Sequence[gate.ScoredClip], figures: gate.Figures) -> str:
    return ", ".join(
        f"{key.removesuffix('_db').replace('_', ' ')} to {gate.format_estimate(key, figures[key])}"
        for key in find_lowered(right, clips)
    )


def _try_mistakes(args: argparse.Namespace, right: Sequence[gate.ScoredClip]) -> None:
    """Print the figures of each mistake, as a table for docs/quality.md."""
    scenes = gate.held_out_scenes(args.requests)
    lines = ["| mistake | score (95 % interval) | what it lowers |", "|---|---|---|"]
    for name, mistake in MISTAKES.items():
        print(f"{name}:")
        with tempfile.TemporaryDirectory() as folder:
            generate = load_mistaken(mistake, args.checkpoint, Path(folder), args.dtype)
            clips = gate.make_clips(generate, scenes, mistake.sampling)
        figures = gate.compute_figures(clips)
        gate.write(args.out / name.replace(" ", "-"), clips, figures)
        noticed = _fell(right, clips, figures) or f"nothing; `{mistake.caught_by}`"
        lines.append(f"| {name} | {gate.format_estimate('score', figures['score'])} | {noticed} |")
    print("\n".join(lines))


def _parser() -> argparse.ArgumentParser:
    default = gate.Sampling()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path("examples/small-wan2.2-i2v"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("build/quality"))
    parser.add_argument(
        "--through", choices=list(GENERATORS), default="process", help="which way the requests are made"
    )
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
