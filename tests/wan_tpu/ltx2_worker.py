"""Computes LTX-2's predictions. test_ltx2_transformer.py runs it on eight devices.

Arguments: a checkpoint's folder, the npz of inputs, and where to write the predictions of one device and of all.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from tests.wan_tpu.meshes import fit_meshes
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.ltx2 import components, positions, transformer
from wan_tpu.families.ltx2.guidance import evaluations
from wan_tpu.families.ltx2.spec import Ltx2Spec
from wan_tpu.families.ltx2.streams.modulation import Times
from wan_tpu.runtime.components import DTYPES, load_component
from wan_tpu.runtime.mesh import make_mesh

FPS = 24.0


def predict(folder, mesh, inputs, precision="float32"):
    """Return the predictions of video [E, L, C] and sound [E, A, C] for `inputs`, by the names of the arguments."""
    config = Ltx2Spec.open(Checkpoint(folder)).config
    loaded = load_component(Checkpoint(folder), components.transformer(config), precision, mesh)
    video, audio, text, audio_text = (
        inputs[name].astype(DTYPES[precision]) for name in ("video", "audio", "text", "audio_text")
    )
    frames, sounds = inputs.get("frames", [video.shape[2]]), inputs.get("sounds", [len(audio)])
    counts = transformer.LatentCounts(tuple(map(int, frames)), tuple(map(int, sounds)))
    tables = positions.make_tables(config.transformer, video.shape[2:], len(audio), FPS)

    @jax.jit
    def run(params, video, audio, conditions):
        return transformer.predict(
            loaded.module,
            params,
            mesh,
            video,
            audio,
            conditions,
            counts,
            evaluations(config, 4),
        )

    time = inputs["time"]
    times = Times(*(inputs.get(f"{name} times", time) for name in Times._fields))
    conditions = transformer.Conditions(times, text, audio_text, tables, inputs.get("marker"))
    return [np.asarray(part) for part in run(loaded.params, video, audio, conditions)]


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:])
    inputs, predictions = dict(np.load(file)), {}
    for shape in fit_meshes((1, 1, 1), (2, 2, 2)):
        mesh = make_mesh(shape, heads=4)
        for name, part in zip(("video", "audio"), predict(folder, mesh, inputs), strict=True):
            predictions[f"{'x'.join(map(str, shape))} {name}"] = part
    np.savez(out, **predictions)
