"""Run by test_halo.py on two devices: VAE halves on several meshes, into an npz.

Arguments: where to write, then three for every case: a checkpoint's folder, a latent width, and how it is cut
("1x1x2,...": meshes). Entries are named kind/width/half/cut.
"""

import sys
from pathlib import Path

import numpy as np

from wan_tpu import load_pipeline
from wan_tpu.runtime.program import place
from wan_tpu.stages import vae_programs

FRAMES, ROWS = 2, 3  # latent frames and rows


def run(runtime, component, chunks):
    """Return a VAE half's output for its chunks of input, [1, C, T, H, W]."""
    loaded = runtime.component(component)
    _, first, later = vae_programs(runtime, component, loaded.module, len(chunks))
    out, _, cache = first(loaded.params, place(chunks[0], runtime.mesh))
    outputs = [out[0] if component == "decoder" else out]
    for chunk in chunks[1:]:
        out, _, cache = later(loaded.params, place(chunk, runtime.mesh), cache)
        outputs.append(out[0] if component == "decoder" else out)
    return np.concatenate([np.asarray(out) for out in outputs], axis=2)


out, *arguments = sys.argv[1:]
results = {}
for folder, width, cuts in zip(*[iter(arguments)] * 3, strict=True):
    for cut in cuts.split(","):
        runtime = load_pipeline(folder, dtype="float32", mesh=tuple(map(int, cut.split("x")))).runtime
        model, rng = runtime.model, np.random.default_rng(0)
        scale = model.config.vae.get("scale_factor_spatial", 8)
        latents = rng.standard_normal((FRAMES, 1, model.spec.latent_channels, 1, ROWS, int(width))).astype(np.float32)
        shapes = [(1, 3, frames, ROWS * scale, int(width) * scale) for frames in [1] + [4] * (FRAMES - 1)]
        pixels = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
        name = f"{Path(folder).name}|{width}|{{}}|{cut}"
        results[name.format("decode")] = run(runtime, "decoder", list(latents))
        results[name.format("encode")] = run(runtime, "vae_encoder", pixels)
np.savez(out, **results)
