"""Read weights from files or buckets onto a mesh: each process reads its own devices' parts, many ranges at once."""

import collections
import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import jax
import ml_dtypes
import numpy as np
import torch
from jax.sharding import NamedSharding
from runai_model_streamer.file_streamer import FileChunks, FileStreamer

from wan_tpu.checkpoint import weight_file
from wan_tpu.errors import CheckpointError, Unavailable
from wan_tpu.progress import Bar, Silent
from wan_tpu.runtime.tensor_files import Stored
from wan_tpu.storage.streaming import can_stream

RANGE_BYTES = 16 * 2**20  # Size of a range; much larger ones aren't read any faster.
RING_BYTES = 256 * 2**20  # The maximum size of all ranges in flight; less if there is little to read.
_READERS = 8  # Ranges that are read at once where the streamer can't read them.

# The dtypes of weights in numpy and in torch; numpy gets the first two from ml_dtypes.
_FROM_ML_DTYPES = {np.dtype(ml_dtypes.bfloat16): torch.bfloat16, np.dtype(ml_dtypes.float8_e4m3fn): torch.float8_e4m3fn}
_TORCH = {np.dtype(np.float32): torch.float32, np.dtype(np.int8): torch.int8} | _FROM_ML_DTYPES

Limits = tuple[tuple[int, int], ...]  # Start and stop in each dimension.
Show = Callable[[int], Bar]  # Takes the number of bytes that will be read.


@dataclass(frozen=True)
class Block:
    """Contiguous bytes of a file that hold a part of a weight."""

    file: str  # Path or address of the file.
    offset: int
    kind: torch.dtype  # Dtype of the numbers there.
    start: tuple[int, ...]  # Where the block begins in the weight, in the weight's dimensions.
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]  # Its shape in the file, before the weight's change.
    crc32c: int | None = None  # Checksum of its bytes, if known. Such a block is always read as a whole.


@dataclass(frozen=True)
class Weight:
    """One array of a program, and the blocks that it is read from."""

    shape: tuple[int, ...]
    kind: np.dtype
    sharding: NamedSharding
    blocks: tuple[Block, ...]  # The blocks that it is read from.
    # Applied to a whole block's values. It may move values between shards.
    change: Callable[[np.ndarray], np.ndarray] | None = None


def read_weights(weights: Mapping[str, Weight], show: Show = lambda total: Silent()) -> dict[str, jax.Array]:
    """Read weights, and put each on its mesh when it is complete.

    Host memory holds only the few incomplete weights and the ranges in flight.

    Args:
        show: Returns the bar that counts the bytes.

    Raises:
        CheckpointError: A file doesn't hold what it should.
        Unavailable: A file can't be read now.
    """
    assemblies = {name: _Assembly(weight) for name, weight in weights.items()}
    reads = [read for name, assembly in assemblies.items() for read in assembly.list_reads(name)]
    by_file = [list(group) for _, group in itertools.groupby(reads, key=lambda read: read.block.file)]
    total, largest = sum(read.nbytes for read in reads), max((read.nbytes for read in reads), default=0)
    arrays: dict[str, jax.Array] = {}
    bar = show(total)
    ranges = [
        FileChunks(number, group[0].block.file, [r.offset for r in group], [r.nbytes for r in group])
        for number, group in enumerate(by_file)
    ]
    with contextlib.closing(_stream(ranges, max(largest, min(RING_BYTES, total // 8)))) as chunks:
        for number, index, content in chunks:
            read = by_file[number][index]
            assembly = assemblies[read.name]
            if assembly.add(read, content.flatten()):
                arrays[read.name] = assembly.place()
            bar.step(read.nbytes)
    bar.close()
    return jax.block_until_ready({name: arrays[name] for name in weights})


def read_tensors(stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """Read tensors of one file into this process's memory. Raises what `read_weights` raises."""
    places = sorted(
        ((name, place) for name, place in stored.items() if math.prod(place.shape)), key=lambda x: x[1].offset
    )
    tensors = {name: torch.empty(place.shape, dtype=place.kind) for name, place in stored.items()}
    sizes = [math.prod(place.shape) * place.kind.itemsize for _, place in places]
    if not places:
        return tensors
    ranges = [FileChunks(0, places[0][1].file, [place.offset for _, place in places], sizes)]
    memory_limit = max(*sizes, min(RING_BYTES, sum(sizes) // 8)) if len(sizes) > 1 else sizes[0]
    with contextlib.closing(_stream(ranges, memory_limit)) as chunks:
        for _, index, content in chunks:
            name, place = places[index]
            tensors[name] = content.flatten().clone().view(place.kind).view(place.shape)
    return tensors


def _stream(ranges: Sequence[FileChunks], memory_limit: int) -> Generator[tuple[int, int, torch.Tensor], None, None]:
    """Yield ranges of files as they arrive: file number, range number, and bytes, which are valid until the next."""
    streamable = [file for file in ranges if can_stream(file.path)]
    ends = {file.path: max(map(sum, zip(file.offsets, file.sizes, strict=True))) for file in ranges}
    try:
        if streamable:
            with FileStreamer() as streamer:
                streamer.stream_files(streamable, memory_limit=memory_limit, owned=False)
                yield from streamer.get_chunks()
        for file in ranges:
            if file not in streamable:
                yield from _read_ranges(file, memory_limit)
    except ValueError as error:
        raise _explain_failed_read(ends, error) from error


def _read_ranges(file: FileChunks, memory_limit: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield ranges of a file, as `_stream` does; raises `ValueError` if the file is too short."""
    source = weight_file(file.path)

    def read(start: int, size: int) -> torch.Tensor:
        content = source.read(start, start + size)
        if len(content) != size:
            raise ValueError(f"{len(content)} bytes instead of {size}")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    at_once = max(1, min(_READERS, memory_limit // max(file.sizes)))
    with ThreadPoolExecutor(at_once) as pool:
        under_way: collections.deque[tuple[int, Future[torch.Tensor]]] = collections.deque()
        try:
            for index, (start, size) in enumerate(zip(file.offsets, file.sizes, strict=True)):
                if len(under_way) == at_once:
                    first, content = under_way.popleft()
                    yield file.id, first, content.result()
                under_way.append((index, pool.submit(read, start, size)))
            for index, content in under_way:
                yield file.id, index, content.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _explain_failed_read(ends: Mapping[str, int], error: ValueError) -> CheckpointError | Unavailable:
    """Return why files can't be read, which must have so many bytes. The streamer doesn't say, so look at each."""
    for address, size in ends.items():
        try:
            file = weight_file(address)
            file.read(0, 1)
        except (CheckpointError, Unavailable) as reason:
            return reason
        if file.size < size:
            return CheckpointError(
                f"{address} has {file.size} bytes instead of at least {size}; fetch the checkpoint again"
            )
    return Unavailable(f"weights can't be read now ({error}); check the disk or the network, and try again")


class _Read(NamedTuple):
    """Rows of a block: a range of its first dimension that is longer than one."""

    name: str
    block: Block
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Assembly:
    """Assembles the shards of one weight that this process's devices hold."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        indices = weight.sharding.addressable_devices_indices_map(weight.shape)
        self._places: dict[jax.Device, Limits] = {
            device: tuple(part.indices(size)[:2] for part, size in zip(index or (), weight.shape, strict=True))
            for device, index in indices.items()
        }
        self._shards: dict[Limits, torch.Tensor] = {}
        self._left = 0

    def list_reads(self, name: str) -> Iterator[_Read]:
        """Yield the reads that this process's shards need."""
        for block in self._weight.blocks:
            for read in self._list_reads_of(name, block):
                self._left += 1
                yield read

    def _list_reads_of(self, name: str, block: Block) -> Iterator[_Read]:
        overlaps = [_overlap(limits, block.start, block.shape) for limits in set(self._places.values())]
        parts = [overlap for overlap in overlaps if overlap is not None]
        if not parts:
            return
        size = math.prod(block.stored_shape) * block.kind.itemsize
        dimension = next((i for i, length in enumerate(block.shape) if length > 1), None)
        if self._weight.change is not None or block.crc32c is not None or dimension is None:
            yield _Read(name, block, block.start, block.shape, block.offset, size)
            return
        first = min(overlap[dimension][0] for overlap in parts)
        last = max(overlap[dimension][1] for overlap in parts)
        row_bytes = size // block.shape[dimension]
        step = max(1, RANGE_BYTES // row_bytes)
        for row in range(first, last, step):
            rows = min(step, last - row)
            start = (*block.start[:dimension], row, *block.start[dimension + 1 :])
            shape = (*block.shape[:dimension], rows, *block.shape[dimension + 1 :])
            offset = block.offset + (row - block.start[dimension]) * row_bytes
            yield _Read(name, block, start, shape, offset, rows * row_bytes)

    def add(self, read: _Read, content: torch.Tensor) -> bool:
        """Copy the bytes of a read into the shards; return whether it was the last one."""
        kind, block = read.block.kind, read.block
        if block.crc32c is not None and google_crc32c.value(content.numpy().tobytes()) != block.crc32c:
            raise CheckpointError(
                f"{block.file} is damaged in bytes {block.offset} to {block.offset + read.nbytes}, which hold "
                f"{read.name}; delete it, and convert the checkpoint again"
            )
        if content.data_ptr() % kind.itemsize:
            content = content.clone()
        value = content.view(kind)
        if self._weight.change is not None:
            value = _as_torch(self._weight.change(as_numpy(value.view(read.block.stored_shape))))
        value = value.view(read.shape)
        for limits in set(self._places.values()):
            overlap = _overlap(limits, read.start, read.shape)
            if overlap is not None:
                if limits not in self._shards:
                    self._shards[limits] = _allocate(limits, self._weight.kind)
                target = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(overlap, limits, strict=True))
                source = tuple(slice(a - first, b - first) for (a, b), first in zip(overlap, read.start, strict=True))
                self._shards[limits][target].copy_(value[source])
        self._left -= 1
        return not self._left

    def place(self) -> jax.Array:
        """Return the weight on its mesh, and release the shards."""
        shards = {limits: as_numpy(shard) for limits, shard in self._shards.items()}
        self._shards.clear()
        arrays = [jax.device_put(shards[limits], device) for device, limits in self._places.items()]
        return jax.make_array_from_single_device_arrays(self._weight.shape, self._weight.sharding, arrays)


def _overlap(limits: Limits, start: tuple[int, ...], shape: tuple[int, ...]) -> Limits | None:
    """Return where a shard and a block overlap, in the weight's dimensions; None if they don't."""
    both = tuple(
        (max(low, first), min(high, first + size))
        for (low, high), first, size in zip(limits, start, shape, strict=True)
    )
    return both if all(low < high for low, high in both) else None


def _allocate(limits: Limits, kind: np.dtype) -> torch.Tensor:
    """Allocate a shard, aligned to 64 bytes so that JAX takes it over as a CPU array without a copy."""
    shape = [stop - start for start, stop in limits]
    size = math.prod(shape) * kind.itemsize
    memory = torch.empty(size + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + size].view(_TORCH[kind]).view(shape)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of a tensor's memory in numpy, which has its small floating-point types from ml_dtypes."""
    if tensor.dtype not in _FROM_ML_DTYPES.values():
        return tensor.numpy()
    kind = next(kind for kind, known in _FROM_ML_DTYPES.items() if known == tensor.dtype)
    return tensor.view(_integer_of(tensor.dtype.itemsize)).numpy().view(kind)


def _as_torch(array: np.ndarray) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype not in _FROM_ML_DTYPES:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(_FROM_ML_DTYPES[array.dtype])


def _integer_of(itemsize: int) -> torch.dtype:
    return torch.int16 if itemsize == 2 else torch.int8
