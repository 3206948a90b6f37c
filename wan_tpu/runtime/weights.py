"""Read weights from files or buckets onto a mesh: each process what its own devices hold, many ranges at a time."""

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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

RANGE_BYTES = 16 * 2**20  # of what is read at once: much larger ones aren't read faster
RING_BYTES = 256 * 2**20  # of ranges that are under way, at most; less where there is little to read

# What weights are in, as numpy and as torch have it; numpy has the last ones from ml_dtypes.
_ELSEWHERE = {np.dtype(ml_dtypes.bfloat16): torch.bfloat16, np.dtype(ml_dtypes.float8_e4m3fn): torch.float8_e4m3fn}
_TORCH = {np.dtype(np.float32): torch.float32, np.dtype(np.int8): torch.int8} | _ELSEWHERE

Limits = tuple[tuple[int, int], ...]  # start and stop in each dimension
Show = Callable[[int], Bar]  # given how many bytes there are to read


@dataclass(frozen=True)
class Block:
    """Contiguous bytes of a file that are a part of a weight.

    file, offset  where they begin: a path or gs:// address, and bytes
    kind          of the numbers there
    start, shape  where it lies in the weight, in the weight's dimensions
    stored        its shape in the file, before the weight's change
    crc32c        of its bytes, where it is known: such a block is read whole
    """

    file: str
    offset: int
    kind: torch.dtype
    start: tuple[int, ...]
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    crc32c: int | None = None


@dataclass(frozen=True)
class Weight:
    """One array of a program, and the blocks that it is read from.

    change  applied to what a block holds, whole: it may reorder what lies in one shard and another
    """

    shape: tuple[int, ...]
    kind: np.dtype
    sharding: NamedSharding
    blocks: tuple[Block, ...]
    change: Callable[[np.ndarray], np.ndarray] | None = None


def read_weights(weights: Mapping[str, Weight], show: Show = lambda total: Silent()) -> dict[str, jax.Array]:
    """Read weights and put each on its mesh when it is complete; what `show` returns counts the bytes.

    Host memory holds the weights under way, few at a time, and the ranges, beside what is on the devices. Raises
    `CheckpointError` when a file doesn't hold what it should, `Unavailable` when it can't be read now.
    """
    rooms = {name: _Room(weight) for name, weight in weights.items()}
    reads = [read for name, room in rooms.items() for read in room.reads(name)]
    by_file = [list(found) for _, found in itertools.groupby(reads, key=lambda read: read.block.file)]
    total, largest = sum(read.nbytes for read in reads), max((read.nbytes for read in reads), default=0)
    arrays: dict[str, jax.Array] = {}
    bar = show(total)
    ranges = [
        FileChunks(number, found[0].block.file, [r.offset for r in found], [r.nbytes for r in found])
        for number, found in enumerate(by_file)
    ]
    with contextlib.closing(_stream(ranges, max(largest, min(RING_BYTES, total // 8)))) as chunks:
        for number, index, content in chunks:
            read = by_file[number][index]
            room = rooms[read.name]
            if room.filled(read, content.flatten()):
                arrays[read.name] = room.placed()
            bar.step(read.nbytes)
    bar.close()
    return jax.block_until_ready({name: arrays[name] for name in weights})


def read_tensors(stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """Read tensors of one file into this process's memory; raises as `read_weights`."""
    wanted = sorted(((name, one) for name, one in stored.items() if math.prod(one.shape)), key=lambda x: x[1].offset)
    found = {name: torch.empty(one.shape, dtype=one.kind) for name, one in stored.items()}
    sizes = [math.prod(one.shape) * one.kind.itemsize for _, one in wanted]
    if not wanted:
        return found
    ranges = [FileChunks(0, wanted[0][1].file, [one.offset for _, one in wanted], sizes)]
    memory_limit = max(*sizes, min(RING_BYTES, sum(sizes) // 8)) if len(sizes) > 1 else sizes[0]
    with contextlib.closing(_stream(ranges, memory_limit)) as chunks:
        for _, index, content in chunks:
            name, one = wanted[index]
            found[name] = content.flatten().clone().view(one.kind).view(one.shape)
    return found


def _stream(ranges: Sequence[FileChunks], memory_limit: int) -> Generator[tuple[int, int, torch.Tensor], None, None]:
    """Yield ranges of files as they come: the file's number, the range's, and its bytes until the next one is asked."""
    streamed = [one for one in ranges if can_stream(one.path)]
    ends = {one.path: max(map(sum, zip(one.offsets, one.sizes, strict=True))) for one in ranges}
    try:
        if streamed:
            with FileStreamer() as streamer:
                streamer.stream_files(streamed, memory_limit=memory_limit, owned=False)
                yield from streamer.get_chunks()
        for one in ranges:
            if one not in streamed:
                yield from _read_ranges(one)
    except ValueError as error:
        raise _explain_failed_read(ends, error) from error


def _read_ranges(file: FileChunks) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield ranges of a file one by one, as `_stream` does; raises `ValueError` where it is too short."""
    source = weight_file(file.path)
    for index, (start, size) in enumerate(zip(file.offsets, file.sizes, strict=True)):
        content = source.read(start, start + size)
        if len(content) != size:
            raise ValueError(f"{len(content)} bytes of {size}")
        yield file.id, index, torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _explain_failed_read(ends: Mapping[str, int], error: ValueError) -> CheckpointError | Unavailable:
    """Return whose fault it is that files can't be read: the streamer doesn't say, so each file is looked at.

    Args:
        ends: By path or address, how many bytes a file must have at least.
        error: What the streamer raised.
    """
    for address, size in ends.items():
        try:
            file = weight_file(address)
            file.read(0, 1)
        except (CheckpointError, Unavailable) as reason:
            return reason
        if file.size < size:
            return CheckpointError(f"{address} has {file.size} bytes of at least {size}; fetch the checkpoint again")
    return Unavailable(f"weights can't be read now ({error}); check the disk or the network, and try again")


class _Read(NamedTuple):
    """Rows of a block, those of its first dimension that is longer than one."""

    name: str
    block: Block
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Room:
    """Where the shards of one weight come together, those of this process's devices."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        indices = weight.sharding.addressable_devices_indices_map(weight.shape)
        self._places: dict[jax.Device, Limits] = {
            device: tuple(part.indices(size)[:2] for part, size in zip(index or (), weight.shape, strict=True))
            for device, index in indices.items()
        }
        self._shards: dict[Limits, torch.Tensor] = {}
        self._left = 0

    def reads(self, name: str) -> Iterator[_Read]:
        """Yield what is to be read."""
        for block in self._weight.blocks:
            for read in self._reads(name, block):
                self._left += 1
                yield read

    def _reads(self, name: str, block: Block) -> Iterator[_Read]:
        overlaps = [_overlap(limits, block.start, block.shape) for limits in set(self._places.values())]
        wanted = [overlap for overlap in overlaps if overlap is not None]
        if not wanted:
            return
        size = math.prod(block.stored) * block.kind.itemsize
        dimension = next((i for i, length in enumerate(block.shape) if length > 1), None)
        if self._weight.change is not None or block.crc32c is not None or dimension is None:
            yield _Read(name, block, block.start, block.shape, block.offset, size)
            return
        first = min(overlap[dimension][0] for overlap in wanted)
        last = max(overlap[dimension][1] for overlap in wanted)
        row_bytes = size // block.shape[dimension]
        step = max(1, RANGE_BYTES // row_bytes)
        for row in range(first, last, step):
            rows = min(step, last - row)
            start = (*block.start[:dimension], row, *block.start[dimension + 1 :])
            shape = (*block.shape[:dimension], rows, *block.shape[dimension + 1 :])
            offset = block.offset + (row - block.start[dimension]) * row_bytes
            yield _Read(name, block, start, shape, offset, rows * row_bytes)

    def filled(self, read: _Read, content: torch.Tensor) -> bool:
        """Take what was read, bytes, over into the shards; return whether that was the last."""
        kind, block = read.block.kind, read.block
        if block.crc32c is not None and google_crc32c.value(content.numpy().tobytes()) != block.crc32c:
            raise CheckpointError(
                f"{block.file} is damaged: of {read.name}, bytes {block.offset} to {block.offset + read.nbytes}; "
                "delete it, and convert the checkpoint again"
            )
        if content.data_ptr() % kind.itemsize:
            content = content.clone()
        value = content.view(kind)
        if self._weight.change is not None:
            value = _tensor(self._weight.change(as_numpy(value.view(read.block.stored))))
        value = value.view(read.shape)
        for limits in set(self._places.values()):
            overlap = _overlap(limits, read.start, read.shape)
            if overlap is not None:
                if limits not in self._shards:
                    self._shards[limits] = _aligned(limits, self._weight.kind)
                target = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(overlap, limits, strict=True))
                given = tuple(slice(a - first, b - first) for (a, b), first in zip(overlap, read.start, strict=True))
                self._shards[limits][target].copy_(value[given])
        self._left -= 1
        return not self._left

    def placed(self) -> jax.Array:
        """Return the weight on its mesh, and let go of the shards."""
        shards = {limits: as_numpy(shard) for limits, shard in self._shards.items()}
        self._shards.clear()
        arrays = [jax.device_put(shards[limits], device) for device, limits in self._places.items()]
        return jax.make_array_from_single_device_arrays(self._weight.shape, self._weight.sharding, arrays)


def _overlap(limits: Limits, start: tuple[int, ...], shape: tuple[int, ...]) -> Limits | None:
    """Return where a shard and a block overlap, in the weight's dimensions; None where they don't."""
    both = tuple(
        (max(low, first), min(high, first + size))
        for (low, high), first, size in zip(limits, start, shape, strict=True)
    )
    return both if all(low < high for low, high in both) else None


def _aligned(limits: Limits, kind: np.dtype) -> torch.Tensor:
    """Return room for a shard that JAX takes over as a CPU array without a copy: aligned to 64 bytes."""
    shape = [stop - start for start, stop in limits]
    size = math.prod(shape) * kind.itemsize
    room = torch.empty(size + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return room[start : start + size].view(_TORCH[kind]).view(shape)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the same memory as numpy sees it, which has small floating-point numbers from elsewhere."""
    if tensor.dtype not in _ELSEWHERE.values():
        return tensor.numpy()
    kind = next(kind for kind, known in _ELSEWHERE.items() if known == tensor.dtype)
    return tensor.view(_whole(tensor.dtype.itemsize)).numpy().view(kind)


def _tensor(array: np.ndarray) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype not in _ELSEWHERE:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(_ELSEWHERE[array.dtype])


def _whole(itemsize: int) -> torch.dtype:
    return torch.int16 if itemsize == 2 else torch.int8
