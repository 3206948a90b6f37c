#!/usr/bin/env python3
"""Compare FastH3's video sparse attention with FastVideo's own class, on random rows in float32.

    python scripts/compare_fasth3.py [--folder FOLDER]

FastVideo 0.2.1 is fetched from PyPI (4 MB) and unpacked; `--folder` names a folder in which it is. Each line states how
many of the lists of tiles differ, and the largest difference of the results relative to the largest result.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.local_heads import LocalHeads
from wan_tpu.ops.tiles import Tiles
from wan_tpu.ops.video_sparse import VideoSparse, choose_tiles, video_sparse_attention

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fastvideo==0.2.1"
HEADS, WIDTH, LIMIT = 2, 64, 2e-6
# The video's tokens; rows of text, keyframes and sound; the share of tiles that are left out.
CASES = [
    ((8, 8, 8), (64, 0, 64), 0.5),
    ((9, 6, 11), (30, 0, 54), 0.9),
    ((5, 7, 10), (100, 70, 30), 0.8),
    ((2, 3, 3), (1, 0, 8), 0.9),
    ((10, 8, 11), (130, 0, 77), 0.8),
]


def main() -> int:
    """Print the differences; return 1 if one is larger than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="FastVideo's unpacked wheel")
    unpacked = parser.parse_args().folder
    given, ours = dict[str, Any](), dict[int, tuple[np.ndarray, np.ndarray]]()
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), np.random.default_rng(0)
        for number, (grid, segments, sparsity) in enumerate(CASES):
            rows = sum(segments) + int(np.prod(grid))
            arrays = [rng.standard_normal((rows, HEADS, WIDTH)).astype(np.float32) for _ in range(4)]
            given |= {f"{number} {part}": value for part, value in zip(("q", "k", "v", "gate"), arrays, strict=True)}
            given |= {f"{number} grid": grid, f"{number} segments": segments, f"{number} sparsity": sparsity}
            ours[number] = attend(arrays, grid, segments, sparsity)
        np.savez(folder / "given.npz", **given)
        script = ROOT / "scripts" / "published" / "fastvideo_vsa.py"
        files = script, unpacked or fetch(folder), folder / "given.npz", folder / "made.npz"
        subprocess.run([sys.executable, *map(str, files)], check=True)
        theirs, fails = np.load(folder / "made.npz"), False
        print(f"{'grid':16}{'segments':20}{'left out':>9}{'lists':>7}{'differ':>7}{'results':>10}")
        for number, (grid, segments, sparsity) in enumerate(CASES):
            out, mask = ours[number]
            expected, chosen = theirs[f"{number} out"], theirs[f"{number} mask"]
            differ, error = int((mask != chosen).any(axis=2).sum()), float(np.abs(out - expected).max())
            error /= float(np.abs(expected).max())
            shape = f"{'x'.join(map(str, grid)):16}{'+'.join(map(str, segments)):20}"
            print(f"{shape}{sparsity:9}{mask.shape[0] * mask.shape[1]:7}{differ:7}{error:10.1e}")
            fails |= differ > 0 or error > LIMIT
    return int(fails)


def fetch(folder: Path) -> Path:
    """Fetch the wheel, and return the folder in which it is unpacked."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(download, check=True)
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "fastvideo")
    return folder / "fastvideo"


def attend(
    arrays: list[np.ndarray], grid: tuple[int, ...], segments: tuple[int, ...], sparsity: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return our results and which tiles attend to which, in FastVideo's orders of rows [L, N, D] and tiles."""
    text, *others = segments
    tiles = Tiles(grid, (*others, text))  # type: ignore[arg-type]
    order = np.concatenate([sum(segments) + tiles.order, text + np.arange(sum(others)), np.arange(text)])
    q, k, v, gate = (x[order].reshape(len(order), -1) for x in arrays)
    layer = VideoSparse(tiles, tiles.kept(sparsity))
    scaled = q * np.float32(query_scale(WIDTH))

    @jax.jit
    def compute(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        local = LocalHeads(q, k, v, heads=HEADS, width=WIDTH, kv_len=len(order), platform="cpu")
        attempt, coarse = video_sparse_attention(local, layer)
        return attempt.settle(), coarse

    fine, coarse = compute(scaled, k, v)
    sums = np.zeros_like(fine)
    sums[order] = fine + coarse[tiles.of_rows] * gate
    return sums.reshape(arrays[0].shape), _list_masks(scaled, k, layer, order)


def _list_masks(q: np.ndarray, k: np.ndarray, layer: VideoSparse, order: np.ndarray) -> np.ndarray:
    """Return which tiles attend to which, bool [N, T, T], with tiles in FastVideo's order."""
    tiles = layer.tiles
    sums = [np.add.reduceat(x.reshape(len(x), HEADS, -1), tiles.starts) for x in (q, k)]
    means = [x / tiles.sizes[:, None, None] for x in sums]
    scores = np.einsum("qnd,knd->nqk", *means)
    lists = np.asarray(choose_tiles(jax.numpy.asarray(scores, jax.numpy.float32), layer))
    mask = np.ones((HEADS, len(tiles.sizes), len(tiles.sizes)), bool)
    mask[:, : tiles.video, : tiles.video] = (lists[..., None] == np.arange(tiles.video)).any(axis=2)
    if layer.kept == tiles.video:
        mask[:] = True
    # FastVideo's order of tiles is that of their first rows.
    first = np.argsort(order[tiles.starts])
    return mask[:, first][:, :, first]


if __name__ == "__main__":
    sys.exit(main())
