#!/usr/bin/env python3
"""Compare MiniMax-H3's `turbo-4-sla` with LightX2V's own code: lists of blocks, attention, noise levels and steps.

    python scripts/compare_sla.py FOLDER

FOLDER is a checkout of github.com/ModelTC/LightX2V at f8aee98. Its Triton kernels run under Triton's interpreter, on
the CPU; PyPI's torch for Linux brings Triton. Each line states how many of the lists of blocks differ, and how many of
their entries. The gap is the largest difference between the exact scores of an entry that only one of both has and of
the last one kept, relative to the list's largest. Then comes the largest difference of attention's results, relative to
the largest.

In float32 all lists must be the same. In bfloat16 LightX2V rounds means and scores, too: entries may differ whose
scores are nearly equal. Its attention is compared in float32 alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.families import published_spec
from wan_tpu.families.minimax_h3.sampling import DENSITIES
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.local_heads import LocalHeads
from wan_tpu.ops.sparse_linear import SparseLinear, choose_blocks, sparse_linear_attention
from wan_tpu.plan import AUDIO, VIDEO
from wan_tpu.request import GenerationRequest
from wan_tpu_kernels.two_blocks import KEYS, QUERIES

ROOT = Path(__file__).resolve().parent.parent
PRESET, SETTINGS = "turbo-4-sla", "configs/minimax_h3/dmd/minimax_h3_fp8_4step_5090_with_fp8_vae_sla.json"
HEADS, WIDTH = 2, 128
# Rows of a text, as its own layers have, and of whole sequences. Few blocks, partial ones, and more.
LENGTHS = 23, 64, 130, 500, 1281, 2777, 9001, 20_000
LONGEST_ATTENTION = 2777  # The interpreter is slow.
# In float32, lists are the same. In bfloat16 both means are rounded by up to 2^-9, and so is their product.
GAPS = {"float32": 0.0, "bfloat16": 2**-6}
LIMIT = 4e-6


def main() -> int:
    """Print the differences; return 1 if one is larger than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of LightX2V")
    checkout = parser.parse_args().folder.resolve()
    given: dict[str, Any] = {"blocks": np.array([QUERIES, KEYS])}
    rng = np.random.default_rng(0)
    for dtype in GAPS:
        for rows in LENGTHS:
            arrays = [rng.standard_normal((rows, HEADS, WIDTH)).astype(np.float32) for _ in range(3)]
            arrays[1] += 2 * rng.standard_normal((HEADS, WIDTH)).astype(np.float32)  # What all keys of a head share.
            given |= {f"{dtype} {rows} {part}": value for part, value in zip("qkv", arrays, strict=True)}
            given[f"{dtype} {rows} attend"] = np.array(dtype == "float32" and rows <= LONGEST_ATTENTION)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "given.npz", **given)
        script = ROOT / "scripts" / "published" / "lightx2v_sla.py"
        files = script, checkout, checkout / SETTINGS, folder / "given.npz", folder / "made.npz"
        subprocess.run([sys.executable, *map(str, files)], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})
        theirs, fails = dict(np.load(folder / "made.npz")), False
    print(f"{'dtype':10}{'rows':>7}{'lists':>7}{'differ':>8}{'entries':>9}{'gap':>9}{'results':>10}")
    for dtype in GAPS:
        for rows in LENGTHS:
            case = f"{dtype} {rows}"
            q, k, v = (given[f"{case} {part}"] for part in "qkv")
            mask, out = attend(q, k, v, dtype)
            expected = theirs[f"{case} mask"]
            differ, moved = (mask != expected).any(axis=2), (mask & ~expected).sum() / expected.sum()
            gap = measure_gap(q, k, mask, expected)
            line = f"{dtype:10}{rows:7}{differ.size:7}{differ.sum():8}{moved:9.2%}{gap:9.1e}"
            fails |= gap > GAPS[dtype]
            if f"{case} out" in theirs:
                error = float(np.abs(out - theirs[f"{case} out"]).max() / np.abs(theirs[f"{case} out"]).max())
                line, fails = f"{line}{error:10.1e}", fails | (error > LIMIT)
            print(line)
    for part, error in compare_steps(theirs).items():
        print(f"{part:25}{error:10.1e}")
        fails |= error > LIMIT
    return int(fails)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks of keys each block of queries attends to, bool [N, blocks, blocks], and results [L, N, D].

    Rows are padded, and their number is an argument, as in the model.
    """
    rows, layer = len(q), SparseLinear(DENSITIES[PRESET])
    arrays = [x.reshape(rows, -1) for x in (q * np.float32(query_scale(WIDTH)), k, v)]
    padding = (0, -rows % QUERIES + QUERIES), (0, 0)
    padded = [jnp.asarray(np.pad(x, padding, constant_values=np.nan), dtype) for x in arrays]

    @jax.jit
    def compute(q: jax.Array, k: jax.Array, v: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        lists = choose_blocks(q, k, layer, heads=HEADS, width=WIDTH, kv_len=count, kernels=False)[0]
        if rows > LONGEST_ATTENTION:
            return lists, None
        local = LocalHeads(q, k, v, heads=HEADS, width=WIDTH, kv_len=count, platform="cpu")
        return lists, sparse_linear_attention(local, layer).settle()

    lists, out = compute(*padded, jnp.int32(rows))
    blocks = np.arange(-(-rows // KEYS))
    mask = (np.asarray(lists)[:, : -(-rows // QUERIES), :, None] == blocks).any(axis=2)
    return mask, np.zeros(()) if out is None else np.asarray(out[:rows], np.float32).reshape(q.shape)


def measure_gap(q: np.ndarray, k: np.ndarray, mask: np.ndarray, expected: np.ndarray) -> float:
    """Return how far the scores that only one of two choices has are from the last one kept, relative to the largest.

    A list that differs has a gap above zero, unless two scores are equal in float64.
    """
    wide = q.astype(np.float64), k - k.mean(axis=0, dtype=np.float64)
    queries, keys = (
        np.stack([x[i : i + size].mean(axis=0) for i in range(0, len(x), size)])
        for x, size in zip(wide, (QUERIES, KEYS), strict=True)
    )
    scores = np.einsum("qnd,knd->nqk", queries, keys)
    last = np.sort(scores, axis=2)[..., ::-1][..., expected[0, 0].sum() - 1, None]
    largest = np.broadcast_to(np.abs(scores).max(axis=2, keepdims=True), scores.shape)
    differ = mask != expected
    return float((np.abs(scores - last)[differ] / largest[differ]).max(initial=0))


def compare_steps(theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest differences of noise levels, and of the latents after all steps with the same velocities."""
    spec, errors = published_spec("minimax-h3"), {}
    schedules = spec.schedules(spec.plan(GenerationRequest(prompt="a cat", preset=PRESET)).request)
    for part, name in ((VIDEO, "video"), (AUDIO, "audio")):
        schedule, latents = schedules[part], theirs[f"{name} start"].astype(np.float64)
        levels = np.append(1 - schedule.timesteps, 0)
        errors[f"{name}: noise levels"] = float(np.abs(levels - theirs[f"{name} sigmas"]).max())
        for number, velocity in enumerate(theirs[f"{name} velocities"]):
            clean = latents - schedule.sigmas[number] * velocity
            [latents] = schedule.matrices[number] @ np.stack([latents, clean])
        end = theirs[f"{name} end"]
        errors[f"{name}: after all steps"] = float(np.abs(latents - end).max() / np.abs(end).max())
    return errors


if __name__ == "__main__":
    sys.exit(main())
