"""What devices send each other: whether it arrives where it should, and how fast."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from actors.doctor.finding import Finding, Machine
from wan_tpu.ops.collectives import gather_rows

AXIS = "devices"
WIDTH = 128
_ADVICE = (
    "the network between chips, or its compiler, is broken: attach this report to an issue, and see whether "
    "--collectives synchronous helps"
)


def check_collectives(machine: Machine) -> Iterator[Finding]:
    """Yield for each kind whether every device got what it was to get, at the size of a step's exchanges."""
    devices = jax.devices()
    if len(devices) == 1:
        yield Finding("collectives", "there is one device")
        return
    mesh = Mesh(np.array(devices), (AXIS,))
    rows = (16 if machine.is_rehearsal else 8192) * len(devices)
    platform = devices[0].platform
    for name, (function, expected) in _kinds(len(devices), platform).items():
        yield _check(name, function, expected, mesh, rows)


def _kinds(count: int, platform: str) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return by name what each device does with its rows, and what all of them together must give, in numpy.

    Global arrays are [devices * rows, WIDTH]; numpy's side sees [devices, rows, WIDTH].
    """
    ring = [(i, (i + 1) % count) for i in range(count)]

    def swapped(x: np.ndarray) -> np.ndarray:
        return x.reshape(count, count, -1, WIDTH).swapaxes(0, 1)

    def repeated(x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x.reshape(1, -1), (count, x.size))

    return {
        "all-to-all": (lambda x: jax.lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True), swapped),
        "all-gather": (lambda x: jax.lax.all_gather(x, AXIS, axis=0, tiled=True), repeated),
        "gather in the background": (lambda x: gather_rows(x, (AXIS,), platform), repeated),
        "sum": (lambda x: jax.lax.psum(x, AXIS), lambda x: np.broadcast_to(x.sum(0), x.shape)),
        "ring": (lambda x: jax.lax.ppermute(x, AXIS, ring), lambda x: np.roll(x, 1, axis=0)),
    }


def _check(name: str, function: Callable[..., Any], expected: Callable[..., Any], mesh: Mesh, rows: int) -> Finding:
    count = mesh.size
    # Integers that float32 holds exactly, another one at each place: whatever is swapped shows.
    whole = np.arange(count * rows * WIDTH, dtype=np.float32).reshape(count, rows, WIDTH) % 65_521
    sharding = NamedSharding(mesh, P(AXIS))
    flat = whole.reshape(-1, WIDTH)
    x = jax.make_array_from_callback(flat.shape, sharding, lambda index: flat[index])
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))
    result = jax.block_until_ready(program(x))
    start = time.perf_counter()
    jax.block_until_ready(program(x))
    seconds = time.perf_counter() - start
    wrong = _wrong_devices(result, np.ascontiguousarray(expected(whole)).reshape(count, -1), mesh)
    rate = flat.nbytes / count / seconds / 1e9
    return Finding(
        name,
        f"wrong on {', '.join(wrong)}" if wrong else f"right, {rate:.3g} GB/s a device",
        "fail" if wrong else "ok",
        "what numpy gives",
        _ADVICE if wrong else "",
        {"bytes_a_device": flat.nbytes // count, "seconds": seconds},
    )


def _wrong_devices(result: jax.Array, expected: np.ndarray, mesh: Mesh) -> list[str]:
    """Return the devices of this process whose part isn't the expected one, [devices, values of a device]."""
    places = {device: number for number, device in enumerate(mesh.devices.flat)}
    return [
        f"device {shard.device.id}"
        for shard in result.addressable_shards
        if not np.array_equal(np.asarray(shard.data).reshape(-1), expected[places[shard.device]])
    ]
