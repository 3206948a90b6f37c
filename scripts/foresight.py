#!/usr/bin/env python3
"""Predict programs of others whose measured times are published, and print both: how far our predictions go.

    python scripts/foresight.py --pedia gpu-tpu-pedia --maxdiffusion maxdiffusion --packages folder --plot foresight.png

Needs libtpu, no TPU. Rows that were measured with others' own code compile it from a checkout, and are left out
without: github.com/yangwhale/gpu-tpu-pedia (its attention kernel), github.com/AI-Hypercomputer/maxdiffusion (its
transformer and its kernels). The latter wants packages that this environment lacks:

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

from cluster.errors import ClusterError
from wan_tpu.cli import run
from wan_tpu.pricing.compiling import READABLE
from wan_tpu.pricing.cost import Times
from wan_tpu.versions import version


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pedia", type=Path, help="a checkout of github.com/yangwhale/gpu-tpu-pedia")
    parser.add_argument("--maxdiffusion", type=Path, help="a checkout of github.com/AI-Hypercomputer/maxdiffusion")
    parser.add_argument("--packages", type=Path, help="a folder of packages that it wants and this environment lacks")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "wan-tpu" / "plan")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, too")
    parser.add_argument("--only", default="", help="rows that have this in their name")
    args = parser.parse_args()
    os.environ["LIBTPU_INIT_ARGS"] = READABLE
    print("| what | slice | measured | floor | estimate | error of the floor | of the estimate |")
    print("|---|---|---|---|---|---|---|")
    if args.packages:
        sys.path.append(str(args.packages))
    found = []
    pricing = functools.cache(lambda kind: Pricing(kind, args.cache))
    for row in rows(args.pedia, args.maxdiffusion):
        if args.only in row.what:
            times = row.predict(pricing(row.slice))
            found.append((row, times))
            seconds = f"{_span(*row.measured)} | {times.floor:.4g} | {times.estimate:.4g}"
            print(
                f"| {row.what} | {row.slice} | {seconds} | {_error(times.floor, row)} | {_error(times.estimate, row)} |"
            )
            sys.stdout.flush()
    print(f"\nWhat differs, besides versions of JAX (here {jax.__version__}, libtpu {version('libtpu')}):")
    for row, _ in found:
        print(f"- {row.what} ({row.source}): {'; '.join(row.differs) or 'nothing known'}")
    if args.plot:
        draw(found, args.plot)


def draw(found: Sequence[tuple[Row, Times]], path: Path) -> None:
    """Draw from floor to estimate, by what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.42 * len(found) + 1.2))
    axes = figure.subplots()
    for y, (row, times) in enumerate(reversed(found)):
        least, most = row.measured
        middle = (least + most) / 2
        axes.barh(y, (most - least) / middle, left=least / middle, height=0.7, color="0.85")
        axes.plot([times.floor / middle, times.estimate / middle], [y, y], "o-", color="C0", markersize=5)
    axes.axvline(1, color="0.4", linewidth=1)
    axes.set_yticks(range(len(found)), [row.what for row, _ in reversed(found)])
    axes.set_xlabel("predicted by measured, from floor to estimate; grey: measured twice")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _span(least: float, most: float) -> str:
    return f"{least:g} s" if least == most else f"{least:g} to {most:g} s"


def _error(predicted: float, row: Row) -> str:
    """Return how far a prediction is from what was measured; within it, 0."""
    nearest = min(max(predicted, row.measured[0]), row.measured[1])
    return f"{100 * (predicted / nearest - 1):+.0f} %"


if __name__ == "__main__":
    sys.exit(run(lambda _: main(), expected=(ClusterError, ValueError, OSError)))
