"""LTX-2's vocoder on all devices. Run by test_ltx2_audio.py.

Arguments: a checkpoint's folder, the npy of a spectrogram, where to write the samples and how many frames each device
computes.
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
    folder, file, out = map(Path, sys.argv[1:])
    checkpoint = Checkpoint(folder)
    mel = np.load(file)
    mesh = make_mesh((1, 1, jax.device_count()), heads=4)
    loaded = load_component(checkpoint, audio.vocoder(read_config(checkpoint)), "float32", mesh)
    samples = jax.jit(functools.partial(audio.vocode, loaded.module))(loaded.params, jnp.asarray(mel))
    own = -(-mel.shape[2] // jax.device_count())
    np.savez(out, samples=samples, computed=own + 2 * audio._reach(loaded.module))
