"""What HunyuanVideo-1.5's transformer predicts. Run by test_hunyuan15_transformer.py with virtual CPU devices.

Arguments: a checkpoint's folder, the npz of inputs, where to write what is predicted on one device and on eight.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.hunyuan15 import components, transformer
from wan_tpu.families.hunyuan15.context import Given
from wan_tpu.families.hunyuan15.spec import HunyuanSpec
from wan_tpu.runtime.components import DTYPES, load_component
from wan_tpu.runtime.mesh import make_mesh

TIMESTEP, FOLLOWING = 640.5, 300.0


def predicted(folder, mesh, latents, given, precision="float32"):
    """Return the prediction of each branch, [B, C, T, H, W]; given: the fields of `Given`."""
    latents, *floats = (cast(array, precision) for array in (latents, *given.values()))
    given = dict(zip(given, floats, strict=True))
    spec = HunyuanSpec.open(Checkpoint(folder))
    loaded = load_component(Checkpoint(folder), components.transformer(spec.config), precision, mesh)

    @jax.jit
    def run(params, latents, given):
        times = jnp.float32([TIMESTEP]), jnp.float32([FOLLOWING])
        return transformer.predict(loaded.module, params, mesh, latents, *times, given)

    tokens = np.asarray(run(loaded.params, latents, Given(**given)))
    return tokens.reshape(len(tokens), *latents.shape[2:], -1).transpose(0, 4, 1, 2, 3)


def cast(array, precision):
    return array if np.issubdtype(array.dtype, np.integer) else array.astype(DTYPES[precision])


if __name__ == "__main__":
    folder, given, out = map(Path, sys.argv[1:])
    inputs, found = dict(np.load(given)), {}
    latents = inputs.pop("latents")
    for shape in ("1x1x1", "2x2x2"):
        mesh = make_mesh(tuple(map(int, shape.split("x"))), heads=4)
        for precision in ("float32", "int8"):
            found[f"{precision} {shape}"] = predicted(folder, mesh, latents, inputs, precision)
    np.savez(out, **found)
