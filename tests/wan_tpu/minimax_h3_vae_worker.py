"""MiniMax-H3's VAE on a mesh. Run by test_minimax_h3_vae.py on several devices.

Arguments: a checkpoint's folder, the npz of inputs, where to write what comes out, (dp, sp, tp), which is made to fit.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np

from tests.wan_tpu.meshes import fit_mesh
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.minimax_h3 import vae
from wan_tpu.families.minimax_h3.clips import chunk_lengths
from wan_tpu.families.minimax_h3.config import MiniMaxH3Config
from wan_tpu.runtime.components import DTYPES, load_component
from wan_tpu.runtime.mesh import make_mesh

TILE, OVERLAP = 4, 1  # Small tiles, in pixels of the latents; diffusers' are told the same.


def open_config(folder):
    """Return the configuration of a checkpoint's VAE; the rest is empty."""
    empty = {field.name: {} for field in dataclasses.fields(MiniMaxH3Config)}
    return MiniMaxH3Config(**empty | {"vae": Checkpoint(folder).config("vae"), "text_layer": 1})


def make_decode(folder, mesh, dtype="float32"):
    """Return a function that decodes latents [1, C, T, H, W] of a whole video, chunk by chunk."""
    config = open_config(folder)
    loaded = load_component(Checkpoint(folder), vae.vae_half(config, "encoder"), dtype, mesh)
    chunks = vae.ClipDecoder(loaded.module, mesh, TILE, OVERLAP)
    first, later = jax.jit(chunks.run_first), jax.jit(chunks.run_next)

    def decode(latents):
        cache, outputs = None, []
        lengths = chunk_lengths(latents.shape[2])
        scaled = vae.denormalise(config, latents).astype(DTYPES[dtype])
        for chunk in np.split(scaled, np.cumsum(lengths)[:-1], axis=2):
            out, cache = first(loaded.params, chunk) if cache is None else later(loaded.params, chunk, cache)
            outputs.append(out)
        assert cache == ()
        # Clipped as `Model.pixels` does.
        return np.concatenate([np.clip(np.asarray(out, np.float32), -1, 1) for out in outputs], axis=2)

    return decode


def make_encode(folder, mesh, dtype="float32"):
    """Return a function that encodes keyframes [1, 3, T, H, W], 0 to 255, one after the other."""
    loaded = load_component(Checkpoint(folder), vae.vae_half(open_config(folder), "decoder"), dtype, mesh)
    run = jax.jit(vae.KeyframeEncoder(loaded.module, mesh, TILE, OVERLAP).run_first)

    def encode(pixels):
        outputs = []
        for frame in np.split(pixels.astype(DTYPES[dtype]), pixels.shape[2], axis=2):
            out, cache = run(loaded.params, frame)
            assert cache == ()
            outputs.append(np.asarray(out))
        return np.concatenate(outputs, axis=2)

    return encode


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:4])
    inputs = np.load(file)
    mesh = make_mesh(fit_mesh(tuple(map(int, sys.argv[4:]))), heads=2)
    np.savez(
        out, decoded=make_decode(folder, mesh)(inputs["latents"]), encoded=make_encode(folder, mesh)(inputs["pixels"])
    )
