"""Computes MiniMax-H3's predictions. test_minimax_h3_transformer.py runs it on eight devices.

Arguments: a checkpoint's folder, the npz of inputs, and where to write the predictions of one device and of all.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from tests.wan_tpu.meshes import fit_meshes
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.minimax_h3 import components, context, positions, transformer
from wan_tpu.families.minimax_h3.config import read_config
from wan_tpu.families.shared.tokens import patchify
from wan_tpu.runtime.components import DTYPES, load_component
from wan_tpu.runtime.mesh import make_mesh


class Predictor:
    """The transformer on a mesh, as one program for texts of every length.

    Attributes:
        compiled: How many programs were compiled.
    """

    def __init__(self, folder, mesh, precision="float32", density=None):
        config = read_config(Checkpoint(folder))
        self._patch = config.transformer["patch_size"]
        loaded = load_component(Checkpoint(folder), components.transformer(config), precision, mesh)
        self._params, self._dtype, self.compiled = loaded.params, DTYPES[precision], 0

        @jax.jit
        def run(params, rows, timestep, layout):
            self.compiled += 1
            text = context.refine_text(loaded.module, params, mesh, rows.text, rows.words, density)
            counts = positions.Layout(*(len(part) for part in layout))
            rows = rows._replace(text=text)
            return transformer.predict(loaded.module, params, mesh, rows, counts, timestep, density)

        self._run = run

    def predict(self, inputs):
        """Return the velocities of the video's tokens and of the sound's latents, for `inputs` by their names."""
        return [np.asarray(part) for part in self._run(*self._arguments(inputs))]

    def trace(self, inputs):
        """Return the program as a jaxpr."""
        return jax.make_jaxpr(self._run)(*self._arguments(inputs)).jaxpr

    @property
    def kinds(self):
        """The dtype of every weight by its name."""
        return {name: value.dtype.name for name, value in self._params.items()}

    def _arguments(self, inputs):
        video = patchify(inputs["video"], self._patch)
        _, _, frames, height, width = inputs["video"].shape
        keyframes = patchify(inputs["keyframes"], self._patch) if "keyframes" in inputs else None
        text, sound, vision = inputs["text"], inputs["sound"], int(inputs["vision"])
        count, order = int(inputs["count"]), inputs["positions"]
        anchors = [str(anchor) for anchor in inputs["anchors"]]
        places = positions.place_rows((frames, height, width), self._patch[1:], len(sound), len(text), count, anchors)
        layout = positions.Layout(
            text=len(text),
            keyframes=0 if keyframes is None else len(keyframes),
            sound=len(sound),
            video=len(video),
            pictures=len(anchors),
        )
        rows = transformer.Rows(
            text=text[np.argsort(order)].astype(self._dtype),
            keyframes=keyframes,
            sound=sound,
            video=video,
            positions=places,
            ends=positions.find_ends(order[:vision], len(anchors), count, layout.keyframes, len(sound)),
            words=np.int32(count),
        )
        return self._params, rows, inputs["times"], [np.zeros(number) for number in layout]


if __name__ == "__main__":
    folder, file, out = map(Path, sys.argv[1:])
    inputs, predictions = dict(np.load(file)), {}
    for shape in fit_meshes((1, 1, 1), (1, 1, 8), (2, 2, 2)):
        for precision in ("float32", "int8") if shape != (1, 1, 8) else ("float32",):
            for density in (None, 0.3) if precision == "float32" else (None,):
                parts = Predictor(folder, make_mesh(shape, heads=8), precision, density).predict(inputs)
                kind = precision if density is None else "sparse"
                for name, part in zip(("video", "sound"), parts, strict=True):
                    predictions[f"{kind} {'x'.join(map(str, shape))} {name}"] = part
    np.savez(out, **predictions)
