"""Components as programs want them: in their dtype, stacked, permuted, cut where meshes cut them, with checksums.

`wan-tpu weights convert` writes them beside a component's config.json. Of a large weight each layer lies in pieces
along the dimension that its rule shards, one after the other: a process reads whole pieces, those of its shards. A
small one is one piece.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.runtime.tensor_files import Stored, tensors
from wan_tpu.runtime.weights import Block

FILE, MANIFEST = "wan_tpu.safetensors", "wan_tpu.safetensors.json"
# Of what weights are in here, and how: another number for another order of any. A test holds it.
LAYOUT = 1
PIECES = 16  # at least: as many as the widest mesh has devices along one axis
PIECE_BYTES = 16 * 2**20  # at most, where a weight can be cut so
SMALL_BYTES = 2**20  # a weight that is read whole
AGAIN = "convert the checkpoint again"


@dataclass(frozen=True)
class Cut:
    """How one weight lies in the file.

    shape   of it, as the program has it; layers  whether its first dimension is that of a stack
    axis    that its pieces are cut along, of `shape`; pieces  how many of each layer; 0 for a weight in one piece
    """

    shape: tuple[int, ...]
    layers: bool
    axis: int
    pieces: int

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of its tensor in the file: [depth,] pieces, then a piece's."""
        if not self.pieces:
            return self.shape
        first = int(self.layers)
        return (*self.shape[:first], self.pieces, *self.piece[first:])

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of one, in the weight's dimensions."""
        if not self.pieces:
            return self.shape
        sizes = [1 if self.layers and i == 0 else size for i, size in enumerate(self.shape)]
        sizes[self.axis] //= self.pieces
        return tuple(sizes)

    @property
    def starts(self) -> list[tuple[int, ...]]:
        """Where each piece begins in the weight, in the file's order."""
        if not self.pieces:
            return [(0,) * len(self.shape)]
        found = []
        for layer in range(self.shape[0] if self.layers else 1):
            for number in range(self.pieces):
                start = [layer if self.layers and i == 0 else 0 for i in range(len(self.shape))]
                start[self.axis] += number * self.piece[self.axis]
                found.append(tuple(start))
        return found


def cut(shape: tuple[int, ...], itemsize: int, axis: int | None, *, layers: bool) -> Cut:
    """Return how a weight is laid out; axis: of `shape`, that its rule shards, None where every device has it whole."""
    depth = shape[0] if layers else 1
    layer_bytes = math.prod(shape) // max(depth, 1) * itemsize
    if depth * layer_bytes <= SMALL_BYTES:
        return Cut(shape, layers, 0, 0)
    axis = int(layers) if axis is None else axis
    pieces = 1
    while shape[axis] % (2 * pieces) == 0 and (pieces < PIECES or layer_bytes // pieces > PIECE_BYTES):
        pieces *= 2
    return Cut(shape, layers, axis, pieces)


@dataclass(frozen=True)
class Converted:
    """A converted component's file and manifest. `blocks` raises `CheckpointError` for what isn't in it."""

    folder: str
    stored: dict[str, Stored]
    manifest: dict[str, Any]

    @classmethod
    def open(cls, checkpoint: Checkpoint, folder: str, dtype: str) -> "Converted | None":
        """Return what a component's folder has, None if it was never converted; raises `CheckpointError`."""
        files = checkpoint.weights(folder)
        if FILE not in files:
            return None
        where = f"{checkpoint.source}/{folder}"
        if not (checkpoint.path(folder) / MANIFEST).is_file():
            raise CheckpointError(f"{where}/{FILE} has no {MANIFEST}: its conversion wasn't finished; {AGAIN}")
        manifest = checkpoint.config(folder, MANIFEST)
        try:
            layout, kind, size = (manifest[name] for name in ("layout", "dtype", "bytes"))
        except KeyError as error:
            raise CheckpointError(f"{where}/{MANIFEST} lacks {error}; {AGAIN}") from None
        if layout != LAYOUT:
            raise CheckpointError(f"{where} was converted for layout {layout}, this version reads {LAYOUT}; {AGAIN}")
        if kind != dtype:
            raise CheckpointError(
                f"{where} was converted to {kind}; give --precision {kind}, or for {dtype} the original"
            )
        if size != files[FILE].size:
            raise CheckpointError(f"{where}/{FILE} has {files[FILE].size} bytes of {size}; {AGAIN}")
        return cls(where, tensors(files[FILE]), manifest["tensors"])

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[Block, ...]:
        """Return where the pieces of a weight lie; shape: that the program wants."""
        stored, said = self.stored.get(name), self.manifest.get(name)
        if stored is None or said is None:
            raise CheckpointError(f"{self.folder}/{FILE} lacks {name}; {AGAIN}")
        found = Cut(tuple(said["shape"]), said["layers"], said["axis"], said["pieces"])
        if found.shape != shape or found.stored != stored.shape or len(found.starts) != len(said["crc32c"]):
            raise CheckpointError(
                f"{self.folder}/{FILE} has {name} {list(found.shape)} instead of {list(shape)}; {AGAIN}"
            )
        nbytes = math.prod(found.piece) * stored.kind.itemsize
        return tuple(
            Block(stored.file, stored.offset + i * nbytes, stored.kind, start, found.piece, found.piece, crc32c)
            for i, (start, crc32c) in enumerate(zip(found.starts, said["crc32c"], strict=True))
        )


def described(
    cuts: Mapping[str, Cut],
    checksums: Mapping[str, Sequence[int]],
    dtype: str,
    size: int,
    source: str,
    version: str,
) -> str:
    """Return a manifest as JSON.

    Args:
        cuts: By the weights' names, how they lie.
        checksums: By the weights' names, those of their pieces.
        dtype: What the component was converted to.
        size: Bytes of the file.
        source: The checkpoint that the weights were read from.
        version: Another one when the component's files in the source were others.
    """
    found = {
        name: {
            "shape": list(one.shape),
            "layers": one.layers,
            "axis": one.axis,
            "pieces": one.pieces,
            "crc32c": list(checksums[name]),
        }
        for name, one in cuts.items()
    }
    manifest = {"layout": LAYOUT, "dtype": dtype, "bytes": size, "source": source, "version": version}
    return json.dumps(manifest | {"tensors": found})
