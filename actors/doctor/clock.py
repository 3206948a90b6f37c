"""Measure a chip's clock, and the overhead of a kernel's grid step, with a kernel of known length."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from actors.doctor.finding import Finding, Machine, compare
from actors.doctor.timing import time_best
from wan_tpu.pricing.bundles import CompileError
from wan_tpu.pricing.probe import count_probe, probe

_SLOW = (
    "every program takes longer by this factor: is the chip throttling, or is another process using it? compare hosts"
)
_MICROSECOND = 1e-6


def check_clock(machine: Machine) -> Iterator[Finding]:
    """Yield clock and grid step, and keep both for plans. On CPU devices the kernel's iterations count as bundles."""
    small, chip = machine.is_rehearsal, machine.chip
    try:
        bundles, outside_loop = (1.0, 0.0) if chip is None else count_probe(chip.host_topology)
    except CompileError as error:
        yield Finding("clock", f"not measured: {error}", "warn", "its kernel compiled", "attach the report to an issue")
        return
    short, long = (1, 41) if small else (30_000, 120_000)
    few, many, shared = (2, 4, 4) if small else (2048, 4096, 100_000)
    seconds = functools.partial(time_probe, interpret=chip is None)
    clock_hz = (long - short) * bundles / max(seconds(1, long) - seconds(1, short), 1e-9)
    yield compare("clock", "GHz", clock_hz / 1e9, None if chip is None else chip.clock_hz / 1e9, 0.97, _SLOW)
    # The same iterations, over a number of steps and over twice that number.
    added_s = seconds(many, shared // many) - seconds(few, shared // few)
    grid_step_s = max(0.0, added_s / (many - few) - outside_loop / clock_hz)
    measured = f"{grid_step_s / _MICROSECOND:.2f} us beyond its bundles"
    yield Finding("grid step", measured, figures={"seconds": grid_step_s, "bundles": outside_loop})
    machine.calibration = dataclasses.replace(machine.calibration, clock_hz=clock_hz, grid_step_s=grid_step_s)


def time_probe(steps: int, iterations: int, *, interpret: bool) -> float:
    """Return the seconds of the kernel over a grid of `steps` steps with `iterations` iterations each."""
    call, shapes = probe(steps, iterations, interpret=interpret)
    arrays = [jnp.full(shape.shape, 0.5, shape.dtype) for shape in shapes]
    return time_best(functools.partial(jax.jit(call), *arrays))
