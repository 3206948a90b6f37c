"""Encodes prompts, alone and with keyframes, as MiniMax-H3 does. test_minimax_h3_text.py runs it on eight devices.

Arguments: a checkpoint's folder, a prompt, and where to write its embeddings with two keyframes.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from tests.wan_tpu.meshes import fit_mesh
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.minimax_h3 import text
from wan_tpu.families.minimax_h3.config import read_config
from wan_tpu.families.minimax_h3.vision import presentation, tower
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.components import Loaded, load_component
from wan_tpu.runtime.mesh import make_mesh


def draw_keyframes(count, height=64, width=96):
    """Return random images, which differ by their brightness, too."""
    generator = np.random.default_rng(count)
    pixels = (generator.integers(0, 256 // (i + 1), (height, width, 3), dtype=np.uint8) for i in range(count))
    return [Image.fromarray(values) for values in pixels]


class Encoder:
    """The text encoder and its vision tower on a mesh, and the programs of prompts without and with keyframes."""

    def __init__(self, folder, mesh, dtype="float32"):
        self.config = read_config(Checkpoint(folder))
        self.tokenizer = Tokenizer(folder / "tokenizer", self.config.text_encoder["vocab_size"])
        self._parts = [
            load_component(Checkpoint(folder), component, dtype, mesh)
            for component in (text.text_encoder(self.config), tower.vision(self.config))
        ]
        self.without_keyframes = jax.jit(lambda params, ids: text.encode_prompt(self._load(params)[0], ids))
        self.with_keyframes = jax.jit(lambda params, inputs: presentation.encode(self._load(params), inputs))

    def _load(self, params):
        return [Loaded(part.module, weights) for part, weights in zip(self._parts, params, strict=True)]

    def encode(self, inputs):
        """Return the embeddings [R, C] of ids, or of a `Presentation`."""
        program = self.with_keyframes if isinstance(inputs, presentation.Presentation) else self.without_keyframes
        return np.asarray(program([part.params for part in self._parts], inputs)[0])


if __name__ == "__main__":
    folder, prompt, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    encoder = Encoder(folder, make_mesh(fit_mesh((2, 2, 2)), heads=8))
    inputs, _ = presentation.present(encoder.config, encoder.tokenizer, prompt, draw_keyframes(2), (0, 1))
    np.save(out, encoder.encode(inputs))
