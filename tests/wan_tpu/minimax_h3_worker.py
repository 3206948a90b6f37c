"""Computes MiniMax-H3's predictions. test_minimax_h3_transformer.py runs it on eight devices.

Arguments: the folders of a checkpoint and of one with gates, the npz of inputs, and where to write the predictions
and the lists of blocks of sparse attention.
"""

import contextlib
import functools
import sys
from pathlib import Path

import jax
import numpy as np

from tests.wan_tpu.meshes import fit_mesh
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families.minimax_h3 import components, context, positions, transformer
from wan_tpu.families.minimax_h3.config import read_config
from wan_tpu.families.shared.tokens import patchify
from wan_tpu.ops import sparse_linear
from wan_tpu.ops.sparse_linear import Density
from wan_tpu.ops.video_sparse import Sparsity
from wan_tpu.runtime.components import DTYPES, load_component
from wan_tpu.runtime.mesh import make_mesh

KINDS = {"float32": None, "sparse": Density(0.3), "tiles": Sparsity(0.5)}


class Lists:
    """The lists of blocks of sparse attention, of all layers and heads, in whatever order they come."""

    def __init__(self):
        self._made = []

    def add(self, rows, lists, first_query=0):
        """Add lists [N, blocks of queries, n], given the number of real rows; those of padding are left out."""
        for of_head in np.asarray(lists).tolist():
            for block, entries in enumerate(of_head, start=int(first_query) // 128):
                if block * 128 < rows:
                    self._made.append((int(rows), block, *sorted(entry for entry in entries if entry * 64 < rows)))

    @property
    def table(self):
        """For each list in order: rows, block of queries, entries; -1 behind them."""
        longest = max(map(len, self._made))
        return np.array([(*made, *[-1] * (longest - len(made))) for made in sorted(self._made)])

    @contextlib.contextmanager
    def record(self):
        """Add what the programs traced and run meanwhile choose, in the text's layers and in the others."""
        modules, choose = (sparse_linear, context), sparse_linear.choose_blocks

        def choose_and_add(*arrays, **options):
            lists = choose(*arrays, **options)
            jax.debug.callback(self.add, options["kv_len"], lists[0], options.get("first_query", 0))
            return lists

        for module in modules:
            module.choose_blocks = choose_and_add
        try:
            yield
            jax.effects_barrier()
        finally:
            for module in modules:
                module.choose_blocks = choose


class Predictor:
    """The transformer on a mesh, as one program for texts of every length.

    Attributes:
        compiled: How many programs were compiled.
    """

    def __init__(self, folder, mesh, precision="float32", sparse=None):
        config = read_config(Checkpoint(folder))
        self._patch, self._sparse = config.transformer["patch_size"], sparse
        loaded = load_component(Checkpoint(folder), components.transformer(config), precision, mesh)
        self._params, self._dtype, self.compiled = loaded.params, DTYPES[precision], 0

        @functools.partial(jax.jit, static_argnames="grid")
        def run(params, rows, timestep, layout, grid):
            self.compiled += 1
            density = sparse.value if isinstance(sparse, Density) else None
            text = context.refine_text(loaded.module, params, mesh, rows.text, rows.words, density)
            counts = positions.Layout(*(len(part) for part in layout))
            rows = rows._replace(text=text)
            return transformer.predict(loaded.module, params, mesh, rows, counts, timestep, sparse, grid)

        self._run = run

    def predict(self, inputs):
        """Return the velocities of the video's tokens and of the sound's latents, for `inputs` by their names."""
        return [np.asarray(part) for part in self._run(*self._arguments(inputs))]

    @property
    def kinds(self):
        """The dtype of every weight by its name."""
        return {name: value.dtype.name for name, value in self._params.items()}

    def _arguments(self, inputs):
        video = patchify(inputs["video"], self._patch)
        _, _, frames, height, width = inputs["video"].shape
        keyframes = patchify(inputs["keyframes"], self._patch)
        text, sound, vision = inputs["text"], inputs["sound"], int(inputs["vision"])
        count, order = int(inputs["count"]), inputs["positions"]
        anchors = [str(anchor) for anchor in inputs["anchors"]]
        places = positions.place_rows((frames, height, width), self._patch[1:], len(sound), len(text), count, anchors)
        layout = positions.Layout(
            text=len(text),
            keyframes=len(keyframes),
            sound=len(sound),
            video=len(video),
            pictures=len(anchors),
        )
        ends = positions.find_ends(order[:vision], len(anchors), count, layout.keyframes, len(sound))
        grid = frames, height // self._patch[1], width // self._patch[2]
        if isinstance(self._sparse, Sparsity):
            tiles = transformer.cut_tiles(grid, layout)
            places = places[positions.list_by_tiles(layout, count, tiles.order)]
            ends = positions.find_ends_by_tiles(ends, layout)
        rows = transformer.Rows(
            text=text[np.argsort(order)].astype(self._dtype),
            keyframes=keyframes,
            sound=sound,
            video=video,
            positions=places,
            ends=ends,
            words=np.int32(count),
        )
        counts = [np.zeros(number) for number in layout if number is not None]
        return self._params, rows, inputs["times"], counts, grid


if __name__ == "__main__":
    folder, gated, file, out = map(Path, sys.argv[1:])
    inputs, predictions = dict(np.load(file)), {}
    mesh = make_mesh(fit_mesh((2, 2, 2)), heads=8)
    for kind, sparse in (KINDS | {"int8": None}).items():
        precision, lists = "int8" if kind == "int8" else "float32", Lists()
        with lists.record():
            parts = Predictor(gated if kind == "tiles" else folder, mesh, precision, sparse).predict(inputs)
        predictions |= {f"{kind} {name}": part for name, part in zip(("video", "sound"), parts, strict=True)}
        if kind == "sparse":
            predictions["lists"] = lists.table
    np.savez(out, **predictions)
