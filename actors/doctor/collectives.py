"""Check the exchanges between devices: whether data arrives where it should, and how fast."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from actors.doctor.finding import Finding, Machine, compare
from actors.doctor.timing import time_best
from actors.planning.slice_description import describe_slice
from cluster.slice_spec import SliceSpec, name_slice
from wan_tpu.ops.collectives import gather_rows
from wan_tpu.pricing.ici import Interconnect, interconnect_of
from wan_tpu.runtime.program import compiler_options

AXIS = "devices"
WIDTH = 128
_SLOW = "is a cable of the slice faulty? compare with another slice, and attach this report to an issue"
_ADVICE = (
    "the network between chips, or the compiled collectives, are broken: attach this report to an issue, and see "
    "whether "
    "--collectives synchronous helps"
)


def check_collectives(machine: Machine) -> Iterator[Finding]:
    """Yield, for each kind of exchange, whether every device received the right data, at a step's sizes."""
    devices = jax.devices()
    count = len(devices)
    if count == 1:
        yield Finding("collectives", "there is one device")
        return
    mesh, platform = Mesh(np.array(devices), (AXIS,)), devices[0].platform
    rows = -(-(16 if machine.is_rehearsal else 8192) // count) * count  # Of a device: all-to-all cuts them in `count`.
    # Integers that float32 holds exactly, few of which are equal, so that swapped data is noticed.
    whole = (np.arange(count * rows * WIDTH) % 65_521).astype(np.float32).reshape(count, rows, WIDTH)
    for name, (function, expected) in _list_kinds(count, platform).items():
        right = functools.partial(expected, whole)
        yield _check(name, right, whole, mesh, _compile(function, mesh))
        if machine.chip is not None and name in machine.chip.sparse_core_collectives:
            yield _check(f"{name} by SparseCores", right, whole, mesh, _compile(function, mesh, sparse_cores=True))
    yield from _measure_links(machine, mesh)


def _list_kinds(count: int, platform: str) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return, by name, the function that each device runs, and the function that computes the expected result.

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
    name: str,
    expected: Callable[[int], np.ndarray],
    whole: np.ndarray,
    mesh: Mesh,
    program: Callable[[jax.Array], jax.Array],
) -> Finding:
    flat = whole.reshape(-1, WIDTH)
    x = jax.make_array_from_callback(flat.shape, NamedSharding(mesh, P(AXIS)), lambda index: flat[index])
    result = program(x)
    seconds = time_best(functools.partial(program, x))
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


def _compile(function: Callable[..., Any], mesh: Mesh, *, sparse_cores: bool = False) -> Any:
    """Return what each device does with its rows as a jitted program, with the options that a model's programs have."""
    sharded = jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return jax.jit(sharded, compiler_options=compiler_options(mesh, sparse_cores=sparse_cores))


def _measure_links(machine: Machine, mesh: Mesh) -> Iterator[Finding]:
    """Yield the rate of the busiest links, between chips and within a chip of two devices, and keep it for plans."""
    chip, count = machine.chip, mesh.size
    if chip is None:
        links = Interconnect(tuple((device, 0, 0, 0) for device in range(count)), 1.0, 1.0)
    else:
        links = interconnect_of(describe_slice(SliceSpec(name_slice(chip, machine.devices // chip.devices))), mesh)
    exchange = _list_kinds(count, mesh.devices.flat[0].platform)["all-to-all"][0]
    yield _measure_busiest(machine, mesh, links, "all-to-all", [list(range(count))], exchange)
    if chip is not None and chip.devices == 2 and count > 2:
        pairs = [(device, device ^ 1) for device in range(count)]  # JAX lists a chip's two devices one after the other.
        swap = functools.partial(jax.lax.ppermute, axis_name=AXIS, perm=pairs)
        yield _measure_busiest(machine, mesh, links, "collective-permute", pairs, swap)


def _measure_busiest(
    machine: Machine,
    mesh: Mesh,
    links: Interconnect,
    kind: str,
    groups: Sequence[Sequence[int]],
    function: Callable[..., Any],
) -> Finding:
    """Return the bytes per second of the link that a collective keeps busy longest, by comparing two sizes."""
    program, sharding = _compile(function, mesh), NamedSharding(mesh, P(AXIS))
    seconds, predicted = [], []
    for megabytes in (1, 2) if machine.is_rehearsal else (32, 128):
        rows = -(-megabytes * 2**20 // (4 * WIDTH * mesh.size)) * mesh.size  # Of a device: they are cut in `mesh.size`.
        make = jax.jit(functools.partial(jnp.zeros, (rows * mesh.size, WIDTH)), out_shardings=sharding)
        seconds.append(time_best(functools.partial(program, make())))
        busy = links.busy(kind, groups, 4 * WIDTH * rows)
        link = max(busy, key=lambda link: busy[link])
        predicted.append(busy[link])
    within = link[0][:3] == link[1][:3]
    published = links.core_bytes_per_s if within else links.link_bytes_per_s
    rate = published * (predicted[1] - predicted[0]) / max(seconds[1] - seconds[0], 1e-9)
    measured: dict[str, Any] = {"core_bytes_per_s" if within else "link_bytes_per_s": rate}
    machine.calibration = dataclasses.replace(machine.calibration, **measured)
    name = "a link within a chip" if within else "a link between chips"
    return compare(name, "GB/s", rate / 1e9, None if machine.chip is None else published / 1e9, 0.8, _SLOW)
