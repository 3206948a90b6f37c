"""Time one denoising step and one VAE chunk at full size, with weights made on the devices, and predict both times.

Without a TPU, a small model is used.
"""

import math
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from actors.doctor.finding import Finding, Machine
from actors.doctor.prediction import DTYPE, SIZE, NoPrediction, explain, find_model_of_two_experts, predict, request_of
from actors.doctor.timing import measure
from actors.doctor.trace import trace_categories
from cluster.chips import GIB
from cluster.slice_spec import name_slice
from wan_tpu.aot.names import STEP
from wan_tpu.aot.programs import AbstractRuntime, stage_programs
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import DoesNotFit
from wan_tpu.families.model import open_model, published_model
from wan_tpu.plan import DECODER
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.runtime.program import Program
from wan_tpu.tiny import make_checkpoint

CHUNK = "decoder later"
SMALL_SIZE: dict[str, Any] = {"height": 32, "width": 64, "frames": 9}
CALLS = 5
_NOT_RUN = (
    "if it ran out of memory, this slice is too small for the largest model; otherwise attach the report to an issue"
)
_NOT_FINITE = "videos would be NaN: attach the report to an issue, and see whether --collectives synchronous helps"


def check_step(machine: Machine) -> Iterator[Finding]:
    """Yield how long each takes, and whether a plan predicts that; if not, which part of the chip explains it."""
    is_full = machine.chip is not None
    name_of_model = find_model_of_two_experts()
    if is_full:
        model = published_model(name_of_model)
    else:
        model = open_model(Checkpoint(make_checkpoint(machine.folder / "step", name_of_model)))
    request = request_of(model.spec, SIZE if is_full else SMALL_SIZE)
    mesh = make_mesh(None, heads=model.spec.heads)
    runtime = AbstractRuntime(model, mesh, DTYPE)
    denoise = [stage for stage in model.spec.stages if stage in model.spec.denoise_stages]
    programs = stage_programs(runtime, request, [*denoise[:1], DECODER])
    seconds: dict[str, float] = {}
    for name in (STEP, CHUNK):
        program, arguments, _ = programs[name]
        finding = _time(name, runtime, program, arguments, trace=is_full)
        seconds |= {name: finding.figures["seconds"]} if "seconds" in finding.figures else {}
        yield finding
    if machine.chip is None or jax.process_index() or not seconds:  # One host of a slice predicts for all.
        return
    kind = name_slice(machine.chip, machine.devices // machine.chip.devices)
    try:
        predicted = predict(kind, tuple(mesh.devices.shape), list(seconds), machine, name_of_model)
    except NoPrediction as error:
        yield Finding("prediction", f"none: {error}", "warn", "what wan-tpu plan says", "attach the report to an issue")
        return
    for name, measured in seconds.items():
        yield explain(name, measured, predicted[name])


def _time(name: str, runtime: AbstractRuntime, program: Program, arguments: tuple[Any, ...], *, trace: bool) -> Finding:
    """Compile a program, run it with generated arguments, and report its time and memory.

    A `trace` shows which operations take how long. It isn't possible on a machine without a TPU, where JAX's profiler
    ends a process that has loaded libtpu, as pricing does.
    """
    try:
        program.compile(*arguments)
        arrays = make_arrays(runtime, name, arguments)
        is_finite = _are_finite(program(*arrays))
        times = measure(lambda: program(*arrays), CALLS)
        categories = trace_categories(lambda: program(*arrays)) if trace else {}
    except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
        return Finding(name, str(error).splitlines()[0], "warn", "to run", _NOT_RUN)
    # A TPU counts what programs need while they run apart from arrays.
    memory = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats.get("peak_bytes_in_use", 0) + stats.get("peak_bytes_reserved", 0) for stats in memory]
    peak = f", {max(peaks) / GIB:.1f} GiB a device at most" if max(peaks) else ""
    middle = statistics.median(times)
    traced = sum(categories.values())
    shares = ", ".join(f"{category} {share / traced:.0%}" for category, share in list(categories.items())[:4])
    return Finding(
        name,
        f"{middle:.4g} s ({min(times):.4g} to {max(times):.4g}), compiled in {program.compile_s:.0f} s{peak}"
        f"{f'; {shares}' if shares else ''}"
        f"{'' if is_finite else '; NaN or Inf came out'}",
        "info" if is_finite else "fail",
        "" if is_finite else "finite numbers",
        "" if is_finite else _NOT_FINITE,
        figures={"seconds": middle, "times": times, "compile_s": program.compile_s, "peak_bytes": max(peaks)}
        | {"seconds_by_category": categories},
    )


def _are_finite(result: Any) -> bool:
    floats = [array for array in jax.tree.leaves(result) if jnp.issubdtype(array.dtype, jnp.floating)]
    return bool(jax.jit(lambda arrays: jnp.array([jnp.isfinite(array).all() for array in arrays]).all())(floats))


def make_arrays(runtime: AbstractRuntime, name: str, shapes: Any) -> Any:
    """Return pseudorandom small numbers, generated in place: no memory is needed besides the arrays' own.

    shapes: a tree of `jax.ShapeDtypeStruct`; one may have a layout besides its sharding, as a VAE's caches do
    """
    where = jax.tree.map(lambda shape: shape.format if shape.format.layout else shape.sharding, shapes)
    return runtime.program(f"arrays of {name}", lambda: jax.tree.map(_fill, shapes), where)()


def _fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.zeros(shape.shape, shape.dtype)
    bits = jnp.zeros(shape.shape, jnp.uint32)
    for axis in range(len(shape.shape)):
        stride = math.prod(shape.shape[axis + 1 :]) % 2**32
        bits += jax.lax.broadcasted_iota(jnp.uint32, shape.shape, axis) * jnp.uint32(stride)
    for multiplier, shift in ((0x9E3779B1, 15), (0x85EBCA77, 13)):  # Of xxHash: every bit depends on all others.
        bits = bits * jnp.uint32(multiplier)
        bits ^= bits >> shift
    unit = (bits >> 8).astype(jnp.int32).astype(jnp.float32) / 2**23 - 1
    return (unit * 0.03).astype(shape.dtype)
