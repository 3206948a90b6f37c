"""Encodes prompts with LTX-2's Gemma and connectors. test_ltx2_text.py runs it on eight devices.

Arguments: a checkpoint's folder, a prompt, and where to write the texts of several meshes.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from tests.wan_tpu.meshes import fit_meshes
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.ltx2 import connectors, gemma, text
from wan_tpu.families.ltx2.config import read_config
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.components import Loaded, load_component
from wan_tpu.runtime.mesh import make_mesh


def open_tokenizer(folder):
    return Tokenizer(folder / "tokenizer", read_config(Checkpoint(folder)).text_encoder["vocab_size"])


def open_encoder(folder, mesh, dtype="float32"):
    """Return a function that turns ids and mask into both texts, and the jitted program behind it."""
    config = read_config(Checkpoint(folder))
    parts = [
        load_component(Checkpoint(folder), component, dtype, mesh)
        for component in (gemma.text_encoder(config.text_encoder), connectors.connectors(config))
    ]

    @jax.jit
    def program(params, ids, mask):
        return text.encode_prompt(*(Loaded(part.module, p) for part, p in zip(parts, params, strict=True)), ids, mask)

    def encode(ids, mask):
        return {name: np.asarray(x) for name, x in program([part.params for part in parts], ids, mask).items()}

    return encode, program


if __name__ == "__main__":
    folder, prompt, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    ids, mask, _ = text.tokenize_prompt(open_tokenizer(folder), prompt)
    texts = {}
    for shape in fit_meshes((1, 1, 1), (2, 2, 2), (1, 1, 8)):
        encode, _ = open_encoder(folder, make_mesh(shape, heads=8))
        texts |= {f"{name} {'x'.join(map(str, shape))}": x for name, x in encode(ids, mask).items()}
    np.savez(out, **texts)
