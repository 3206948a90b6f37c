"""Video sparse attention by FastVideo's own class for MiniMax-H3, on the CPU.

`scripts/compare_fasth3.py` runs this file with the folder of FastVideo's unpacked wheel. Only the class and what it
needs are imported: the packages around it need a GPU's libraries. Its kernel, which needs a GPU, is replaced by the
masked attention that it computes; tiles, means, scores, masks and the coarse branch are FastVideo's.
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch


def import_backend(folder: Path) -> Any:
    """Import the module of the class, without the code of the packages around it."""
    for name in ("fastvideo", "fastvideo.attention", "fastvideo.attention.backends", "fastvideo.distributed"):
        package: Any = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    package.get_sp_group = lambda: None  # Of the last one, and only asked on several devices.
    backend: Any = importlib.import_module("fastvideo.attention.backends.video_sparse_attn_h3")
    backend.block_sparse_attn_64_bhsd = attend
    return backend


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sizes: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Return attention of [1, N, 64 T, D] to the tiles of a mask [1, N, T, T], and nothing for its second result."""
    real = (torch.arange(64)[None] < sizes[:, None]).flatten()
    keys = mask.repeat_interleave(64, 2).repeat_interleave(64, 3) & real
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keys), None


def main(folder: str, given: str, made: str) -> None:
    """Compute every case of `given`, and write results and masks to `made`."""
    backend, cases, results = import_backend(Path(folder)), dict(np.load(given)), {}
    masks, build = list[torch.Tensor](), backend._build_block_mask

    def build_and_keep(*arguments: Any) -> torch.Tensor:
        masks.append(build(*arguments))
        return masks[-1]

    backend._build_block_mask = build_and_keep
    for case in sorted({name.partition(" ")[0] for name in cases}):
        q, k, v, gate = (torch.from_numpy(cases[f"{case} {name}"])[None] for name in ("q", "k", "v", "gate"))
        grid, segments = (tuple(map(int, cases[f"{case} {name}"])) for name in ("grid", "segments"))
        metadata = backend.MiniMaxH3VSAMetadataBuilder().build(
            current_timestep=0,
            raw_latent_shape=(grid[0], 2 * grid[1], 2 * grid[2]),
            patch_size=(1, 2, 2),
            VSA_sparsity=float(cases[f"{case} sparsity"]),
            prefix_segments=segments,
            device=torch.device("cpu"),
            tile_size=64,
        )
        attention = backend.MiniMaxH3VSAImpl(q.shape[2], q.shape[3], False, q.shape[3] ** -0.5)
        tiled = [attention.preprocess_qkv(x, metadata).clone() for x in (q, k, v, gate)]
        out = attention.postprocess_output(attention.forward(*tiled, metadata), metadata)
        results[f"{case} out"], results[f"{case} mask"] = out[0].numpy(), masks[-1][0].numpy()
    np.savez(made, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
