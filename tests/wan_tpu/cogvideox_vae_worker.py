"""Halves of CogVideoX's VAE on eight devices. Run by test_cogvideox_vae.py.

Arguments: a checkpoint's folder, the npz of inputs, where to write what comes out.
"""

import sys
from pathlib import Path

import numpy as np

from tests.wan_tpu.chunk_runs import run_in_chunks
from tests.wan_tpu.meshes import fit_mesh
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.cogvideox import components, vae
from wan_tpu.families.cogvideox.spec import LATER_FRAMES, CogVideoXSpec
from wan_tpu.families.shared.causal_vae import CausalChunks, RepeatedStart
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh


def halves(folder, mesh):
    """Return the encoder and the decoder as functions of chunks [1, C, T, H, W]."""
    config = CogVideoXSpec.open(Checkpoint(folder)).config

    def half(dropped, run, scale, later_frames):
        loaded = load_component(Checkpoint(folder), components.vae_half(config, dropped), "float32", mesh)
        causal = CausalChunks(
            loaded.module, mesh, run, lambda x: x, lambda x: x, scale, later_frames, history=RepeatedStart
        )
        return run_in_chunks(causal, loaded.params)

    return half("decoder", vae.encoder, 8, 8), half("encoder", vae.decoder, 1, LATER_FRAMES)


def cut(x, frames):
    """Cut x [1, C, T, H, W] into chunks of these numbers of frames."""
    return np.split(x, np.cumsum(frames)[:-1], axis=2)


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:])
    inputs = np.load(file)
    encode, decode = halves(folder, make_mesh(fit_mesh((2, 2, 2)), heads=2))
    latents = inputs["latents"]
    chunks = CogVideoXSpec.open(Checkpoint(folder)).decoder_chunks(latents.shape[2])
    np.savez(out, decoded=decode(cut(latents, chunks)), encoded=encode([inputs["pixels"]]))
