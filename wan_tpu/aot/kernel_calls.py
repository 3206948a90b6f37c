"""Read the Pallas calls of a compiled program: what they run, and a program of each alone, to count its bundles."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src.interpreters import mlir  # JAX has no public reader of its own kernels
from jax._src.lib import tpu
from jax._src.lib.mlir import ir

from wan_tpu.aot.hlo import Computation, Instruction

_DTYPES = {
    "pred": "bool", "s4": "int4", "u4": "uint4", "s8": "int8", "u8": "uint8", "s16": "int16", "u16": "uint16",
    "s32": "int32", "u32": "uint32", "bf16": "bfloat16", "f16": "float16", "f32": "float32",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
Array = tuple[str, tuple[int, ...]]  # dtype as JAX names it, dimensions


@dataclass(frozen=True)
class KernelCall:
    """One Pallas call.

    grid      iterations along each grid axis; parallel  whether the cores of a chip may share that axis
    operands, results  the arrays
    trips     iterations of each loop inside a grid step whose bounds are constants
    config    what the compiler is told, the kernel's body included
    """

    name: str
    grid: tuple[int, ...]
    parallel: tuple[bool, ...]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    trips: tuple[int, ...]
    config: str

    @property
    def steps(self) -> int:
        """The grid's iterations."""
        return math.prod(self.grid)

    def steps_a_core(self, cores: int) -> int:
        """Return the iterations of the busiest core when `cores` share the first parallel axis they can."""
        for i, (size, parallel) in enumerate(zip(self.grid, self.parallel, strict=False)):
            if parallel and size > 1:
                return math.prod(self.grid[:i]) * -(-size // cores) * math.prod(self.grid[i + 1 :])
        return self.steps

    @property
    def bytes(self) -> int:
        """Bytes of all its arrays, each once: the least it moves."""
        return sum(math.prod(dims) * jax.numpy.dtype(dtype).itemsize for dtype, dims in self.operands + self.results)

    @property
    def digest(self) -> str:
        """A name for the kernel's code: calls with the same digest have the same bundles."""
        return hashlib.sha256(repr((self.operands, self.results, self.config)).encode()).hexdigest()[:32]

    def save(self, path: Path) -> None:
        """Write the call, for `saved`."""
        path.write_text(json.dumps(asdict(self)))


def read_kernel_call(instruction: Instruction, computation: Computation) -> KernelCall:
    """Return the kernel that a tpu_custom_call runs, from the Mosaic module that it carries."""
    start = instruction.attributes.index("backend_config=") + len("backend_config=")
    config, _ = json.JSONDecoder().raw_decode(instruction.attributes[start:])
    text = _mosaic_text(base64.b64decode(config["custom_call_config"]["body"]))
    bounds = re.search(r"iteration_bounds = array<i64: ([\d, ]+)>", text)
    semantics = re.search(r"dimension_semantics = \[([^\]]*)\]", text)
    operands = [shape for name in instruction.operands for shape in computation.by_name[name].shapes]
    return KernelCall(
        name=instruction.stem,
        grid=tuple(int(bound) for bound in bounds[1].split(",")) if bounds else (),
        parallel=tuple("parallel" in axis for axis in semantics[1].split(",")) if semantics else (),
        operands=tuple((_DTYPES[shape.dtype], shape.dims) for shape in operands),
        results=tuple((_DTYPES[shape.dtype], shape.dims) for shape in instruction.shapes),
        trips=_loop_trips(text),
        config=json.dumps({"custom_call_config": config["custom_call_config"]}),
    )


def saved(path: str) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Return a program of one saved call alone, and its arguments, as `bundles.count_bundles` wants them."""
    call = json.loads(Path(path).read_text())
    operands, results = (
        [jax.ShapeDtypeStruct(dims, dtype) for dtype, dims in call[side]] for side in ("operands", "results")
    )

    def run(*arguments: jax.Array) -> Any:
        # Version 1 of the custom-call interface takes its configuration as the text that stood in the program.
        alone = jax.ffi.ffi_call(
            "tpu_custom_call", results, custom_call_api_version=1, legacy_backend_config=call["config"]
        )
        return alone(*arguments)

    return run, operands


def _loop_trips(text: str) -> tuple[int, ...]:
    """Return how often each `scf.for` between constants runs, in the order of the kernel's text."""
    constants = {name: int(value) for name, value in re.findall(r"(%[\w-]+) = arith\.constant (-?\d+) :", text)}
    loops = re.findall(r"scf\.for %\S+ = (%\S+) to (%\S+) step (%\S+)", text)
    bounds = [[constants[name] for name in loop] for loop in loops if all(name in constants for name in loop)]
    return tuple((stop - start) // step for start, stop, step in bounds)


def _mosaic_text(bytecode: bytes) -> str:
    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        return str(ir.Module.parse(bytecode).operation)
