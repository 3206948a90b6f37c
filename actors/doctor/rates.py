"""How fast a device computes, reads its memory, and is reached from the host."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actors.doctor.finding import Finding, Machine, compare

TRIES = 3
MIB = 2**20
_SLOW = "is another process on this chip, or the chip throttled? compare with another host"


def check_rates(machine: Machine) -> Iterator[Finding]:
    """Yield rates beside the published peaks of the chip; without a TPU there is nothing to compare them with."""
    chip, small = machine.chip, machine.is_rehearsal
    flops = None if chip is None else chip.bf16_flops / chip.devices / 1e12
    yield compare("matrix products", "TFLOP/s", _product_rate(512 if small else 8192, small), flops, 0.85, _SLOW)
    memory = None if chip is None else chip.hbm_bytes_per_s / chip.devices / 1e9
    size = (8 if small else 2048) * MIB
    yield compare("device memory", "GB/s", _memory_rate(size), memory, 0.75, _SLOW)
    host = np.zeros((4 if small else 256) * MIB, np.uint8)
    yield _copy_rate("host to a device", host, jax.local_devices()[:1])
    yield _copy_rate("host to all devices", host, jax.local_devices())
    yield _dispatch()


def _product_rate(size: int, small: bool) -> float:
    """Return TFLOP/s of products in bfloat16, each of which needs the one before."""
    count = 4 if small else 50

    @jax.jit
    def products(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: (x @ y).astype(x.dtype), x)

    x = jnp.eye(size, dtype=jnp.bfloat16)
    return count * 2 * size**3 / _best(functools.partial(products, x, x)) / 1e12


def _memory_rate(size: int) -> float:
    """Return GB/s that are read and written by adding one to an array."""
    x = jnp.zeros(size // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return 2 * size / _best(functools.partial(add, x)) / 1e9


def _copy_rate(name: str, array: np.ndarray, devices: list[jax.Device]) -> Finding:
    seconds = _best(lambda: [jax.device_put(array, device) for device in devices])
    return compare(name, "GB/s", array.nbytes * len(devices) / seconds / 1e9, None, 0.0, "")


def _dispatch() -> Finding:
    add, x, count = jax.jit(lambda x: x + 1), jnp.zeros(8), 100

    def many() -> jax.Array:
        value = x
        for _ in range(count):
            value = add(value)
        return value

    seconds = _best(many) / count
    return Finding("a call", f"{seconds * 1e6:.0f} us", figures={"seconds": seconds})


def _best(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of some calls, the first of which, that compiles, isn't counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)
