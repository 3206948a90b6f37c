"""Read what a Pallas call in a compiled program runs: the kernel's name and its grid."""

import base64
import math
import re
from dataclasses import dataclass

from jax._src.interpreters import mlir  # JAX has no public reader of its own kernels
from jax._src.lib import tpu
from jax._src.lib.mlir import ir

from wan_tpu.aot.hlo import Instruction, Shape


@dataclass(frozen=True)
class KernelCall:
    """One Pallas call.

    grid      iterations along each grid axis; parallel  whether a chip's two cores may share that axis
    shapes    of the results
    """

    name: str
    grid: tuple[int, ...]
    parallel: tuple[bool, ...]
    shapes: tuple[Shape, ...]

    @property
    def steps(self) -> int:
        """The grid's iterations."""
        return math.prod(self.grid)


def read_kernel_call(instruction: Instruction) -> KernelCall:
    """Return the kernel that a tpu_custom_call runs, from the Mosaic module that it carries."""
    grid: tuple[int, ...] = ()
    parallel: tuple[bool, ...] = ()
    carried = re.search(r'"body":"([^"]+)"', instruction.attributes)
    if carried:
        text = _mosaic_text(base64.b64decode(carried[1]))
        if bounds := re.search(r"iteration_bounds = array<i64: ([\d, ]+)>", text):
            grid = tuple(int(bound) for bound in bounds[1].split(","))
        if semantics := re.search(r"dimension_semantics = \[([^\]]*)\]", text):
            parallel = tuple("parallel" in axis for axis in semantics[1].split(","))
    return KernelCall(instruction.stem, grid, parallel, instruction.shapes)


def _mosaic_text(bytecode: bytes) -> str:
    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        return str(ir.Module.parse(bytecode).operation)
