"""Computes CogVideoX's predictions. test_cogvideox_transformer.py runs it on eight devices.

Arguments: a checkpoint's folder, the npz of inputs, and where to write the predictions of several meshes.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.wan_tpu.meshes import fit_meshes
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.cogvideox import components, transformer
from wan_tpu.families.cogvideox.spec import CogVideoXSpec
from wan_tpu.families.shared.tokens import unpatchify
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh

TIMESTEP = 499


def predict(folder, mesh, latents, text):
    """Return the prediction of each branch, [B, C, T, H, W]."""
    spec = CogVideoXSpec.open(Checkpoint(folder))
    loaded = load_component(Checkpoint(folder), components.transformer(spec.config), "float32", mesh)

    @jax.jit
    def run(params, latents, text):
        tokens = transformer.embed_text(loaded.module, params, mesh, text)["text"]
        return transformer.predict(loaded.module, params, mesh, latents, jnp.float32([TIMESTEP]), tokens)

    shape = (1, spec.latent_channels, *latents.shape[2:])
    return np.concatenate([unpatchify(branch, shape, spec.patch) for branch in run(loaded.params, latents, text)])


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:])
    inputs, predictions = np.load(file), {}
    for shape in fit_meshes((1, 1, 1), (2, 2, 2)):
        mesh = make_mesh(shape, heads=2)
        predictions["x".join(map(str, shape))] = predict(folder, mesh, inputs["latents"], inputs["text"])
    np.savez(out, **predictions)
