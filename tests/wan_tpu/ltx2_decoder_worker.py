"""Decodes latents with LTX-2.5's diffusion decoder. test_ltx2_diffusion_decoder.py runs it on eight devices.

Arguments: a checkpoint's folder, the npz of latents and noise, and where to write the pixels of several meshes.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from tests.wan_tpu.meshes import fit_meshes
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.ltx2 import diffusion_decoder
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh


def decode(folder, mesh, latents, noise):
    """Return pixels [1, 3, F, H, W]."""
    config = Checkpoint(folder).config("diffusion_decoder")
    loaded = load_component(Checkpoint(folder), diffusion_decoder.decoder(config), "float32", mesh)
    chunks = diffusion_decoder.DiffusionChunks(config, loaded.module, mesh)
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(chunks.run_first)(loaded.params, (latents, noise))[0])


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:])
    inputs = np.load(file)
    shapes = fit_meshes((1, 1, 1), (2, 2, 2))
    np.savez(out, **{"x".join(map(str, s)): decode(folder, make_mesh(s, heads=4), **inputs) for s in shapes})
