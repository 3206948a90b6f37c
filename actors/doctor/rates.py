"""Measure how fast a device computes, reads its memory, and exchanges data with the host."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actors.doctor.clock import check_clock
from actors.doctor.finding import Finding, Machine, compare
from actors.doctor.timing import time_best
from wan_tpu.pricing.probe import type_of_8_bits

MIB = 2**20
_SLOW = "is another process using this chip, or is it throttled? compare with another host"
# Compilers reach less of the peak in 8 bits, whose sums are rounded to 8 bits again on the way out.
_SHARE, _SHARE_8_BITS = 0.85, 0.6


def check_rates(machine: Machine) -> Iterator[Finding]:
    """Yield rates and the chip's published peaks; without a TPU there are no peaks to compare with."""
    chip, small = machine.chip, machine.is_rehearsal
    peak = None if chip is None else chip.bf16_flops / chip.devices / 1e12
    size = 512 if small else 8192
    bf16 = _measure_products(size, small, jnp.bfloat16, jnp.float32)
    yield compare("matrix products", "TFLOP/s", bf16, peak, _SHARE, _SLOW)
    narrow = jnp.int8 if chip is None else type_of_8_bits(jax.local_devices()[0])
    if narrow is not None:
        rate = _measure_products(size, small, narrow, jnp.int32 if narrow == jnp.int8 else jnp.float32)
        name = f"matrix products, {jnp.dtype(narrow).name}"
        yield compare(name, "TFLOP/s", rate, None if peak is None else 2 * peak, _SHARE_8_BITS, _SLOW)
    published = None if chip is None else chip.hbm_bytes_per_s / chip.devices / 1e9
    memory = _measure_memory((8 if small else 2048) * MIB)
    yield compare("device memory", "GB/s", memory / 1e9, published, 0.75, _SLOW)
    machine.calibration = dataclasses.replace(machine.calibration, hbm_bytes_per_s=memory)
    host = np.zeros((4 if small else 256) * MIB, np.uint8)
    yield _copy_rate("host to a device", host, jax.local_devices()[:1])
    yield _copy_rate("host to all devices", host, jax.local_devices())
    yield _measure_dispatch()
    yield from check_clock(machine)


def _measure_products(size: int, small: bool, dtype: Any, sums: Any) -> float:
    """Return TFLOP/s of products of one type, each of which needs the one before."""
    count = 4 if small else 50

    @jax.jit
    def products(x: jax.Array, y: jax.Array) -> jax.Array:
        def multiply(_: int, x: jax.Array) -> jax.Array:
            return jnp.matmul(x, y, preferred_element_type=sums).astype(x.dtype)

        return jax.lax.fori_loop(0, count, multiply, x)

    x = jnp.eye(size, dtype=dtype)
    return count * 2 * size**3 / time_best(functools.partial(products, x, x)) / 1e12


def _measure_memory(size: int) -> float:
    """Return bytes a second read and written when one is added to an array, from the difference of two sizes."""
    add = jax.jit(lambda x: x + 1)

    def seconds(size: int) -> float:
        return time_best(functools.partial(add, jnp.zeros(size // 4, jnp.float32)))

    return 2 * (size - size // 4) / max(seconds(size) - seconds(size // 4), 1e-9)


def _copy_rate(name: str, array: np.ndarray, devices: list[jax.Device]) -> Finding:
    seconds = time_best(lambda: [jax.device_put(array, device) for device in devices])
    return compare(name, "GB/s", array.nbytes * len(devices) / seconds / 1e9, None, 0.0, "")


def _measure_dispatch() -> Finding:
    add, x, count = jax.jit(lambda x: x + 1), jnp.zeros(8), 100

    def dispatch_many() -> jax.Array:
        value = x
        for _ in range(count):
            value = add(value)
        return value

    seconds = time_best(dispatch_many) / count
    return Finding("a call", f"{seconds * 1e6:.0f} us", figures={"seconds": seconds})
