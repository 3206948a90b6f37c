#!/usr/bin/env python3
"""Predict programs of others whose measured times are published, and print both: how far our predictions go.

    python scripts/foresight.py --pedia checkouts/gpu-tpu-pedia --plot foresight.png

Needs libtpu, no TPU. With --pedia, a checkout of github.com/yangwhale/gpu-tpu-pedia, its own attention kernel is
compiled for the rows that were measured with it; without, these are left out.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # slices are described, this machine's own accelerators stay untouched

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from published.torchax_steps import COGVIDEOX, WAN, Attend, exp2_splash, jax_splash, step

from actors.planning.described import described, run
from cluster.slice_spec import SliceSpec
from wan_tpu.pricing.analyse import analyse
from wan_tpu.pricing.compiling import READABLE
from wan_tpu.pricing.cost import Cost, Times
from wan_tpu.pricing.ici import interconnect_of
from wan_tpu.pricing.kernel_prices import KernelPrices, count_alone

PEDIA = "gpu-tpu-pedia"
PROFILE = f"{PEDIA} tpu/Wan2.2/docs/wan_tpu_optimization_guide.md"
LAYERS = 2, 4  # that are compiled; a step of all goes on from these in a straight line

Program = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Row:
    """Something measured, and how the same is predicted.

    measured  seconds, the least and the most where several were published
    predict   given what compiles and prices on that slice
    differs   what is known to be other than there
    """

    what: str
    slice: str
    measured: tuple[float, float]
    source: str
    predict: Callable[["Pricing"], Times]
    differs: str = ""


class Pricing:
    """Compiles programs for one described slice, and prices them."""

    def __init__(self, kind: str, cache: Path) -> None:
        """cache: where bundles of kernels are kept."""
        self.slice = described(SliceSpec(kind))
        self._devices = self.slice.devices()
        self._kernels = KernelPrices(cache, self.slice.hardware, self.slice.cores, count_alone)

    def mesh(self, **axes: int) -> Mesh:
        """Return a mesh over the first devices of the slice."""
        devices = self._devices[: int(np.prod(list(axes.values())))]
        return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))

    def cost(self, mesh: Mesh, program: Program) -> Cost:
        """Return what a program costs that is given as a function and its abstract arguments."""
        function, arguments = program
        with jax.set_mesh(mesh):
            text = jax.jit(function).lower(*arguments).compile().as_text() or ""
        cost = analyse(text, self.slice.hardware, interconnect_of(self.slice, mesh), kernel_cycles=self._kernels)
        if cost.unpriced:
            raise ValueError(f"not priced: {', '.join(cost.unpriced)}")
        return cost

    def step(self, layers: int, of: Callable[[int], Program], mesh: Mesh) -> Times:
        """Return the seconds of a step of so many layers; of: the program with that many."""
        few, more = (self.cost(mesh, of(count)).total for count in LAYERS)
        return few + (more + few * -1) * ((layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0]))


def attention_alone(pricing: Pricing) -> Times:
    """Five heads of 75,600 tokens on one chip."""
    attend = jax_splash((3024, 2048, 1024))
    queries, keys = (jax.ShapeDtypeStruct((5, rows, 128), jnp.bfloat16) for rows in (25 * 3024, 37 * 2048))
    mesh = pricing.mesh(x=1)
    return pricing.cost(mesh, (attend, _on(mesh, (queries, keys, keys)))).total


def all_to_alls(pricing: Pricing) -> Times:
    """Four of 96.8 MB a chip over eight chips: heads are exchanged for tokens, and back; without the copies around."""
    mesh = pricing.mesh(x=8)

    def exchange(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (jax.lax.all_to_all(x, "x", 0, 1, tiled=True) for x in (q, k, v))
        return jax.lax.all_to_all(q + k + v, "x", 1, 0, tiled=True)

    by_token = P(None, "x")
    shape = jax.ShapeDtypeStruct((40, 75_600, 128), jnp.bfloat16, sharding=NamedSharding(mesh, by_token))
    sharded = jax.shard_map(exchange, mesh=mesh, in_specs=(by_token,) * 3, out_specs=by_token, check_vma=False)
    return pricing.cost(mesh, (sharded, (shape,) * 3)).by_category()["collectives"]


def wan_step(attend: Attend) -> Callable[[Pricing], Times]:
    """Wan 2.1 14B T2V, 720x1280, 81 frames, guided, dp 2 x tp 4."""

    def predict(pricing: Pricing) -> Times:
        from diffusers import WanTransformer3DModel

        from wan_tpu.families.wan.presets import TRANSFORMER_14B

        mesh = pricing.mesh(dp=2, tp=4)
        inputs = {
            "hidden_states": _by_branch(mesh, 2, 16, 21, 90, 160),
            "timestep": _by_branch(mesh, 2, dtype="float32"),
            "encoder_hidden_states": _by_branch(mesh, 2, 226, 4096),
        }

        def of(layers: int) -> Program:
            module = _on_meta(WanTransformer3DModel, TRANSFORMER_14B | {"num_layers": layers})
            return step(module, WAN, mesh, inputs, attend)

        return pricing.step(40, of, mesh)

    return predict


def cogvideox_step(height: int, width: int, frames: int, attend: Attend) -> Callable[[Pricing], Times]:
    """CogVideoX 1.5 5B, guided, dp 2 x tp 4."""

    def predict(pricing: Pricing) -> Times:
        from diffusers import CogVideoXTransformer3DModel

        from wan_tpu.families.cogvideox.presets import TRANSFORMER_15

        mesh = pricing.mesh(dp=2, tp=4)
        latent_frames = (frames - 1) // 4 + 1
        latent_frames += latent_frames % 2
        tokens = latent_frames // 2 * (height // 16) * (width // 16)
        table = jax.ShapeDtypeStruct((tokens, 64), "float32", sharding=NamedSharding(mesh, P()))
        inputs = {
            "hidden_states": _by_branch(mesh, 2, latent_frames, 16, height // 8, width // 8),
            "timestep": _by_branch(mesh, 2, dtype="int32"),
            "encoder_hidden_states": _by_branch(mesh, 2, 226, 4096),
            "image_rotary_emb": (table, table),
        }

        def of(layers: int) -> Program:
            module = _on_meta(CogVideoXTransformer3DModel, TRANSFORMER_15 | {"num_layers": layers})
            return step(module, COGVIDEOX, mesh, inputs, attend)

        return pricing.step(42, of, mesh)

    return predict


def rows(pedia: Path | None) -> Iterator[Row]:
    """Yield what can be predicted here."""
    yield Row(
        "JAX's splash attention, 5 heads of 75,600", "v6e-1", (0.04393, 0.04393), f"{PROFILE}, 4.1", attention_alone
    )
    yield Row("four all-to-alls of a layer, 8 chips", "v6e-8", (0.0044, 0.0044), f"{PROFILE}, 6.2", all_to_alls)
    yield Row(
        "Wan 2.1 14B, a guided step, splash",
        "v6e-8",
        (5.3, 5.9),
        f"{PEDIA} tpu/Wan2.1/README.md",
        wan_step(jax_splash()),
    )
    if pedia is None:
        return
    attend = exp2_splash(pedia)
    yield Row(
        "Wan 2.1 14B, a guided step, exp2", "v6e-8", (4.59, 4.59), f"{PEDIA} tpu/Wan2.1/README.md", wan_step(attend)
    )
    # The second is published as of 81 frames, at 8 a second, where fewer pixels took 2.08 s: five seconds of 8 are 41.
    for height, width, frames, measured in ((720, 1280, 81, (2.08, 2.13)), (768, 1360, 41, (1.13, 1.13))):
        yield Row(
            f"CogVideoX 1.5 5B, {height}x{width}, {frames} frames, a guided step, exp2", "v6e-8", measured,
            f"{PEDIA} tpu/CogVideoX/README.md", cogvideox_step(height, width, frames, attend),
        )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pedia", type=Path, help="a checkout of github.com/yangwhale/gpu-tpu-pedia")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "wan-tpu" / "plan")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, too")
    parser.add_argument("--only", default="", help="rows that have this in their name")
    args = parser.parse_args()
    os.environ["LIBTPU_INIT_ARGS"] = READABLE
    print("| what | slice | measured | floor | estimate | error of the floor | of the estimate |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for row in rows(args.pedia):
        if args.only in row.what:
            times = row.predict(Pricing(row.slice, args.cache))
            found.append((row, times))
            seconds = f"{_span(*row.measured)} | {times.floor:.4g} | {times.estimate:.4g}"
            print(
                f"| {row.what} | {row.slice} | {seconds} | {_error(times.floor, row)} | {_error(times.estimate, row)} |"
            )
            sys.stdout.flush()
    if args.plot:
        draw(found, args.plot)


def draw(found: Sequence[tuple[Row, Times]], path: Path) -> None:
    """Draw from floor to estimate, by what was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(found) + 1.2))
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


def _on_meta(kind: Any, config: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        module: torch.nn.Module = kind.from_config(config)
    return module.to(torch.bfloat16).eval()


def _on(mesh: Mesh, shapes: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, P())), shapes
    )


def _by_branch(mesh: Mesh, *shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("dp")))


if __name__ == "__main__":
    run(main)
