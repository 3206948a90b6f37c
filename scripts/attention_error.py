#!/usr/bin/env python3
"""Measure the error of attention in 8 bits on random inputs, as MiniMax-H3 normalises and rotates them. No TPU needed.

    python scripts/attention_error.py [--queries 512] [--seed 0]

Q, K and V are drawn from N(0, 1) for a video of 8 x 24 x 24 tokens behind 64 of text. The kernel runs in Pallas'
interpreter, and is compared with attention in float32.
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.families.minimax_h3.classes import TRANSFORMER
from wan_tpu.families.minimax_h3.positions import place_rows
from wan_tpu.families.minimax_h3.transformer import rotary_tables
from wan_tpu_kernels.blocks import BlockSizes, Schedule
from wan_tpu_kernels.flash_attention import flash_attention, flash_attention_reference
from wan_tpu_kernels.head_norm_rope import head_norm_rope_reference

HEADS, TEXT = 2, 64
# The schedules of v6e and v7x.
BLOCKS = BlockSizes(512, 2048, Schedule(512), Schedule(512, columns=256, ahead=4, mxu_sums=True))
WAYS: dict[str, dict[str, Any]] = {"bfloat16": {}} | {
    f"{name}, {kind}": {"qk": kind} | ({"pv": kind} if name == "both" else {})
    for kind in ("int8", "float8_e4m3fn")
    for name in ("logits", "both")
}


def main() -> None:
    """Print the error of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=512, help="rows of Q that are compared; default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config, rng = SimpleNamespace(**TRANSFORMER), np.random.default_rng(args.seed)
    positions = place_rows((8, 48, 48), (2, 2), sound=0, text=TEXT, count=TEXT)
    tables, width = rotary_tables(config, jnp.asarray(positions)), config.attention_head_dim

    def draw() -> jax.Array:
        return jnp.asarray(rng.standard_normal((len(positions), HEADS * width), np.float32))

    def rotate(x: jax.Array) -> Any:
        return head_norm_rope_reference(x, jnp.ones(width), None, tables, eps=config.qk_norm_eps)

    rows = np.sort(rng.permutation(len(positions))[: args.queries])
    q, k, v = rotate(draw())[rows], rotate(draw()), draw()
    exact = np.asarray(jax.jit(lambda *x: flash_attention_reference(*x, heads=HEADS))(q, k, v), np.float64)
    rounded = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    print(f"{len(rows)} queries, {len(positions)} keys, {HEADS} heads of {width}")
    print(f"{'':24} {'cosine':>9} {'relative RMS error':>20}")
    for name, options in WAYS.items():
        options = {"heads": HEADS, "block_sizes": BLOCKS, "interpret": True} | options
        out = np.asarray(jax.jit(lambda *x, options=options: flash_attention(*x, **options))(*rounded), np.float64)
        cosine = (out * exact).sum() / np.linalg.norm(out) / np.linalg.norm(exact)
        error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
        print(f"{name:24} {cosine:9.6f} {error:20.3%}", flush=True)


if __name__ == "__main__":
    main()
