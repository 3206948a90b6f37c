"""Components stored as programs need them: in the final dtype, stacked, permuted, cut into shards, with checksums.

`wan-tpu weights convert` writes them beside a component's config.json. Each layer of a large weight is stored as
consecutive pieces along the dimension that its rule shards, so that a process reads only the whole pieces of its own
shards. A small weight is a single piece.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.runtime.tensor_files import Stored, locate_tensors
from wan_tpu.runtime.weights import Block

FILE, MANIFEST = "wan_tpu.safetensors", "wan_tpu.safetensors.json"
# Version of the file's layout: which weights it holds, and how. It must change when any of that does; a test checks it.
FORMAT_VERSION = 2
PIECES = 16  # The minimum number of pieces of a large weight: the devices along one axis of the widest mesh.
PIECE_BYTES = 16 * 2**20  # The maximum size of a piece, if the weight can be cut that small.
SMALL_BYTES = 2**20  # The maximum size of a weight that is stored as a single piece.
AGAIN = "convert the checkpoint again"


@dataclass(frozen=True)
class WeightCut:
    """The layout of one weight in the file."""

    shape: tuple[int, ...]  # The weight's shape, as the program has it.
    layers: bool  # Whether its first dimension is the layers of a stack.
    axis: int  # The dimension of `shape` along which its pieces are cut.
    pieces: int  # Pieces of each layer; 0 for a weight in one piece.

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of its tensor in the file: [depth,] pieces, then the shape of a piece."""
        if not self.pieces:
            return self.shape
        first = int(self.layers)
        return (*self.shape[:first], self.pieces, *self.piece[first:])

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of one piece, in the weight's dimensions."""
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
        starts = []
        for layer in range(self.shape[0] if self.layers else 1):
            for number in range(self.pieces):
                start = [layer if self.layers and i == 0 else 0 for i in range(len(self.shape))]
                start[self.axis] += number * self.piece[self.axis]
                starts.append(tuple(start))
        return starts


def cut_weight(shape: tuple[int, ...], itemsize: int, axis: int | None, *, layers: bool) -> WeightCut:
    """Decide how a weight is cut into pieces.

    Args:
        shape: The weight's shape, as the program has it.
        itemsize: Bytes of a number.
        axis: The dimension that its rule shards; None if every device has the whole weight.
        layers: Whether the first dimension is the layers of a stack.
    """
    depth = shape[0] if layers else 1
    layer_bytes = math.prod(shape) // max(depth, 1) * itemsize
    if depth * layer_bytes <= SMALL_BYTES:
        return WeightCut(shape, layers, 0, 0)
    axis = int(layers) if axis is None else axis
    pieces = 1
    while shape[axis] % (2 * pieces) == 0 and (pieces < PIECES or layer_bytes // pieces > PIECE_BYTES):
        pieces *= 2
    return WeightCut(shape, layers, axis, pieces)


@dataclass(frozen=True)
class Converted:
    """A converted component's file and manifest. `blocks` raises `CheckpointError` for a weight missing there."""

    folder: str
    stored: dict[str, Stored]
    manifest: dict[str, Any]

    @classmethod
    def open(cls, checkpoint: Checkpoint, folder: str, dtype: str) -> "Converted | None":
        """Open a component's folder; return None if it was never converted. Raises `CheckpointError`."""
        files = checkpoint.weights(folder)
        if FILE not in files:
            return None
        where = f"{checkpoint.source}/{folder}"
        if not (checkpoint.path(folder) / MANIFEST).is_file():
            raise CheckpointError(
                f"{where}/{FILE} has no {MANIFEST} beside it, so its conversion didn't finish; {AGAIN}"
            )
        manifest = checkpoint.config(folder, MANIFEST)
        try:
            layout, kind, size = (manifest[name] for name in ("layout", "dtype", "bytes"))
        except KeyError as error:
            raise CheckpointError(f"{where}/{MANIFEST} lacks {error}; {AGAIN}") from None
        if layout != FORMAT_VERSION:
            raise CheckpointError(
                f"{where} was converted for layout {layout}, but this version reads layout {FORMAT_VERSION}; {AGAIN}"
            )
        if kind != dtype:
            raise CheckpointError(
                f"{where} was converted to {kind}; give --precision {kind}, or the original checkpoint for {dtype}"
            )
        if size != files[FILE].size:
            raise CheckpointError(f"{where}/{FILE} has {files[FILE].size} bytes instead of {size}; {AGAIN}")
        return cls(where, locate_tensors(files[FILE]), manifest["tensors"])

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[Block, ...]:
        """Return where the pieces of a weight are, given the weight's shape in the program."""
        stored, entry = self.stored.get(name), self.manifest.get(name)
        if stored is None or entry is None:
            raise CheckpointError(f"{self.folder}/{FILE} lacks {name}; {AGAIN}")
        cut = WeightCut(tuple(entry["shape"]), entry["layers"], entry["axis"], entry["pieces"])
        if cut.shape != shape or cut.stored_shape != stored.shape or len(cut.starts) != len(entry["crc32c"]):
            raise CheckpointError(
                f"{self.folder}/{FILE} has {name} {list(cut.shape)} instead of {list(shape)}; {AGAIN}"
            )
        nbytes = math.prod(cut.piece) * stored.kind.itemsize
        return tuple(
            Block(stored.file, stored.offset + i * nbytes, stored.kind, start, cut.piece, cut.piece, crc32c)
            for i, (start, crc32c) in enumerate(zip(cut.starts, entry["crc32c"], strict=True))
        )


def describe(
    cuts: Mapping[str, WeightCut],
    checksums: Mapping[str, Sequence[int]],
    dtype: str,
    size: int,
    source: str,
    version: str,
) -> str:
    """Return a manifest as JSON.

    Args:
        cuts: The layout of each weight in the file, by the weight's name.
        checksums: The checksums of each weight's pieces, by the weight's name.
        dtype: The precision that the component was converted to.
        size: Bytes of the file.
        source: The checkpoint that the weights were read from.
        version: Identifies the content of the component's files in the source.
    """
    tensors = {
        name: {
            "shape": list(cut.shape),
            "layers": cut.layers,
            "axis": cut.axis,
            "pieces": cut.pieces,
            "crc32c": list(checksums[name]),
        }
        for name, cut in cuts.items()
    }
    manifest = {"layout": FORMAT_VERSION, "dtype": dtype, "bytes": size, "source": source, "version": version}
    return json.dumps(manifest | {"tensors": tensors})
