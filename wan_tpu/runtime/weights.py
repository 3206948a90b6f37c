"""Read weights from safetensors files onto a mesh, each process what its own devices hold."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
from jax.sharding import NamedSharding


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies."""

    file: Path
    name: str
    shape: tuple[int, ...]


def read_weight(
    parts: list[Stored],
    change: Callable[[np.ndarray], np.ndarray] | None,
    shape: tuple[int, ...],
    kind: np.dtype,
    sharding: NamedSharding,
    *,
    stacked: bool,
) -> jax.Array:
    """Read one weight, or of a stack (`stacked`) one for each block, and put it on the mesh before the next is read.

    Of each, a process reads the shards of its own devices.
    """
    indices = sharding.addressable_devices_indices_map(shape)
    places = {device: _limits(index or (), shape) for device, index in indices.items()}
    shards = {limits: _aligned([stop - start for start, stop in limits], kind) for limits in places.values()}
    for i, part in enumerate(parts):
        # Opened for each part: pages of a mapped file count as this process's memory until it is closed.
        with safetensors.safe_open(part.file, framework="numpy") as file:
            # What is changed is read whole: a change may reorder what lies in one shard and another.
            whole = None if change is None else change(file.get_tensor(part.name))
            for limits, shard in shards.items():
                index = tuple(slice(*limit) for limit in (limits[1:] if stacked else limits))
                value = whole[index] if whole is not None else _read(file, part, index)
                shard[i if stacked else ...] = value
    arrays = [jax.device_put(shards[limits], device) for device, limits in places.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays).block_until_ready()


def _limits(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return start and stop of each dimension of a shard; layers of a stack are never split."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _aligned(shape: list[int], kind: np.dtype) -> np.ndarray:
    """Return room for an array that JAX takes over as a CPU array without a copy: aligned to 64 bytes."""
    size = math.prod(shape) * kind.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(kind).reshape(shape)


def _read(file: Any, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    sizes = tuple(part.stop - part.start for part in index)
    return file.get_tensor(stored.name) if sizes == stored.shape else file.get_slice(stored.name)[index]
