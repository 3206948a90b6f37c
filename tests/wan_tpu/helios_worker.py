"""Computes Helios' predictions. test_helios_transformer.py runs it on eight devices.

Arguments: a checkpoint's folder, the npz of inputs, and the npy to write.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.wan_tpu.meshes import fit_mesh
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.helios import transformer
from wan_tpu.families.helios.chunks import LONG, MID, SHORT
from wan_tpu.families.helios.components import components
from wan_tpu.families.helios.config import read_config
from wan_tpu.families.helios.positions import rotary_tables
from wan_tpu.families.wan.text_keys import text_keys
from wan_tpu.families.wan.tokens import unpatchify
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh

HEADS = 4


def make_predictor(folder, mesh):
    """Return a function of latents [1, C, T, H, W], timestep, history and text [B, L, C] -> [B, C, T, H, W]."""
    config = read_config(Checkpoint(folder))
    loaded = load_component(Checkpoint(folder), components(config)["denoise"], "float32", mesh)
    patch, channels = config.transformer["patch_size"], config.transformer["out_channels"]

    @jax.jit
    def keys_of(params, text):
        return text_keys(loaded.module, params, mesh, text, None)

    @jax.jit
    def run(params, latents, time, history, tables, keys):
        tokens = transformer.velocity(loaded.module, params, mesh, latents, time, history, tables, keys)
        return jnp.concatenate([unpatchify(branch, latents.shape, patch, channels) for branch in tokens])

    def predict(latents, time, history, text):
        grid = [n // p for n, p in zip(latents.shape[2:], patch, strict=True)]
        size = [n // p for n, p in zip(history[SHORT].shape[3:], patch[1:], strict=True)]
        tables = rotary_tables(config.transformer, grid, size)
        time = np.float32(time)
        return np.asarray(run(loaded.params, latents, time, history, tables, keys_of(loaded.params, text)))

    return predict


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:])
    inputs = dict(np.load(file))
    history = {name: inputs[name] for name in (LONG, MID, SHORT)}
    predict = make_predictor(folder, make_mesh(fit_mesh((2, 2, 2)), heads=HEADS))
    np.save(out, predict(inputs["latents"], inputs["time"], history, inputs["text"]))
