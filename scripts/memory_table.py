#!/usr/bin/env python3
"""Write the table of what the shipped layouts' stages need of a device's memory, from compiled programs.

    memory_table.py actors/api/memory.json

The service reads it to refuse what can't fit (docs/serving.md). Ten full-size programs are compiled by libtpu's
compiler (`pip install ".[aot]"`), about a minute each on a core; no TPU and no weights are needed. What was compiled
once is kept in --cache.
"""

import argparse
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # slices are described, this machine's own accelerators stay untouched

import jax
from described import described

from cluster.slice_spec import SliceSpec
from wan_tpu import GenerationRequest
from wan_tpu.aot import key
from wan_tpu.aot.compiling import GIB, Job, compile_job
from wan_tpu.aot.programs import AbstractRuntime, stage_programs
from wan_tpu.errors import WanTpuError
from wan_tpu.families.wan import WanModel
from wan_tpu.families.wan_presets import PRESETS
from wan_tpu.mesh import make_mesh
from wan_tpu.request import ResolvedRequest

MODEL, DTYPE = "wan2.2-i2v-a14b", "bfloat16"
SMALL, LARGE, LONG = (480, 832, 81), (720, 1280, 81), (720, 1280, 161)
STEP = "denoise step"
# Of the layouts cluster/layouts/a14b-*: slice, mesh, program, sizes. The third size of the first shows how straight
# the line through the other two is.
WANTED = (
    ("v6e-8", (2, 1, 4), STEP, (SMALL, LARGE, LONG)),
    ("v6e-16", (2, 1, 8), STEP, (SMALL, LARGE)),
    ("v6e-4", (2, 1, 2), "text_encoder", (LARGE,)),
    ("v6e-4", (2, 1, 2), "vae_encoder later", (SMALL, LARGE)),
    ("v6e-4", (2, 1, 2), "decoder later", (SMALL, LARGE)),
)


def main() -> int:
    """Compile, and write the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--cache", type=Path, default=home / "wan-tpu" / "plan", help="default %(default)s")
    args = parser.parse_args()
    try:
        rows = [row for wanted in WANTED for row in _rows(*wanted, args.cache)]
    except WanTpuError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = {
        "made": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python scripts/memory_table.py actors/api/memory.json",
        "versions": {package: key.version(package) for package in key.PACKAGES},
        "unit": "GiB a device; request is what each request on it holds between its steps, which other includes once",
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    args.file.write_text(f'{{"about": {json.dumps(about, indent=2)},\n"programs": [\n{lines}\n]}}\n')
    return 0


def _rows(
    slice_: str, mesh: tuple[int, int, int], program: str, sizes: tuple[tuple[int, int, int], ...], cache: Path
) -> Iterator[dict[str, Any]]:
    """Yield a row for each size."""
    place = described(SliceSpec(slice_))
    for height, width, frames in sizes:
        start = time.monotonic()
        job = Job(MODEL, program, place, mesh, height, width, frames, steps=40, guidance_scale=3.5, dtype=DTYPE)
        compiled, _ = compile_job(job, cache)
        print(f"{slice_} {program} {height}x{width}x{frames}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        if not compiled.other_bytes:
            raise WanTpuError(f"{slice_} {program} {height}x{width}x{frames}: {compiled.refused}")
        yield {
            "model": MODEL,
            "dtype": DTYPE,
            "slice": slice_,
            "mesh": mesh,
            "program": program,
            "height": height,
            "width": width,
            "frames": frames,
            "weights": round(compiled.weights_bytes / GIB, 3),
            "other": round(compiled.other_bytes / GIB, 3),
            "request": round(_request_bytes(job) / GIB, 3) if program == STEP else 0.0,
            "fits": not compiled.refused,
        }


def _request_bytes(job: Job) -> int:
    """Return the bytes that a request on an expert holds on a device: latents, history, conditioning, text keys."""
    model = WanModel(PRESETS[job.model])
    request: ResolvedRequest = GenerationRequest(
        height=job.height, width=job.width, frames=job.frames, steps=job.steps
    ).resolve(model.defaults)
    mesh = make_mesh(job.mesh, heads=model.heads, devices=job.slice.devices())
    runtime = AbstractRuntime(model, mesh, job.dtype)
    _, (_, [held]), _ = stage_programs(runtime, request, ("denoise_high",))[job.program]
    leaves = jax.tree.leaves(held)
    shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in leaves]
    return sum(math.prod(shape) * size for shape, size in shards)


if __name__ == "__main__":
    sys.exit(main())
