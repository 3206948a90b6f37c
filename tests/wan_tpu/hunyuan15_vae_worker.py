"""Halves of HunyuanVideo-1.5's VAE on a mesh. Run by test_hunyuan15_vae.py on several devices.

Arguments: a checkpoint's folder, the npz of inputs, where to write what comes out, (dp, sp, tp), which is made to fit.
"""

import sys
from pathlib import Path

import numpy as np

from tests.wan_tpu.chunk_runs import cut, run_in_chunks
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
        return run_in_chunks(causal, loaded.params)

    return half("decoder", model.vae_encoder), half("encoder", model.vae_decoder)


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:4])
    inputs = np.load(file)
    mesh = make_mesh(fit_mesh(tuple(map(int, sys.argv[4:]))), heads=4)
    encode, decode = halves(folder, mesh, inputs["latents"].shape[2])
    np.savez(out, decoded=decode(cut(inputs["latents"], 1)), encoded=encode(cut(inputs["pixels"], 4)))
