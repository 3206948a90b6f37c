"""A kernel whose bundles are known exactly, to measure a chip's speed.

It shows the clock rate, and what a grid step takes in addition to its bundles. Its work is elementwise and stays in
registers, so nothing can stall: its time is its bundles. Sixteen registers keep every arithmetic slot busy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from wan_tpu.pricing.bundles import count_bundles
from wan_tpu.pricing.kernel_prices import StepBundles, step_bundles
from wan_tpu_kernels.low_precision import can_multiply

ROWS, LANES = 128, 128  # The size of a block, 16 registers.
OPERATIONS = 64  # Operations on each register in one iteration.
_COUNTED_STEPS, _COUNTED_ITERATIONS = 512, 50


def probe(steps: int, iterations: int, *, interpret: bool = False) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """Return the kernel over a grid of `steps` steps with `iterations` iterations each, and its arguments' shapes."""
    blocks = jax.ShapeDtypeStruct((steps * ROWS, LANES), jnp.float32)
    block = pl.BlockSpec((ROWS, LANES), lambda step: (step, 0))
    call = pl.pallas_call(
        functools.partial(_iterate, iterations),
        grid=(steps,),
        in_specs=[block, pl.BlockSpec((ROWS, LANES), lambda step: (0, 0))],
        out_specs=block,
        out_shape=blocks,
        interpret=interpret,
        name="probe",
    )
    return call, (blocks, jax.ShapeDtypeStruct((ROWS, LANES), jnp.float32))


def _iterate(iterations: int, x: Any, y: Any, out: Any) -> None:
    def multiply_and_add(_: int, value: jax.Array) -> jax.Array:
        for _ in range(OPERATIONS // 2):
            value = value * y[...] + y[...]
        return value

    out[...] = jax.lax.fori_loop(0, iterations, multiply_and_add, x[...])


def count_probe(host: str) -> tuple[float, float]:
    """Return the bundles of an iteration, and the additional ones of a grid step, as this libtpu compiles them.

    Args:
        host: The compiler's name of a host's chips.

    Raises:
        CompileError: The compiler refuses the kernel, or the host is unknown.
    """
    options = {"steps": _COUNTED_STEPS, "iterations": _COUNTED_ITERATIONS}
    kernel = count_bundles(f"{__file__}:probe", options, host)[0]
    counted: StepBundles = step_bundles(kernel.loops, _COUNTED_STEPS)
    return counted.products / _COUNTED_ITERATIONS, counted.other


def type_of_8_bits(device: jax.Device) -> Any:
    """Return the 8-bit type that a TPU multiplies at twice the rate of bfloat16; None if it has none."""
    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("x",))):
        return next((dtype for dtype in (jnp.int8, jnp.float8_e4m3fn) if can_multiply(dtype)), None)
