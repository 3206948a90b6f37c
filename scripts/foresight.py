#!/usr/bin/env python3
r"""Predict the times of other people's programs whose measured times are published, and print both for comparison.

    python scripts/foresight.py --pedia gpu-tpu-pedia --maxdiffusion maxdiffusion --packages folder --plot foresight.png

This needs libtpu, but no TPU. Rows that were measured with other people's code compile it from a checkout, and are left
out without one: github.com/yangwhale/gpu-tpu-pedia (its attention kernel) and github.com/AI-Hypercomputer/maxdiffusion
(its transformer and its kernels). The latter needs packages that this environment lacks:

    pip install --no-deps --target folder absl-py aqtp chex einops etils flax humanize ml_collections nest_asyncio \\
        optax orbax-checkpoint simplejson tensorboardX tensorstore toolz treescope
"""

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # slices are described, this machine's own accelerators stay untouched

import jax
from published.pricing import Pricing, Row
from published.rows import rows

from actors.planning.calibration import load_calibration
from cluster.errors import ClusterError
from wan_tpu.cli import run
from wan_tpu.pricing.cost import Times
from wan_tpu.runtime.program import ON_TENSOR_CORE
from wan_tpu.versions import installed_version

WITHIN = 0.1  # The plot draws a band of this width around the measured times.


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pedia", type=Path, help="a checkout of github.com/yangwhale/gpu-tpu-pedia")
    parser.add_argument("--maxdiffusion", type=Path, help="a checkout of github.com/AI-Hypercomputer/maxdiffusion")
    parser.add_argument("--packages", type=Path, help="a folder of packages that it wants and this environment lacks")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "wan-tpu" / "plan")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, too")
    parser.add_argument("--only", default="", help="rows that have this in their name")
    parser.add_argument(
        "--calibration", type=Path, help="doctor.json: rows of that chip only, with its measured figures"
    )
    args = parser.parse_args()
    calibration = None if args.calibration is None else load_calibration(args.calibration)
    # These flags apply to other people's programs, too, because JAX 0.10 can't read a program that uses SparseCores.
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--{name}={value}" for name, value in ON_TENSOR_CORE.items())
    print("| what | slice | measured | floor | estimate | error of the floor | of the estimate |")
    print("|---|---|---|---|---|---|---|")
    if args.packages:
        sys.path.append(str(args.packages))
    predicted = []
    pricing = functools.cache(lambda kind: Pricing(kind, args.cache, calibration))
    for row in rows(args.pedia, args.maxdiffusion):
        if args.only in row.title and (calibration is None or calibration.chip == _chip(row)):
            times = row.predict(pricing(row.slice))
            predicted.append((row, times))
            seconds = f"{_span(*row.measured)} | {times.floor:.4g} | {times.estimate:.4g}"
            errors = f"{_error(times.floor, row)} | {_error(times.estimate, row)}"
            print(f"| {row.title} | {row.slice} | {seconds} | {errors} |")
            sys.stdout.flush()
    if calibration is not None:
        print("\n" + "\n".join(dict.fromkeys(pricing(row.slice).slice.calibrated for row, _ in predicted)))
    print(f"\nWhat differs, besides versions of JAX (here {jax.__version__}, libtpu {installed_version('libtpu')}):")
    for row, _ in predicted:
        print(f"- {row.title} ({row.source}): {'; '.join(row.differs) or 'nothing known'}")
    if args.plot:
        draw(predicted, args.plot)


def draw(pairs: Sequence[tuple[Row, Times]], path: Path) -> None:
    """Draw each prediction, from floor to estimate, over the measured time, in the colour of its chip."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    chips = sorted({_chip(row) for row, _ in pairs})
    colours = dict(zip(chips, ("#4477AA", "#EE7733", "#228833", "#AA3377"), strict=False))
    figure = Figure(figsize=(12, 0.42 * len(pairs) + 2.2), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(1 - WITHIN, 1 + WITHIN, color="#EEF3E6", zorder=0)
    for y, (row, times) in enumerate(reversed(pairs)):
        least, most = row.measured
        middle, colour = (least + most) / 2, colours[_chip(row)]
        floor, estimate = times.floor / middle, times.estimate / middle
        axes.barh(y, (most - least) / middle, left=least / middle, height=0.7, color="0.78", zorder=1)
        axes.plot([floor, estimate], [y, y], color=colour, linewidth=2, zorder=2)
        axes.plot(floor, y, "o", color=colour, markerfacecolor="white", markersize=7, zorder=3)
        axes.plot(estimate, y, "o", color=colour, markersize=7, zorder=3)
    axes.axvline(1, color="0.3", linewidth=1, zorder=1)
    axes.set_yticks(range(len(pairs)), [f"{row.title}  ({row.slice})" for row, _ in reversed(pairs)], fontsize=9)
    axes.grid(axis="x", color="0.9", zorder=0)
    axes.set_xlabel("predicted seconds / measured seconds")
    title = "Published TPU measurements, and what is predicted for the same programs"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    handles = [
        *(Line2D([], [], color=colour, linewidth=2, label=chip) for chip, colour in colours.items()),
        Line2D([], [], linestyle="", marker="o", color="0.3", markerfacecolor="white", label="floor"),
        Line2D([], [], linestyle="", marker="o", color="0.3", label="estimate"),
        Patch(color="0.78", label="between two published measurements"),
        Patch(color="#EEF3E6", label=f"within {WITHIN:.0%} of the measured time"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def _chip(row: Row) -> str:
    return row.slice.partition("-")[0]


def _span(least: float, most: float) -> str:
    return f"{least:g} s" if least == most else f"{least:g} to {most:g} s"


def _error(predicted: float, row: Row) -> str:
    """Return how far a prediction is from the measured range; 0 within it."""
    nearest = min(max(predicted, row.measured[0]), row.measured[1])
    return f"{100 * (predicted / nearest - 1):+.0f} %"


if __name__ == "__main__":
    sys.exit(run(lambda _: main(), expected=(ClusterError, ValueError, OSError)))
