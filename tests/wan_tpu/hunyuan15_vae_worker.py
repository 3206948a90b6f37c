"""Halves of HunyuanVideo-1.5's VAE on several meshes. Run by test_hunyuan15_vae.py with virtual CPU devices.

Arguments: a checkpoint's folder, the npz of inputs, where to write what comes out on several meshes.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.hunyuan15 import components, vae
from wan_tpu.families.hunyuan15.spec import HunyuanSpec
from wan_tpu.families.shared.causal_vae import CausalChunks
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh


def halves(folder, mesh, frames):
    """Return encoder and decoder as functions of chunks [1, C, T, H, W] of a video of so many latent frames."""
    config = HunyuanSpec.open(Checkpoint(folder)).config

    def half(dropped, run, scale, later_frames):
        loaded = load_component(Checkpoint(folder), components.vae_half(config, dropped), "float32", mesh)
        made = CausalChunks(
            loaded.module, mesh, run, lambda x: x, lambda x: x, scale, later_frames, history=vae.past_of(frames)
        )
        first, later = jax.jit(made.first), jax.jit(made.next)

        def run_all(chunks):
            out, cache = first(loaded.params, chunks[0])
            outputs = [out]
            for chunk in chunks[1:]:
                out, cache = later(loaded.params, chunk, cache)
                outputs.append(out)
            return np.concatenate([np.asarray(out) for out in outputs], axis=2)

        return run_all

    return half("decoder", vae.encoder, 16, 4), half("encoder", vae.decoder, 1, 1)


def cut(x, frames):
    """Cut x [1, C, T, H, W] into a first chunk of one frame and others of so many."""
    return np.split(x, range(1, x.shape[2], frames), axis=2)


if __name__ == "__main__":
    folder, given, out = map(Path, sys.argv[1:])
    inputs, found = np.load(given), {}
    for shape in ("1x1x1", "2x2x2"):
        latents, pixels = inputs["latents"], inputs["pixels"]
        encode, decode = halves(folder, make_mesh(tuple(map(int, shape.split("x"))), heads=4), latents.shape[2])
        found[f"decoded {shape}"] = decode(cut(latents, 1))
        found[f"encoded {shape}"] = encode(cut(pixels, 4))
    np.savez(out, **found)
