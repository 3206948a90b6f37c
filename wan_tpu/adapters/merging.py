"""Experts' weights with adapters applied: base + sum of scale * gain * (up @ down), written beside the base.

The base isn't changed, so a request without adapters gets the same bits as before. Merged weights are kept while
devices have room for them, and files up to a limit of host memory. No device needs another device's data to merge.
"""

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.adapters.adapter import Adapter, Factors, Targets
from wan_tpu.adapters.location import find
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import DTYPES, SCALE, Component, Loaded, round_to_8_bits
from wan_tpu.runtime.memory import DeviceRoom, MemoryNeed, fits
from wan_tpu.runtime.program import Program
from wan_tpu.runtime.runtime import FetchedAdapter, Runtime
from wan_tpu_kernels.low_precision import to_8_bits

HOST_BYTES = 8 * 2**30  # Bytes of adapters kept in host memory, besides running requests': 14 pairs of rank 64.
MAX_MERGED = 2  # Merged sets to keep per expert if a device doesn't report its memory.
Content = tuple[tuple[str, float], ...]  # Checksums and scales of adapters.
RANKS = 16  # Factors are padded to this times a power of two, so that few programs are compiled.


class AdapterCache:
    """The adapters of a runtime: their files' content in host memory, and the weights merged with them."""

    def __init__(self, host_bytes: int = HOST_BYTES) -> None:
        self._host_bytes = host_bytes
        self._read: OrderedDict[tuple[str, str, str], Adapter] = OrderedDict()  # by folder, address and version
        self._targets: dict[str, Targets] = {}
        self._merged: OrderedDict[tuple[str, Content], Loaded] = OrderedDict()
        self._room = DeviceRoom()
        self._lock = threading.Lock()

    def fetch(self, component: Component, base: Loaded, adapter: RequestedAdapter) -> FetchedAdapter:
        """Return an adapter with its file's current content; arguments and errors are those of `read`."""
        content = self.read(component, base, adapter)
        return FetchedAdapter(adapter.path, adapter.scale, adapter.expert, checksum=content.checksum, adapter=content)

    def read(self, component: Component, base: Loaded, adapter: RequestedAdapter) -> Adapter:
        """Return a file's changes, reading it if it isn't in memory. Any thread may call this.

        Args:
            component: The component that it changes.
            base: The component's weights, or their shapes.
            adapter: The adapter, with its file's location.

        Raises:
            InvalidRequest: There is no such file, or it doesn't fit the component.
            Unavailable: The bucket, the hub or the disk doesn't answer.
        """
        with self._lock:
            if component.folder not in self._targets:
                self._targets[component.folder] = Targets(component, base)
        file = find(adapter.path)
        key = component.folder, file.weights.address, file.version
        with self._lock:
            if key in self._read:
                self._read.move_to_end(key)
                return self._read[key]
        content = self._targets[component.folder].read_file(file, adapter.path)
        with self._lock:
            self._read[key] = content
            while len(self._read) > 1 and sum(item.nbytes for item in self._read.values()) > self._host_bytes:
                self._read.popitem(last=False)
        return content

    def get(self, name: str, adapters: tuple[FetchedAdapter, ...]) -> Loaded | None:
        """Return a component with adapters applied, if it is kept."""
        key = name, _identify(adapters)
        with self._lock:
            if key in self._merged:
                self._merged.move_to_end(key)
            return self._merged.get(key)

    def merge(
        self, runtime: Runtime[Any], name: str, base: Loaded, adapters: tuple[FetchedAdapter, ...], *, keep: bool
    ) -> Loaded:
        """Apply adapters to a component, and keep the result while there is room. No file is read.

        Args:
            runtime: The runtime that compiles the programs.
            name: The component.
            base: The component's weights.
            adapters: The adapters, with the content of their files.
            keep: Whether to keep the base; otherwise each of its weights is released as soon as it has been merged.
        """
        scaled_adapters = [(adapter.adapter, adapter.scale) for adapter in adapters]
        adds = any(adapter.added for adapter, _ in scaled_adapters)
        self._make_room(runtime, name, base.with_added(runtime.model.components[name]) if adds else base)
        params = base.params if not keep else dict(base.params)
        for weight in sorted({weight for item, _ in scaled_adapters for weight in (*item.factors, *item.differences)}):
            params |= _change_weight(runtime, params, weight, scaled_adapters)
        for adapter, _ in scaled_adapters:
            params |= _add_weights(runtime, name, base, adapter)
        merged = Loaded(base.module, params)
        jax.block_until_ready(list(params.values()))
        if memory := runtime.mesh.local_devices[0].memory_stats():
            self._room.note_change(memory)
        with self._lock:
            self._merged[name, _identify(adapters)] = merged
        return merged

    def drop(self, name: str) -> None:
        """Release all merged weights of a component."""
        with self._lock:
            for key in [key for key in self._merged if key[0] == name]:
                del self._merged[key]

    def _make_room(self, runtime: Runtime[Any], name: str, like: Loaded) -> None:
        """Release the least recently used sets until another set for this component, of these shapes, fits."""
        device = runtime.mesh.local_devices[0]
        shards = [(array.sharding.shard_shape(array.shape), array.dtype) for array in like.params.values()]
        needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)
        with self._lock:
            while self._merged and not self._fits(name, device.memory_stats(), needed):
                self._merged.popitem(last=False)

    def _fits(self, name: str, memory: dict[str, int] | None, needed: int) -> bool:
        if memory is None:
            return sum(key[0] == name for key in self._merged) < MAX_MERGED
        return fits([MemoryNeed(needed)], self._room.bytes_left(memory))


def _identify(adapters: Sequence[FetchedAdapter]) -> Content:
    """Return the key of merged weights: the adapters' checksums and scales, not their names or locations."""
    return tuple((adapter.checksum, adapter.scale) for adapter in adapters)


def _add_weights(runtime: Runtime[Any], name: str, base: Loaded, adapter: Adapter) -> Params:
    """Return the weights that an adapter adds to a component, with their scales if they are in 8 bits."""
    params: Params = {}
    shapes = base.with_added(runtime.model.components[name]).params
    for weight, value in adapter.added.items():
        shape = shapes[weight]
        if (scales := shapes.get(weight + SCALE)) is None:
            params[weight] = _place(value.astype(shape.dtype), runtime.mesh, _full_spec(shape))
            continue
        layers = [round_to_8_bits(layer, shape.dtype) for layer in value]
        for part, suffix in enumerate(("", SCALE)):
            like = (shape, scales)[part]
            params[weight + suffix] = _place(
                np.stack([layer[part] for layer in layers]), runtime.mesh, _full_spec(like)
            )
    return params


def _change_weight(
    runtime: Runtime[Any], params: Params, weight: str, adapters: Sequence[tuple[Adapter, float]]
) -> Params:
    """Return one weight with all adapters applied, in the same layout; with its scales if it is in 8 bits."""
    base, scales = params[weight], params.get(weight + SCALE)
    mesh, spec = runtime.mesh, _full_spec(base)
    factors = [(adapter.factors[weight], scale) for adapter, scale in adapters if weight in adapter.factors]
    differences = [
        adapter.differences[weight] * np.float32(scale) for adapter, scale in adapters if weight in adapter.differences
    ]
    operands: list[Any] = [None, None, None, None]
    if factors:
        joined = _join(factors)
        specs = _split_spec(spec, joined[0].ndim)
        operands[:3] = (_place(value, mesh, placement) for value, placement in zip(joined, specs, strict=True))
    if differences:
        operands[3] = _place(functools.reduce(np.add, differences), mesh, spec)
    outputs = merge_program(runtime, base, scales)(base, scales, *operands)
    return dict(zip((weight, weight + SCALE), outputs, strict=False))


def abstract_merge(runtime: Runtime[Any], base: Any, scales: Any, ranks: int) -> tuple[Program, tuple[Any, ...]]:
    """Return the program that changes a weight, given as its shape, and the shapes of its arguments."""
    outputs, inputs = base.shape[-2:]
    stack, wide = base.shape[:-2], base.dtype if scales is None else DTYPES[runtime.dtype]
    shapes = (
        ((*stack, outputs, ranks), wide),
        ((*stack, ranks, inputs), wide),
        ((*stack, ranks), np.float32),
    )
    factors = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(runtime.mesh, placement))
        for (shape, dtype), placement in zip(shapes, _split_spec(_full_spec(base), base.ndim), strict=True)
    ]
    return merge_program(runtime, base, scales), (base, scales, *factors, None)


def merge_program(runtime: Runtime[Any], base: Any, scales: Any) -> Program:
    """Return the jitted (base, scales, up, down, gain, difference) -> [weight], or [weight, scales] in 8 bits.

    base [depth, O, I...] or without depth, up [depth, O, R], down [depth, R, I], gain [depth, R], difference as base.
    Scales [depth, O], factors or the difference may be None. Recompiles for each shape of a weight and number of ranks.
    """

    def merge_layer(base: jax.Array, scales: Any, up: Any, down: Any, gain: Any, difference: Any) -> list[jax.Array]:
        total = base.astype(jnp.float32)
        if scales is not None:
            total *= scales[:, None]
        if up is not None:
            exact = jax.lax.Precision.HIGHEST
            product = jnp.dot(up.astype(jnp.float32) * gain, down.astype(jnp.float32), precision=exact)
            total += product.reshape(base.shape)
        if difference is not None:
            total += difference
        if scales is None:
            return [total.astype(base.dtype)]
        values, sizes = to_8_bits(total, base.dtype)
        return [values, sizes[:, 0]]

    def merge(base: jax.Array, scales: Any, up: Any, down: Any, gain: Any, difference: Any) -> list[jax.Array]:
        whole = base, scales, up, down, gain, difference
        stacked = base.ndim == 3 if up is None and scales is not None else up is not None and up.ndim == 3
        if not stacked:
            return merge_layer(*whole)
        return jax.lax.map(lambda layer: merge_layer(*layer), whole)  # Only one layer at a time is held in float32.

    shardings = [base.sharding] if scales is None else [base.sharding, scales.sharding]
    name = f"apply adapters {base.sharding.spec}" + ("" if scales is None else " in 8 bits")
    return runtime.program(name, merge, shardings)


def _full_spec(base: Any) -> P:
    return P(*base.sharding.spec, *[None] * (base.ndim - len(base.sharding.spec)))


def _split_spec(spec: P, dimensions: int) -> tuple[P, P, P]:
    """Return the shardings of up, down and gain for a weight sharded by `spec`: each device has what it needs."""
    stack = spec[: dimensions - 2]
    inputs = spec[-1] if len(spec) == dimensions else None
    return P(*stack, spec[dimensions - 2], None), P(*stack, None, inputs), P(*stack, None)


def _join(factors: Sequence[tuple[Factors, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all factors of a weight as one, with the ranks of all."""
    up = np.concatenate([part.up for part, _ in factors], axis=-1)
    down = np.concatenate([part.down for part, _ in factors], axis=-2)
    gain = np.concatenate([part.gain * np.float32(scale) for part, scale in factors], axis=-1)
    ranks, room = up.shape[-1], RANKS
    while room < ranks:
        room *= 2
    padding = [(0, 0)] * (up.ndim - 1), (0, room - ranks)
    return (
        np.pad(up, [*padding[0], padding[1]]),
        np.pad(down, [*padding[0][:-1], padding[1], (0, 0)]),
        np.pad(gain, [*padding[0][:-1], padding[1]]),
    )


def _place(value: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])
