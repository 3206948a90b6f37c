"""Computes HunyuanVideo-1.5's predictions. test_hunyuan15_transformer.py runs it on eight devices.

Arguments: a checkpoint's folder, the npz of inputs, where to write the predictions of one device and of all, and the
precisions, with commas between them.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.wan_tpu.meshes import fit_meshes
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.hunyuan15 import components, transformer
from wan_tpu.families.hunyuan15.context import Encodings
from wan_tpu.families.hunyuan15.spec import HunyuanSpec
from wan_tpu.runtime.components import DTYPES, load_component
from wan_tpu.runtime.mesh import make_mesh

TIMESTEP, FOLLOWING = 640.5, 300.0


def predict(folder, mesh, latents, encodings, precision="float32"):
    """Return the prediction of each branch, [B, C, T, H, W], from the fields of `Encodings`."""
    latents, *arrays = (cast(array, precision) for array in (latents, *encodings.values()))
    encodings = Encodings(**dict(zip(encodings, arrays, strict=True)))
    spec = HunyuanSpec.open(Checkpoint(folder))
    loaded = load_component(Checkpoint(folder), components.transformer(spec.config), precision, mesh)

    @jax.jit
    def run(params, latents, encodings):
        times = jnp.float32([TIMESTEP]), jnp.float32([FOLLOWING])
        return transformer.predict(loaded.module, params, mesh, latents, *times, encodings)

    tokens = np.asarray(run(loaded.params, latents, encodings))
    return tokens.reshape(len(tokens), *latents.shape[2:], -1).transpose(0, 4, 1, 2, 3)


def cast(array, precision):
    return array if np.issubdtype(array.dtype, np.integer) else array.astype(DTYPES[precision])


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:4])
    inputs, predictions = dict(np.load(file)), {}
    latents = inputs.pop("latents")
    for shape in fit_meshes((1, 1, 1), (2, 2, 2)):
        mesh = make_mesh(shape, heads=4)
        for precision in sys.argv[4].split(","):
            predictions[f"{precision} {'x'.join(map(str, shape))}"] = predict(folder, mesh, latents, inputs, precision)
    np.savez(out, **predictions)
