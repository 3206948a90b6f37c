"""Run by test_halo.py in a process with eight virtual CPU devices: VAE halves on several meshes, into an npz.

Arguments: where to write, then three for every case: a checkpoint's folder, a latent width, and meshes ("2x1x4,...").
Entries are named kind/width/half/devices.
"""

import sys
from pathlib import Path

import numpy as np

from wan_tpu import load_pipeline
from wan_tpu.progress import Silent
from wan_tpu.stages import decode, vae_encode

FRAMES, ROWS = 3, 3  # latent frames and rows

out, *arguments = sys.argv[1:]
results = {}
for folder, width, meshes in zip(*[iter(arguments)] * 3, strict=True):
    for mesh in meshes.split(","):
        runtime = load_pipeline(folder, dtype="float32", mesh=tuple(map(int, mesh.split("x")))).runtime
        model = runtime.model
        rng = np.random.default_rng(0)
        scale = model.config.vae.get("scale_factor_spatial", 8)
        latents = rng.standard_normal((1, model.latent_channels, FRAMES, ROWS, int(width))).astype(np.float32)
        shapes = [(1, 3, frames, ROWS * scale, int(width) * scale) for frames in [1] + [4] * (FRAMES - 1)]
        pixels = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
        name = f"{Path(folder).name}/{width}/{{}}/{runtime.mesh.size}"
        results[name.format("decode")] = np.concatenate(list(decode(runtime, latents, Silent())))
        results[name.format("encode")] = np.concatenate(list(vae_encode(runtime, pixels)), axis=2)
np.savez(out, **results)
