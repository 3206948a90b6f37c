"""Read the Pallas calls of a compiled program, and turn each into a program of its own, to count its bundles."""

import base64
import hashlib
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from wan_tpu.pricing.hlo import Computation, Instruction, Module
from wan_tpu.pricing.jax_private import make_kernel_context
from wan_tpu.pricing.traffic import is_kernel

_DTYPES = {
    "pred": "bool", "s4": "int4", "u4": "uint4", "s8": "int8", "u8": "uint8", "s16": "int16", "u16": "uint16",
    "s32": "int32", "u32": "uint32", "bf16": "bfloat16", "f16": "float16", "f32": "float32",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
# The parts of a kernel call's configuration: code, compiler flags, VMEM limit.
_CONFIG = ("custom_call_config", "flag_configs", "scoped_memory_configs")
# What doesn't change a kernel's code: what it costs in all, its lines' places in the source, and some compilers'
# decisions about where a program's arrays are. In a program of its own, a kernel's are elsewhere.
_LEFT_OUT = ("cost_estimate", "debug_locations", "input_memory_space_colors", "output_memory_space_colors")
Array = tuple[str, tuple[int, ...]]  # JAX's name of the dtype, and the dimensions.


@dataclass(frozen=True)
class KernelCall:
    """One Pallas call."""

    name: str
    grid: tuple[int, ...]
    parallel: tuple[bool, ...]  # Whether the cores of a chip may share each grid axis.
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    # The multiply-adds of a grid step's matrix products; of conditional alternatives, only the largest. Those of 8-bit
    # numbers count half, which is the most that matrix units gain from them.
    macs: float
    # The multiply-adds of all grid steps, relative to all steps costing as much as the costliest: a last block may be
    # partial.
    busy: float
    # The iterations in each grid step of the innermost loop of constant length, or 1 without one. Loops under
    # conditions, such as those over a last block, don't count.
    repeats: int
    loops: int  # How many loops run at every grid step.
    # The numbers of the operands of which all grid steps read the same slice of the first dimension, chosen by an index
    # that is another operand.
    stacks: tuple[int, ...]
    # The shape of the block that a grid step reads of each operand and writes of each result; () where the kernel reads
    # or writes as it likes.
    blocks: tuple[tuple[int, ...], ...]
    code: str  # A digest of the body, without the grid's size and the constants that place blocks.
    config: str  # The compiler's configuration of the kernel, including its body.

    @property
    def unread_bytes(self) -> float:
        """The bytes of the operands that aren't read: other slices than the chosen one, and more than all blocks."""
        unread = 0.0
        for number, ((dtype, dims), block) in enumerate(zip(self.operands, self.blocks, strict=False)):
            size = read = float(math.prod(dims))
            if number in self.stacks:
                read /= dims[0]
            if block:
                read = min(read, self.steps * math.prod(block))
            unread += (size - read) * jnp.dtype(dtype).itemsize
        return unread

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
    def digest(self) -> str:
        """A name for the code of one grid step: calls with the same digest have the same bundles a step.

        Where a step's blocks are and how long the grid is change a step's address arithmetic by some dozens of bundles;
        these aren't told apart. A grid of one step has no loop.
        """
        arrays = (*self.operands, *self.results)
        blocks = (*self.blocks, *[()] * len(arrays))
        tiles = [(dtype, block or dims) for (dtype, dims), block in zip(arrays, blocks, strict=False)]
        steps = [min(self.steps_a_core(cores), 3) for cores in (1, 2)]
        settings = json.loads(self.config)
        del settings["custom_call_config"]["body"]
        return hashlib.sha256(repr((tiles, steps, self.code, settings)).encode()).hexdigest()[:32]


def read_kernel_call(instruction: Instruction, computation: Computation) -> KernelCall:
    """Return the kernel that a tpu_custom_call runs, from the Mosaic module that it carries."""
    start = instruction.attributes.index("backend_config=") + len("backend_config=")
    config, _ = json.JSONDecoder().raw_decode(instruction.attributes[start:])
    mosaic = _read_mosaic(base64.b64decode(config["custom_call_config"]["body"]))
    for setting in _LEFT_OUT:
        config["custom_call_config"].pop(setting, None)
    operands = [shape for name in instruction.operands for shape in computation.by_name[name].shapes]
    return KernelCall(
        name=instruction.stem,
        operands=tuple((_DTYPES[shape.dtype], shape.dims) for shape in operands),
        results=tuple((_DTYPES[shape.dtype], shape.dims) for shape in instruction.shapes),
        **vars(mosaic),
        config=json.dumps({part: config[part] for part in _CONFIG if config.get(part)}),
    )


def list_kernel_calls(module: Module) -> list[KernelCall]:
    """Return the kernels that a program runs."""
    return [
        read_kernel_call(instruction, computation)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if is_kernel(instruction)
    ]


def save(calls: Sequence[KernelCall], path: Path) -> None:
    """Write calls to a file that `load_saved` reads."""
    path.write_text(json.dumps([asdict(call) for call in calls]))


def load_saved(path: str) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Return a program with only saved calls, and its arguments, as `bundles.count_bundles` expects them.

    The scope of each call is named by `name_scope`.
    """
    calls = json.loads(Path(path).read_text())

    def describe(call: Any, side: str) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(dims, dtype) for dtype, dims in call[side]]

    def run(*arguments: jax.Array) -> list[Any]:
        left, results = iter(arguments), []
        for number, call in enumerate(calls):
            # Version 1 of the custom-call interface takes its configuration as the text from the program.
            alone = jax.ffi.ffi_call(
                "tpu_custom_call",
                describe(call, "results"),
                custom_call_api_version=1,
                legacy_backend_config=call["config"],
            )
            with jax.named_scope(name_scope(number)):
                results.append(alone(*itertools.islice(left, len(call["operands"]))))
        return results

    return run, [operand for call in calls for operand in describe(call, "operands")]


def name_scope(number: int) -> str:
    """Return the name of the scope that calls the kernel of this number in a saved file."""
    return f"kernel{number}"


@dataclass(frozen=True)
class _Mosaic:
    """The contents of a kernel's own module; the fields are those of `KernelCall`."""

    grid: tuple[int, ...]
    parallel: tuple[bool, ...]
    macs: float
    busy: float
    repeats: int
    loops: int
    stacks: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    code: str


def _read_mosaic(bytecode: bytes) -> _Mosaic:
    with make_kernel_context(), ir.Location.unknown():
        module = ir.Module.parse(bytecode).operation
        text = str(module)
        bounds = re.search(r"iteration_bounds = array<i64: ([\d, ]+)>", text)
        semantics = re.search(r"dimension_semantics = \[([^\]]*)\]", text)
        grid = tuple(int(bound) for bound in bounds[1].split(",")) if bounds else ()
        macs = _count_macs(module, grid)
        return _Mosaic(
            grid,
            tuple("parallel" in axis for axis in semantics[1].split(",")) if semantics else (),
            macs.most,
            min(1.0, macs.mean / macs.most) if macs.most else 1.0,
            _count_repeats(module),
            _count_loops(module),
            _find_stacks(module, windows := _read_windows(text)),
            tuple(block for _, block in windows),
            _digest_code(text),
        )


def _digest_code(text: str) -> str:
    start = text.find("func.func", text.find("func.func") + 1)  # After the kernel come the functions that place blocks.
    kernel, places = text[:start], text[start:]
    kernel = re.sub(r"iteration_bounds = array<[^>]*>", "", kernel)
    places = re.sub(r"value = -?\d+ :", "", places)
    return hashlib.sha256(f"{kernel}{places}".encode()).hexdigest()


def _read_windows(text: str) -> list[tuple[str | None, tuple[int, ...]]]:
    """Return of each operand and result the function that finds a grid step's block, and the block's shape."""
    before = re.search(r"scalar_prefetch = (\d+)", text)
    windows: list[tuple[str | None, tuple[int, ...]]] = [(None, ())] * (int(before[1]) if before else 0)
    params = re.search(r"window_params = \[(.*?)\]", text, re.DOTALL)
    for window in re.findall(r"\{([^}]*)\}", params[1]) if params else ():
        function = re.search(r"transform_indices = @(\w+)", window)
        bounds = re.search(r"window_bounds = array<i64: ([\d, ]+)>", window)
        block = tuple(int(size) for size in bounds[1].split(",")) if bounds else ()
        windows.append((function[1] if function else None, block))
    return windows


def _find_stacks(module: Any, windows: Sequence[tuple[str | None, tuple[int, ...]]]) -> tuple[int, ...]:
    """Return the numbers of the operands whose first index is an element of an operand, the same at every grid step."""
    functions = [inner.operation for region in module.regions for block in region for inner in block]
    stacks = {}
    for function in functions:
        *_, last = (inner.operation for block in function.regions[0] for inner in block)
        stacks[ir.StringAttr(function.attributes["sym_name"]).value] = list(last.operands)
    return tuple(
        number for number, (name, _) in enumerate(windows) if name and stacks[name] and _is_chosen(stacks[name][0])
    )


def _is_chosen(index: Any) -> bool:
    """Return whether an index is loaded from an address that is the same at every grid step."""
    operation = getattr(index.owner, "operation", None)
    if operation is None or not _is(operation, "memref.load"):
        return False
    places = [getattr(place.owner, "operation", None) for place in list(operation.operands)[1:]]
    return all(place is not None and _is(place, "arith.constant") for place in places)


class _Macs(NamedTuple):
    """Multiply-adds of a grid step: mean and maximum."""

    mean: float
    most: float


def _count_macs(operation: Any, grid: tuple[int, ...]) -> _Macs:
    """Count a product [M, K] x [K, N] -> [M, N] as MNK, the root of the product of the three arrays' sizes."""
    if operation.name.endswith("tpu.matmul"):
        left, right = (_parse_vector(operand.type) for operand in list(operation.operands)[:2])
        result, _ = _parse_vector(operation.results[0].type)
        count = math.sqrt(left[0] * right[0] * result) * (0.5 if left[1] == 8 else 1.0)
        return _Macs(count, count)
    regions = [_sum_macs(region, grid) for region in operation.regions]
    if not _is(operation, "scf.if"):
        trips = _count_trips(operation) or 1
        return _Macs(sum(macs.mean for macs in regions) * trips, sum(macs.most for macs in regions) * trips)
    share = _compute_share(operation.operands[0], grid)
    weights = (1.0, 1.0) if share is None else (share, 1 - share)  # If it holds, and if it doesn't.
    means = [weight * macs.mean for weight, macs in zip(weights, regions, strict=False)]
    return _Macs(max(means) if share is None else sum(means), max(macs.most for macs in regions))


def _sum_macs(region: Any, grid: tuple[int, ...]) -> _Macs:
    """Count a region's products: as maximum, the largest conditional one; as mean, each as often as it runs.

    A condition that isn't on a grid index may always hold, but no two of them hold at once.
    """
    mean = most = largest = unknown = 0.0
    for child in (inner.operation for block in region for inner in block):
        macs = _count_macs(child, grid)
        if not _is(child, "scf.if"):
            mean, most = mean + macs.mean, most + macs.most
            continue
        largest = max(largest, macs.most)
        if _compute_share(child.operands[0], grid) is None:
            unknown = max(unknown, macs.mean)
        else:
            mean += macs.mean
    return _Macs(mean + unknown, most + largest)


def _compute_share(condition: Any, grid: tuple[int, ...]) -> float | None:
    """Return the share of grid steps in which a condition holds; None if it isn't a condition on a grid index."""
    operation = getattr(condition.owner, "operation", None)
    if operation is None or not _is(operation, "arith.cmpi"):
        return None
    left, right = operation.operands
    predicate, number = ir.IntegerAttr(operation.attributes["predicate"]).value, _evaluate_constant(right)
    if number is None:
        return None
    source = getattr(left.owner, "operation", None)
    if source is not None:  # A truth value was converted to an integer and is compared with 0.
        same = predicate == 1 and number == 0 and _is(source, "arith.extui")
        return _compute_share(source.operands[0], grid) if same else None
    axis = ir.BlockArgument(left).arg_number
    if not _is(left.owner.owner, "func.func") or axis >= len(grid):  # Such as a loop's counter.
        return None
    holds = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    return sum(holds[predicate](step, number) for step in range(grid[axis])) / grid[axis] if predicate < 6 else None


def _count_repeats(operation: Any) -> int:
    """Return the iterations of the innermost loop that runs at every grid step; of several, the most."""
    if _is(operation, "scf.if"):
        return 1
    inner = [_count_repeats(child.operation) for region in operation.regions for block in region for child in block]
    return max(inner, default=1) * (_count_trips(operation) or 1)


def _count_loops(operation: Any) -> int:
    """Return how many loops there are that run at every grid step."""
    if _is(operation, "scf.if"):
        return 0
    inner = sum(_count_loops(child.operation) for region in operation.regions for block in region for child in block)
    return inner + _is(operation, "scf.for")


def _count_trips(operation: Any) -> int | None:
    """Return the iterations of a loop between constants; None for other loops and other operations."""
    if not _is(operation, "scf.for"):
        return None
    start, stop, step = (_evaluate_constant(operand) for operand in list(operation.operands)[:3])
    if start is None or stop is None or step is None:
        return None
    return max(0, -(-(stop - start) // step))


def _evaluate_constant(value: Any) -> int | None:
    """Return the integer that a value always has, as far as sums of constants show it."""
    owner = value.owner
    operation = getattr(owner, "operation", None)  # Arguments are owned by a block, which has none.
    if operation is None:
        return None
    if _is(operation, "arith.constant"):
        return int(ir.IntegerAttr(operation.attributes["value"]).value)
    operands = [_evaluate_constant(operand) for operand in operation.operands] if _is(operation, "arith.addi") else []
    return None if not operands or None in operands else sum(operand for operand in operands if operand is not None)


def _is(operation: Any, name: str) -> bool:
    """Return whether an operation has a name; in programs, names have the prefix of the stable dialect."""
    return operation.name.endswith(name)


def _parse_vector(kind: Any) -> tuple[int, int]:
    """Return elements and bits of one element of a type such as vector<256x128xbf16>."""
    match = re.match(r"vector<((?:\d+x)+)[a-z]+(\d+)", str(kind))
    assert match is not None, kind
    return math.prod(int(size) for size in match[1].split("x") if size), int(match[2])
