"""Halves of HunyuanVideo-1.5's VAE on a mesh. Run by test_hunyuan15_vae.py on several devices.

Arguments: a checkpoint's folder, the npz of inputs, where to write what comes out, (dp, sp, tp), which is made to fit.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from tests.wan_tpu.meshes import fit_mesh
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.hunyuan15 import components
from wan_tpu.families.hunyuan15.model import HunyuanModel
from wan_tpu.families.hunyuan15.spec import HunyuanSpec
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh


def halves(folder, mesh, frames):
    """Return encoder and decoder as functions of chunks [1, C, T, H, W] of a video of `frames` latent frames."""
    model = HunyuanModel(HunyuanSpec.open(Checkpoint(folder)))

    def half(dropped, make):
        loaded = load_component(Checkpoint(folder), components.vae_half(model.config, dropped), "float32", mesh)
        causal = make(loaded.module, mesh).for_chunks(frames)
        first, later = jax.jit(causal.run_first), jax.jit(causal.run_next)

        def run_all(chunks):
            out, cache = first(loaded.params, chunks[0])
            outputs = [out]
            for chunk in chunks[1:]:
                out, cache = later(loaded.params, chunk, cache)
                outputs.append(out)
            return np.concatenate([np.asarray(out) for out in outputs], axis=2)

        return run_all

    return half("decoder", model.vae_encoder), half("encoder", model.vae_decoder)


def cut(x, frames):
    """Cut x [1, C, T, H, W] into a first chunk of one frame and others of `frames`."""
    return np.split(x, range(1, x.shape[2], frames), axis=2)


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:4])
    inputs = np.load(file)
    mesh = make_mesh(fit_mesh(tuple(map(int, sys.argv[4:]))), heads=4)
    encode, decode = halves(folder, mesh, inputs["latents"].shape[2])
    np.savez(out, decoded=decode(cut(inputs["latents"], 1)), encoded=encode(cut(inputs["pixels"], 4)))
