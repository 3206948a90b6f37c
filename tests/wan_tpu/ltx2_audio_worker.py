"""LTX-2's vocoders on all devices. Run by test_ltx2_audio.py.

Arguments: the npy of a spectrogram, where to write the samples and how many frames each device computes, checkpoints'
folders; each has the name of its result.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.ltx2 import audio
from wan_tpu.families.ltx2.config import read_config
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh

if __name__ == "__main__":
    file, out, *folders = map(Path, sys.argv[1:])
    mel = np.load(file)
    mesh = make_mesh((1, 1, jax.device_count()), heads=4)
    result = {}
    for folder in folders:
        checkpoint = Checkpoint(folder)
        loaded = load_component(checkpoint, audio.vocoder(read_config(checkpoint)), "float32", mesh)
        vocode = jax.jit(functools.partial(audio.vocode, loaded.module))
        result[f"{folder.name} samples"] = vocode(loaded.params, jnp.asarray(mel))
        result[f"{folder.name} computed"] = -(-mel.shape[2] // jax.device_count()) + 2 * audio._reach(loaded.module)
    np.savez(out, **result)
