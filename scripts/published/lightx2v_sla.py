"""Lists and results of LightX2V's "dynamic_sparse_attn", and MiniMax-H3's noise levels, by its own code on the CPU.

`scripts/compare_sla.py` runs this file with the folder of a checkout of LightX2V, under Triton's interpreter: its
kernels of block means and of attention run, too. The modules around them, which need a GPU's libraries, aren't
imported. So its 8-bit attention, `sage2`, isn't run: attention is that of its own kernel for the same lists.

The interpreter cuts bits off where a GPU rounds to bfloat16, and multiplies bfloat16 wrongly (Triton 3.7.1). So block
means are computed in float32, as the kernel does, and rounded by torch; attention is for float32 alone.
"""

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

ATTENTION = Path("lightx2v/common/ops/attn")
PACKAGES = (
    "lightx2v",
    "lightx2v.models",
    "lightx2v.models.networks",
    "lightx2v.models.networks.minimax_h3",
    "lightx2v.models.schedulers",
    "lightx2v.models.schedulers.minimax_h3",
    "lightx2v_platform",
    "lightx2v_platform.base",
)


def import_file(path: Path) -> Any:
    """Import one file, without the packages around it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_scheduler(folder: Path) -> Any:
    """Import MiniMax-H3's scheduler, without the code of the packages around it."""
    for name in PACKAGES:
        package: Any = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    base: Any = types.ModuleType("lightx2v.models.schedulers.scheduler")
    base.BaseScheduler = object  # Whose module imports those of all models.
    sys.modules[base.__name__] = base
    return importlib.import_module("lightx2v.models.schedulers.minimax_h3.scheduler")


@torch.no_grad()
def main(folder: str, settings: str, given: str, made: str) -> None:
    """Compute every case of `given` with a configuration of theirs, and write lists, results and noise levels."""
    config, cases, results = json.loads(Path(settings).read_text()), dict(np.load(given)), dict[str, Any]()
    lists = import_file(Path(folder) / ATTENTION / "utils" / "sla_util.py")
    kernel = import_file(Path(folder) / ATTENTION / "kernels" / "sla_kernel.py")
    queries, keys = map(int, cases.pop("blocks"))
    compute_means = lists.mean_pool
    lists.mean_pool = lambda x, size: compute_means(x.float(), size).to(x.dtype)
    for case in sorted({name.rpartition(" ")[0] for name in cases}):
        dtype = getattr(torch, case.split()[0])
        q, k, v = (torch.from_numpy(cases[f"{case} {name}"]).to(dtype) for name in "qkv")
        q, k, v = (x[None].transpose(1, 2).contiguous() for x in (q, k, v))
        share = 1 - config["dynamic_sparse_attn_setting"]["sparsity_ratio"]
        chosen, entries, count = lists.get_block_map(q, k, topk_ratio=share, BLKQ=queries, BLKK=keys)
        results[f"{case} mask"] = chosen[0].bool().numpy()
        if cases[f"{case} attend"]:
            out = kernel._attention.apply(q, k, v, chosen, entries, count, queries, keys)
            results[f"{case} out"] = out[0].transpose(0, 1).float().numpy()
    scheduler, noise = import_scheduler(Path(folder)), torch.Generator().manual_seed(0)
    for part in ("video", "audio"):
        sigmas, times = scheduler._make_schedule(config["infer_steps"], config[f"{part}_flow_shift"], "cpu")
        latents = torch.randn(8, generator=noise)
        results[f"{part} sigmas"], results[f"{part} start"] = sigmas.numpy(), latents.numpy()
        velocities = torch.randn(len(times), 8, generator=noise)
        for number, velocity in enumerate(velocities):
            step = scheduler.MiniMaxH3Scheduler._step
            latents = step(latents, velocity, times[number], sigmas, number, config["h3_step_update"])
        results |= {f"{part} velocities": velocities.numpy(), f"{part} end": latents.numpy()}
    np.savez(made, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
