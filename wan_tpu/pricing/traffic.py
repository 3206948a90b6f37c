"""Classify one instruction of a program: its kind of work, its HBM bytes, its multiply-adds."""

import math
import re
from collections.abc import Iterator

import numpy as np

from wan_tpu.pricing import ici
from wan_tpu.pricing.hlo import Computation, Instruction, Module, Shape

# These run nothing: they rename memory or belong to the structure of the program.
FREE = frozenset(
    ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all",
     "opt-barrier", "add-dependency", "domain")
)  # fmt: skip
MOVES = frozenset(
    ("copy", "transpose", "pad", "slice", "concatenate", "reshape", "dynamic-slice", "dynamic-update-slice", "reverse",
     "broadcast", "iota", "gather", "scatter")
)  # fmt: skip
_RENAMES = ("bitcast", "reshape")
_ALIASED = "output_to_operand_aliasing={{}: (0, {})}"  # Of a nested fusion: the same memory in other tiles.
_PARTIAL = ("dynamic-slice", "slice", "gather")


def is_free(instruction: Instruction) -> bool:
    """Return whether an instruction takes no time."""
    return instruction.opcode in FREE or 'custom_call_target="AllocateBuffer"' in instruction.attributes


def categorize(instruction: Instruction, module: Module) -> str:
    """Return matmul, kernel, copies, collectives or vector."""
    opcodes = {inner.opcode for inner in walk_inside(instruction, module)}
    if carries_collective(instruction):
        opcodes -= set(ici.KINDS)
    if opcodes & {"dot", "convolution"}:
        return "matmul"
    if instruction.opcode == "custom-call":
        return "kernel" if is_kernel(instruction) else "copies"
    if find_collective_kind(instruction, module) is not None:
        return "collectives"
    return "copies" if opcodes - FREE - {"fusion"} <= MOVES else "vector"


def is_kernel(instruction: Instruction) -> bool:
    """Whether it calls a Pallas kernel."""
    return instruction.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.attributes


def walk_inside(instruction: Instruction, module: Module) -> Iterator[Instruction]:
    """Yield the instruction and, for a fusion or an asynchronous wrapper, everything that it contains."""
    yield instruction
    if instruction.opcode in ("fusion", "async-start", "call"):
        for name in instruction.list_called("calls") + instruction.list_called("to_apply"):
            for inner in module.computations[name].instructions:
                yield from walk_inside(inner, module)


def find_collective_kind(instruction: Instruction, module: Module) -> str | None:
    """Return which collective an instruction runs or starts, if it does."""
    if carries_collective(instruction) or ends_collective(instruction):
        return None
    for inner in walk_inside(instruction, module):
        opcode = inner.opcode.removesuffix("-start")
        if opcode in ici.KINDS:
            return opcode
    return None


def begins_collective(instruction: Instruction) -> bool:
    """Return whether a fusion starts a collective that other fusions carry on."""
    return instruction.opcode == "fusion" and instruction.name.startswith("async-collective-start")


def ends_collective(instruction: Instruction) -> bool:
    """Return whether a fusion waits for a collective that other fusions have carried on."""
    return instruction.opcode == "fusion" and instruction.name.startswith("async-collective-done")


def carries_collective(instruction: Instruction) -> bool:
    """Return whether a fusion computes something while it carries on a collective that was started earlier."""
    return instruction.opcode == "fusion" and instruction.list_called("calls")[0].startswith("async_collective_fusion")


def name_channel(instruction: Instruction, module: Module) -> str:
    """Return the channel of a collective, which its start, its end and the fusions that carry it have in common."""
    for inner in walk_inside(instruction, module):
        match = re.search(r"channel_id=(\d+)", inner.attributes)
        if inner.opcode.removesuffix("-start") in ici.KINDS and match:
            return f"channel {match[1]}"
    raise ValueError(f"{instruction.name} is no part of a collective: it holds none with a channel")


def count_collective_bytes(instruction: Instruction, computation: Computation, kind: str) -> float:
    """Return the bytes that `Interconnect.seconds` expects: gathered for an all-gather, sent for all others.

    A ragged all-to-all has the numbers of rows in arrays; its result is what is received, and here as much is sent.
    """
    if kind == "ragged-all-to-all":
        return _get_shapes(instruction.operands[1], computation)[0].bytes
    put_in = sum(shape.bytes for operand in instruction.operands for shape in _get_shapes(operand, computation))
    if kind != "all-gather":
        return put_in
    # An asynchronous start returns its operands and its results.
    results = sum(shape.bytes for shape in instruction.shapes if shape.is_data)
    return results - put_in if instruction.opcode.endswith("-start") or begins_collective(instruction) else results


def count_hbm_bytes(instruction: Instruction, computation: Computation, module: Module) -> float:
    """Return the HBM bytes that an instruction must read and write; data in VMEM is free.

    Slices count what they touch, and in-place updates count the update. This is the least possible traffic: nothing is
    read twice, although a kernel may get an array several times, to see several parts of it at once.
    """
    if instruction.opcode == "fusion":
        return _count_fusion_bytes(instruction, computation, module)
    written_bytes = sum(_count_bytes_in_hbm(shape) for shape in instruction.shapes)
    operands = dict.fromkeys(instruction.operands)
    read = [[_count_bytes_in_hbm(shape) for shape in _get_shapes(operand, computation)] for operand in operands]
    if instruction.opcode in _PARTIAL:
        return sum(shape.bytes if read and any(read[0]) else 0 for shape in instruction.shapes) + written_bytes
    if instruction.opcode == "dynamic-update-slice":
        update = sum(shape.bytes for shape in _get_shapes(instruction.operands[1], computation))
        return sum(read[1]) + (update if written_bytes else 0)
    return written_bytes + sum(map(sum, read))


def _count_fusion_bytes(fusion: Instruction, computation: Computation, module: Module) -> float:
    body = module.computations[fusion.list_called("calls")[0]]
    total = 0.0
    passing = carries_collective(fusion)  # What is gathered passes through and is counted with the links.
    for parameter, operand in zip(body.parameters(), fusion.operands, strict=True):
        shapes = _get_shapes(operand, computation)
        if passing and all(
            user is body.root or user.opcode in ici.KINDS for user in body.users.get(parameter.name, ())
        ):
            continue
        if any(shape.in_hbm for shape in shapes):
            total += _count_read_bytes(parameter, body, module, sum(map(_count_bytes_in_hbm, shapes)))
    roots = [body.by_name[name] for name in body.root.operands] if body.root.opcode == "tuple" else [body.root]
    for root, shape in zip(roots, fusion.shapes, strict=True):
        value = _resolve_renames(root, body)
        if passing and (value.opcode == "parameter" or value.opcode in ici.KINDS):
            continue
        if shape.in_hbm and value.opcode == "dynamic-update-slice":
            total += sum(update.bytes for update in _get_shapes(value.operands[1], body))
        else:
            total += _count_bytes_in_hbm(shape)
    return total


def _count_read_bytes(parameter: Instruction, body: Computation, module: Module, whole: float) -> float:
    """Return the bytes that are read from a fusion's parameter: only parts of it if only slices are used."""
    total = 0.0
    for user, seen_as in _walk_users(parameter, body):
        if user.opcode in _PARTIAL and user.operands[0] == seen_as:
            total += sum(shape.bytes for shape in user.shapes)
        elif user.opcode == "fusion":
            inner = module.computations[user.list_called("calls")[0]]
            total += _count_read_bytes(inner.parameters()[user.operands.index(seen_as)], inner, module, whole)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != seen_as:
            return whole
    return min(total, whole)


def _walk_users(instruction: Instruction, body: Computation) -> Iterator[tuple[Instruction, str]]:
    """Yield the users of a value, and the name that they use, looking through renames."""
    for user in body.users.get(instruction.name, []):
        if user.opcode in _RENAMES or _ALIASED in user.attributes:
            yield from _walk_users(user, body)
        else:
            yield user, instruction.name


def _resolve_renames(instruction: Instruction, body: Computation) -> Instruction:
    while instruction.opcode in _RENAMES:
        instruction = body.by_name[instruction.operands[0]]
    return instruction


def _get_shapes(name: str, computation: Computation) -> tuple[Shape, ...]:
    return computation.by_name[name].shapes


def _count_bytes_in_hbm(shape: Shape) -> float:
    return shape.bytes if shape.in_hbm else 0.0


def count_flops(instruction: Instruction, computation: Computation, module: Module) -> float:
    """Return the floating-point operations of the matrix products inside (a multiply-add is two)."""
    if instruction.opcode == "fusion":
        body = module.computations[instruction.list_called("calls")[0]]
        return sum(count_flops(inner, body, module) for inner in body.instructions)
    if instruction.opcode == "convolution":
        return 2.0 * _count_convolution_macs(instruction, computation)
    if instruction.opcode == "dot":
        left = _get_shapes(instruction.operands[0], computation)[0]
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        axes = [int(axis) for axis in contracted[1].split(",")] if contracted and contracted[1] else []
        return 2.0 * instruction.shapes[0].elements * math.prod(left.dims[axis] for axis in axes)
    return 0.0


def _count_convolution_macs(instruction: Instruction, computation: Computation) -> float:
    """Count multiply-adds with real elements, without the zeros of padding and dilation of batched products."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None
    image, kernel = (_get_shapes(operand, computation)[0].dims for operand in instruction.operands[:2])
    out = instruction.shapes[0].dims
    macs = float(out[labels[3].index("b")] * out[labels[3].index("f")] * kernel[labels[2].index("i")])
    spatial = [label for label in labels[1] if label.isdigit()]
    for axis, label in enumerate(spatial):
        macs *= _count_hits(
            image[labels[1].index(label)], kernel[labels[2].index(label)], out[labels[3].index(label)],
            _read_window(instruction.attributes, axis),
        )  # fmt: skip
    return macs


def _read_window(attributes: str, axis: int) -> dict[str, int]:
    """Return stride, low padding and dilations of one spatial axis."""
    match = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in match[1].split()) if match else {}
    low = fields["pad"].split("x")[axis].split("_")[0] if "pad" in fields else 0

    def number(name: str) -> int:
        return int(fields[name].split("x")[axis]) if name in fields else 1

    return {"stride": number("stride"), "low": int(low), "left": number("lhs_dilate"), "right": number("rhs_dilate")}


def _count_hits(size: int, kernel: int, out: int, window: dict[str, int]) -> int:
    """Count the pairs (output, kernel position) of one axis that meet a real element of the image."""
    at = np.arange(out)[:, None] * window["stride"] + np.arange(kernel)[None] * window["right"] - window["low"]
    return int(((at >= 0) & (at <= (size - 1) * window["left"]) & (at % window["left"] == 0)).sum())


def read_trip_count(loop: Instruction) -> int | None:
    """Return the trip count that XLA noted at a loop."""
    match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    return int(match[1]) if match else None


def count_trips(loop: Instruction, computation: Computation, module: Module) -> int | None:
    """Return the trip count of a loop whose condition compares a counter, step 1, with a constant."""
    condition = module.computations[loop.list_called("condition")[0]]
    compared = condition.root
    if compared.opcode == "fusion":
        body = module.computations[compared.list_called("calls")[0]]
        operands = [_resolve_operand(name, body, compared, condition) for name in body.root.operands]
        compared = body.root
    else:
        operands = [condition.by_name[name] for name in compared.operands]
    if compared.opcode != "compare" or "direction=LT" not in compared.attributes:
        return None
    if operands[0].opcode != "get-tuple-element" or operands[1].opcode != "constant":
        return None
    start = _read_start(loop, computation, operands[0])
    return None if start is None else int(operands[1].argument) - start


def _resolve_operand(name: str, body: Computation, fusion: Instruction, outer: Computation) -> Instruction:
    inner = body.by_name[name]
    return outer.by_name[fusion.operands[int(inner.argument)]] if inner.opcode == "parameter" else inner


def _read_start(loop: Instruction, computation: Computation, counter: Instruction) -> int | None:
    """Return the value that a loop's counter starts from, where it is a constant."""
    index = re.search(r"index=(\d+)", counter.attributes)
    start = computation.by_name[loop.operands[0]]
    if index is None or start.opcode != "tuple":
        return None
    value = computation.by_name[start.operands[int(index[1])]]
    while value.opcode in ("copy", "bitcast"):
        value = computation.by_name[value.operands[0]]
    return int(value.argument) if value.opcode == "constant" else None


def list_kernel_names(module: Module, computation: str) -> set[str]:
    """Return the names of all Pallas kernels that a computation may run."""
    names = set()
    for instruction in module.computations[computation].instructions:
        if is_kernel(instruction):
            names.add(instruction.stem)
        for attribute in ("calls", "body", "branch_computations", "true_computation", "false_computation", "to_apply"):
            for name in instruction.list_called(attribute):
                names |= list_kernel_names(module, name)
    return names
