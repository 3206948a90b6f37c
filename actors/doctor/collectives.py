"""What devices send each other: whether it arrives where it should, and how fast."""

import functools
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
    count = len(devices)
    if count == 1:
        yield Finding("collectives", "there is one device")
        return
    mesh, platform = Mesh(np.array(devices), (AXIS,)), devices[0].platform
    rows = -(-(16 if machine.is_rehearsal else 8192) // count) * count  # Of a device: all-to-all cuts them in `count`.
    # Integers that float32 holds exactly, and few of them alike: whatever is swapped shows.
    whole = (np.arange(count * rows * WIDTH) % 65_521).astype(np.float32).reshape(count, rows, WIDTH)
    for name, (function, expected) in _kinds(count, platform).items():
        yield _check(name, function, functools.partial(expected, whole), whole, mesh)


def _kinds(count: int, platform: str) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return by name what each device does with its rows, and what a device must have then.

    The first is given [rows, WIDTH] inside `jax.shard_map`; the second all devices' rows, [devices, rows, WIDTH], and
    which device, in numpy.
    """
    ring = [(i, (i + 1) % count) for i in range(count)]
    return {
        "all-to-all": (
            lambda x: jax.lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True),
            lambda whole, device: whole.reshape(count, count, -1, WIDTH)[:, device],
        ),
        "all-gather": (lambda x: jax.lax.all_gather(x, AXIS, axis=0, tiled=True), lambda whole, device: whole),
        "gather in the background": (lambda x: gather_rows(x, (AXIS,), platform), lambda whole, device: whole),
        "sum": (lambda x: jax.lax.psum(x, AXIS), lambda whole, device: whole.sum(0)),
        "ring": (lambda x: jax.lax.ppermute(x, AXIS, ring), lambda whole, device: whole[device - 1]),
    }


def _check(
    name: str, function: Callable[..., Any], expected: Callable[[int], np.ndarray], whole: np.ndarray, mesh: Mesh
) -> Finding:
    flat = whole.reshape(-1, WIDTH)
    x = jax.make_array_from_callback(flat.shape, NamedSharding(mesh, P(AXIS)), lambda index: flat[index])
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))
    result = jax.block_until_ready(program(x))
    start = time.perf_counter()
    jax.block_until_ready(program(x))
    seconds = time.perf_counter() - start
    places = {device: number for number, device in enumerate(mesh.devices.flat)}
    wrong = [
        f"device {shard.device.id}"
        for shard in result.addressable_shards
        if not np.array_equal(np.asarray(shard.data).ravel(), expected(places[shard.device]).ravel())
    ]
    nbytes = whole[0].nbytes
    return Finding(
        name,
        f"wrong on {', '.join(wrong)}" if wrong else f"right, {nbytes / seconds / 1e9:.3g} GB/s a device",
        "fail" if wrong else "ok",
        "what numpy gives",
        _ADVICE if wrong else "",
        {"bytes_a_device": nbytes, "seconds": seconds},
    )
