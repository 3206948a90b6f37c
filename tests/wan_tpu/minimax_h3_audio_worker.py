"""MiniMax-H3's sound on all devices. Run by test_minimax_h3_audio.py.

Arguments: a checkpoint's folder, the npz of several latents by name, where to write their samples by the same names.
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import numpy as np

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.minimax_h3 import audio
from wan_tpu.families.minimax_h3.config import MiniMaxH3Config
from wan_tpu.runtime.components import load_component
from wan_tpu.runtime.mesh import make_mesh


def open_config(folder):
    """Return the configuration of a checkpoint's sound; the rest is empty."""
    empty = {field.name: {} for field in dataclasses.fields(MiniMaxH3Config)}
    return MiniMaxH3Config(**empty | {"audio_vae": Checkpoint(folder).config("audio_vae"), "text_layer": 1})


def load(folder, dtype="float32", devices=1):
    """Return the sound's decoder and its jitted function of weights and latents."""
    mesh = make_mesh((1, 1, devices), heads=2)
    loaded = load_component(Checkpoint(folder), audio.audio_decoder(open_config(folder)), dtype, mesh)
    return loaded, jax.jit(functools.partial(audio.decode, loaded.module))


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:])
    loaded, decode = load(folder, devices=jax.device_count())
    np.savez(out, **{name: decode(loaded.params, latents) for name, latents in np.load(file).items()})
