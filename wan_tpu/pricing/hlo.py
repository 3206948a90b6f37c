"""Read the scheduled HLO text of a compiled TPU program: computations, instructions, shapes.

Only what a cost analysis needs is kept. The text is what `compiled.as_text()` returns: instructions are listed in
the order in which the TensorCore runs them, and most carry the compiler's own "estimated_cycles".
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Bytes of one element; types that aren't listed (token, opaque) have no storage.
ELEMENT_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "f4e2m1fn": 0.5, "f8e4m3fn": 1, "f8e4m3b11fnuz": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8,
}  # fmt: skip

_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"  (ROOT )?%?([\w.\-]+) = ")
_HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_END = re.compile(r"\}(, execution_thread=.*)?$")  # Some computations run on a SparseCore.
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array: element type, dimensions and layout such as "2,1,0:T(8,128)(2,1)S(1)"."""

    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        """The number of elements, padding not counted."""
        return math.prod(self.dims)

    @property
    def in_hbm(self) -> bool:
        """Whether it is in HBM: S(1) is VMEM, higher spaces are semaphores, scalar and host memory."""
        return "S(" not in self.layout

    @property
    def is_data(self) -> bool:
        """Whether it is in HBM or VMEM, as data is; semaphores and scalars are elsewhere."""
        return self.in_hbm or "S(1)" in self.layout

    @property
    def bytes(self) -> float:
        """Bytes as stored, padded to whole tiles: T(8,128) pads the two minor dimensions."""
        dims = list(self.dims)
        tile = re.search(r":T\(([\d,]+)\)", self.layout)
        order = self.layout.split(":")[0]
        if tile and order and dims:
            minor_first = [int(axis) for axis in order.split(",")]
            for axis, size in zip(minor_first, reversed(tile[1].split(",")), strict=False):
                dims[axis] = -(-dims[axis] // int(size)) * int(size)
        return math.prod(dims) * ELEMENT_BYTES.get(self.dtype, 0)

    def __str__(self) -> str:
        space = re.search(r"S\(\d+\)", self.layout)
        return f"{self.dtype}[{','.join(map(str, self.dims))}]" + (space[0] if space else "")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `attributes` is the raw text after the operands."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # Of the results; tuples are flattened.
    operands: tuple[str, ...]
    argument: str  # The text between the parentheses: a constant's value, a parameter's number.
    attributes: str
    root: bool

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate; None where it gives none (collectives, Pallas kernels, free operations)."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match[1]) if match else None

    @functools.cached_property
    def op_name(self) -> str:
        """The place in the traced Python program that it comes from."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def list_called(self, attribute: str) -> list[str]:
        """Return the computations that an attribute (calls, body, branch_computations...) names."""
        match = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
        return _NAME.findall(match[1]) if match else []

    @property
    def stem(self) -> str:
        """The name without the number that makes it unique; for a Pallas call the kernel's name."""
        return re.sub(r"(\.(\d+|clone|sunk|remat))+$", "", self.name)


@dataclass(frozen=True)
class Computation:
    """Instructions in scheduled order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction's result."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    @property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next(instruction for instruction in self.instructions if instruction.root)

    def parameters(self) -> list[Instruction]:
        parameters = [instruction for instruction in self.instructions if instruction.opcode == "parameter"]
        return sorted(parameters, key=lambda instruction: int(instruction.argument))


@dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Parse `compiled.as_text()`. Raises `ValueError` when the text isn't an HLO module."""
    computations: dict[str, Computation] = {}
    entry: str | None = None
    name: str | None = None
    instructions: list[Instruction] = []
    for line in _join_lines(text):
        header = _HEADER.match(line)
        if header and not line.startswith(" "):
            name, instructions = header[1], []
            entry = name if line.startswith("ENTRY") else entry
        elif _END.match(line) and name is not None:
            computations[name] = Computation(name, tuple(instructions))
            name = None
        elif name is not None and _INSTRUCTION.match(line):
            instructions.append(_parse_instruction(line))
    if entry is None or entry not in computations:
        raise ValueError("no ENTRY computation: this is not the text of a compiled HLO module")
    return Module(computations, entry)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Return every array in the text of a type; tuples are flattened."""
    return tuple(
        Shape(dtype, tuple(int(size) for size in dims.split(",") if size), layout or "")
        for dtype, dims, layout in _SHAPE.findall(text)
        if dtype in ELEMENT_BYTES
    )


def _join_lines(text: str) -> Iterator[str]:
    """Yield headers and instructions as one line each, because a kernel's metadata may contain line breaks."""
    pending = ""
    for line in text.splitlines():
        if _END.match(line) or (line.startswith("  ") and _INSTRUCTION.match(line)) or _HEADER.match(line):
            yield pending
            pending = line
        elif pending.startswith("  ") and line:
            pending = f"{pending} {line}"
    yield pending


def _parse_instruction(line: str) -> Instruction:
    matched = _INSTRUCTION.match(line)
    assert matched is not None
    rest = line[matched.end() :]
    kind, rest = _split_balanced(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, rest = rest.lstrip().split("(", 1)
    inside, attributes = _split_balanced(f"({rest}")
    return Instruction(
        name=matched[2],
        opcode=opcode,
        shapes=parse_shapes(kind),
        operands=tuple(_NAME.findall(inside)) if opcode != "constant" else (),
        argument=inside[1:-1],
        attributes=attributes,
        root=matched[1] is not None,
    )


def _split_balanced(text: str) -> tuple[str, str]:
    """Split text that starts with a parenthesis after the one that closes it."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return text[: match.end()], text[match.end() :]
    raise ValueError(f"parentheses don't close in {text[:80]!r}")
