"""Write a checkpoint's weights as programs need them, in the layout of `wan_tpu.runtime.converted`."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import google_crc32c
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.checkpoint import SETTINGS, Checkpoint, weight_file
from wan_tpu.errors import CheckpointError
from wan_tpu.progress import BYTES, Progress
from wan_tpu.runtime.components import Component, open_component
from wan_tpu.runtime.converted import FILE, MANIFEST, WeightCut, describe
from wan_tpu.runtime.weights import Block, Weight, read_weights
from wan_tpu.storage.base import Missing, Storage
from wan_tpu.storage.folder import WeightFile

# safetensors' names of dtypes.
_KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}
_HEADER_ALIGNED = 4096  # The weights begin at a multiple of this many bytes.
_COPIED_BYTES = 16 * 2**20  # How much of an adapter's file is in memory at a time.


def convert(
    checkpoint: Checkpoint,
    components: Mapping[str, Component],
    dtype: str,
    destination: Storage,
    progress: Progress,
) -> list[str]:
    """Write all components, and the adapters of the checkpoint's own presets.

    Host memory holds one layer of one weight at a time.

    Args:
        checkpoint: The source.
        progress: Shows a bar for each file.

    Returns:
        The folders that were already there, complete, from an earlier attempt with the same files.

    Raises:
        CheckpointError: The source can't be read (raised before anything is written), or it changes meanwhile.
    """
    mesh = Mesh(np.array(jax.local_devices(backend="cpu")[:1]).reshape(1, 1, 1), ("dp", "sp", "tp"))
    folders = {component.folder: _Folder(checkpoint, component, dtype) for component in components.values()}
    for component in components.values():
        contents = open_component(checkpoint, component, dtype, mesh)
        folders[component.folder].weights.update(
            {contents.plain[name]: (weight, contents.cuts[name]) for name, weight in contents.weights.items()}
        )
    others = checkpoint.read_small_files()
    adapters = checkpoint.adapters(json.loads(others.get(SETTINGS, b"{}")))
    existing = [name for name, folder in folders.items() if _is_there(name, folder, destination)]
    if len(existing) < len(folders) and SETTINGS not in others and destination.has(SETTINGS):
        raise CheckpointError(
            f"the destination has a {SETTINGS}, but {checkpoint.source} has none, so it belongs to another model; "
            "delete it, or give another folder"
        )
    for name, content in others.items():
        destination.write(name, content)
    for name, adapter in adapters.items():
        with destination.writing(name) as out:
            for start in range(0, adapter.size, _COPIED_BYTES):
                out.write(adapter.read(start, min(start + _COPIED_BYTES, adapter.size)))
    for name, folder in folders.items():
        if name in existing:
            continue
        checksums = _write(f"{name}/{FILE}", folder.weights, destination, progress)
        folder.check_unchanged()
        # The manifest comes last: it marks the file as complete.
        destination.write(f"{name}/{MANIFEST}", folder.manifest(checksums).encode())
    return existing


class _Folder:
    """A component's folder: its weights, and the identity of its files in the source before they are read."""

    def __init__(self, checkpoint: Checkpoint, component: Component, dtype: str) -> None:
        self.weights: dict[str, tuple[Weight, WeightCut]] = {}
        self._dtype = component.kept_as(dtype)
        self._source = checkpoint.source
        self._config = json.dumps(checkpoint.config(component.folder), sort_keys=True)
        self._files = checkpoint.weights(component.folder)
        self._version = self._version_of(self._files)

    def _version_of(self, files: Mapping[str, WeightFile]) -> str:
        """Return a checksum that changes whenever the files' content does."""
        versions = {name: file.version for name, file in files.items()}
        return hashlib.sha256(f"{self._config} {json.dumps(versions, sort_keys=True)}".encode()).hexdigest()

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if the source has changed: the written file may then mix old and new content."""
        if self._version_of({name: weight_file(file.address) for name, file in self._files.items()}) != self._version:
            raise CheckpointError(f"{self._source} was changed while it was converted; convert it again")

    def manifest(self, checksums: Mapping[str, Sequence[int]]) -> str:
        """Return the manifest of a file whose pieces have these checksums."""
        cuts = {name: cut for name, (_, cut) in self.weights.items()}
        return describe(cuts, checksums, self._dtype, _header(self.weights)[1], self._source, self._version)


def _is_there(name: str, folder: _Folder, destination: Storage) -> bool:
    """Return whether a component is already complete, written from the same files and in the current layout."""
    if not destination.has(f"{name}/{FILE}"):
        return False
    try:
        manifest = json.loads(destination.read(f"{name}/{MANIFEST}"))
        checksums = {weight: manifest["tensors"][weight]["crc32c"] for weight in folder.weights}
    except (Missing, KeyError, TypeError, ValueError):
        return False
    return bool(manifest == json.loads(folder.manifest(checksums)))


def _write(
    file: str, weights: Mapping[str, tuple[Weight, WeightCut]], destination: Storage, progress: Progress
) -> dict[str, list[int]]:
    """Write one component's file, and return the checksums of its weights' pieces."""
    header, size = _header(weights)
    checksums: dict[str, list[int]] = {}
    bar = progress.bar(file, size, unit=BYTES)
    with destination.writing(file) as out:
        out.write(header)
        for name, (weight, cut) in weights.items():
            checksums[name] = []
            for piece in _pieces(weight, cut):
                content = piece.tobytes()
                checksums[name].append(google_crc32c.value(content))
                out.write(content)
                bar.step(len(content))
    bar.close()
    return checksums


def _header(weights: Mapping[str, tuple[Weight, WeightCut]]) -> tuple[bytes, int]:
    """Return a safetensors header, and the size of the whole file."""
    tensors: dict[str, Any] = {}
    offset = 0
    for name, (weight, cut) in weights.items():
        nbytes = math.prod(weight.shape) * weight.kind.itemsize
        kind, end = _KINDS[weight.kind.name], offset + nbytes
        tensors[name] = {"dtype": kind, "shape": list(cut.stored_shape), "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(tensors, separators=(",", ":")).encode()
    content += b" " * (-(8 + len(content)) % _HEADER_ALIGNED)
    return len(content).to_bytes(8, "little") + content, 8 + len(content) + offset


def _pieces(weight: Weight, cut: WeightCut) -> Iterator[np.ndarray]:
    """Yield the pieces of a weight in the file's order, read layer by layer."""
    layers = weight.shape[0] if cut.layers and cut.pieces else 1
    for layer in range(layers):
        value = _layer(weight, layer if layers > 1 else None)
        if not cut.pieces:
            yield value
            continue
        for piece in np.split(value, cut.pieces, axis=cut.axis):
            yield np.ascontiguousarray(piece)


def _layer(weight: Weight, layer: int | None) -> np.ndarray:
    """Return one layer of a stack, [1, ...], or the whole weight."""
    if layer is None:
        shape, blocks = weight.shape, weight.blocks
    else:
        shape = (1, *weight.shape[1:])
        blocks = tuple(
            Block(b.file, b.offset, b.kind, (0, *b.start[1:]), b.shape, b.stored_shape, b.crc32c)
            for b in weight.blocks
            if b.start[0] == layer
        )
    sharding = NamedSharding(weight.sharding.mesh, P())
    alone = Weight(shape, weight.kind, sharding, blocks, weight.change)
    return np.asarray(read_weights({"": alone})[""])
