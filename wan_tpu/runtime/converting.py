"""Write a checkpoint's weights as programs want them: `wan_tpu.runtime.converted` says how they lie."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, Protocol

import google_crc32c
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.progress import BYTES, Progress
from wan_tpu.runtime.components import Component, open_component
from wan_tpu.runtime.converted import FILE, MANIFEST, Cut, described
from wan_tpu.runtime.weights import Block, Weight, read_weights

_KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}  # as safetensors has them
_HEADER_ALIGNED = 4096  # bytes: where the weights begin


class Destination(Protocol):
    """Where a checkpoint is written: a folder, or one in a bucket."""

    def has(self, name: str) -> bool:
        """Whether a file is there."""

    def read(self, name: str) -> bytes:
        """Return a small file; raises `FileNotFoundError`."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Give a file to write to."""


def convert(
    checkpoint: Checkpoint,
    components: Mapping[str, Component],
    dtype: str,
    destination: Destination,
    progress: Progress,
) -> list[str]:
    """Write all components; return the folders that were there already, whole, from an earlier try.

    Host memory holds a layer of one weight. Raises `CheckpointError` for a source that can't be read, before anything
    is written.
    """
    mesh = Mesh(np.array(jax.local_devices(backend="cpu")[:1]).reshape(1, 1, 1), ("dp", "sp", "tp"))
    folders: dict[str, dict[str, tuple[Weight, Cut]]] = {}
    kinds: dict[str, str] = {}
    for component in components.values():
        kinds[component.folder] = component.kept_as(dtype)
        opened = open_component(checkpoint, component, dtype, mesh)
        folders.setdefault(component.folder, {}).update(
            {opened.plain[name]: (weight, opened.cuts[name]) for name, weight in opened.weights.items()}
        )
    for name, content in checkpoint.others().items():
        destination.write(name, content)
    kept = []
    for folder, weights in folders.items():
        if _is_there(folder, weights, kinds[folder], checkpoint.source, destination):
            kept.append(folder)
            continue
        manifest = _write(f"{folder}/{FILE}", weights, kinds[folder], checkpoint.source, destination, progress)
        destination.write(f"{folder}/{MANIFEST}", manifest)  # last: with it, the component is whole
    return kept


def _is_there(
    folder: str, weights: Mapping[str, tuple[Weight, Cut]], dtype: str, source: str, destination: Destination
) -> bool:
    """Whether a component was written whole: of this source, and as it would be written now."""
    if not destination.has(f"{folder}/{FILE}"):
        return False
    try:
        found = json.loads(destination.read(f"{folder}/{MANIFEST}"))
        checksums = {name: found["tensors"][name]["crc32c"] for name in weights}
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return False
    cuts = {name: cut for name, (_, cut) in weights.items()}
    return bool(found == json.loads(described(cuts, checksums, dtype, _header(weights)[1], source)))


def _write(
    file: str,
    weights: Mapping[str, tuple[Weight, Cut]],
    dtype: str,
    source: str,
    destination: Destination,
    progress: Progress,
) -> bytes:
    """Write one component's file; return its manifest."""
    header, size = _header(weights)
    checksums: dict[str, list[int]] = {}
    bar = progress.bar(file, size, unit=BYTES)
    with destination.open(file) as out:
        out.write(header)
        for name, (weight, cut) in weights.items():
            checksums[name] = []
            for piece in _pieces(weight, cut):
                content = piece.tobytes()
                checksums[name].append(google_crc32c.value(content))
                out.write(content)
                bar.step(len(content))
    bar.close()
    return described({name: cut for name, (_, cut) in weights.items()}, checksums, dtype, size, source).encode()


def _header(weights: Mapping[str, tuple[Weight, Cut]]) -> tuple[bytes, int]:
    """Return a safetensors header, and the size of the whole file."""
    tensors: dict[str, Any] = {}
    offset = 0
    for name, (weight, cut) in weights.items():
        nbytes = math.prod(weight.shape) * weight.kind.itemsize
        kind, end = _KINDS[weight.kind.name], offset + nbytes
        tensors[name] = {"dtype": kind, "shape": list(cut.stored), "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(tensors, separators=(",", ":")).encode()
    content += b" " * (-(8 + len(content)) % _HEADER_ALIGNED)
    return len(content).to_bytes(8, "little") + content, 8 + len(content) + offset


def _pieces(weight: Weight, cut: Cut) -> Iterator[np.ndarray]:
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
            Block(b.file, b.offset, b.kind, (0, *b.start[1:]), b.shape, b.stored, b.crc32c)
            for b in weight.blocks
            if b.start[0] == layer
        )
    sharding = NamedSharding(weight.sharding.mesh, P())
    alone = Weight(shape, weight.kind, sharding, blocks, weight.change)
    return np.asarray(read_weights({"": alone})[""])
