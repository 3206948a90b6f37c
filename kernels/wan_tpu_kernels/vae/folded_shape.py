"""Sizes and products of a convolution whose rows are folded into lanes, and its weights as their matrices.

Shapes: T frames, X columns, Y folded rows, g picture rows in a folded row, C channels in, O channels out, kt kx ky taps
of the kernel. A folded row has g C lanes, row after row; a register is 128 lanes.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LANES = 128
ROWS = 16  # Sublanes of a bfloat16 tile: Y must be a multiple of it.
PIXELS = 8192  # The most picture pixels of a tile. Larger tiles read fewer columns twice, but all frames must fit.
ROWS_AT_ONCE = 512  # The most folded rows of one product: enough of them share the weights in the matrix unit.

INTERPRETED_CHIP = 256, 1  # Columns of the matrix unit and cores of a device, in Pallas' interpreter.

# Lanes of a register: pieces (block, first lane, end), where block 0 is the folded row's first 128 lanes, negative
# blocks are the end of the folded row before it, and blocks from g C / 128 on the start of the one after it.
Register = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Product:
    """Outputs that one matrix product computes.

    Attributes:
        side: 0 or 1: the left or the right one of two columns that a column becomes; 0 if columns aren't doubled.
        start, stop: The output lanes, of all that a folded row and column have.
        columns: The taps in columns that it reads.
        registers: The lanes that it reads of each column.
    """

    side: int
    start: int
    stop: int
    columns: tuple[int, ...]
    registers: tuple[Register, ...]

    @property
    def first(self) -> int:
        """The lane of the product's first column: outputs keep their place within a register."""
        return self.start // LANES * LANES

    @property
    def width(self) -> int:
        """Columns of the product: whole registers."""
        return -(-self.stop // LANES) * LANES - self.first


@dataclass(frozen=True)
class FoldedShape:
    """All sizes of one call.

    Attributes:
        frames, past: T, and the frames before them.
        x, y, fold, c, o: X, Y, g, C and O.
        kt, kx, ky, before: The kernel's taps, and columns and rows of a window before its pixel.
        doubles: Whether columns and rows are doubled: the kernel then has outputs for four pixels.
        joins: Whether one product computes all frames.
        width: Columns of the matrix unit.
        block: Columns of a tile.
        cores: Cores that share the tiles.
    """

    frames: int
    past: int
    x: int
    y: int
    fold: int
    c: int
    o: int
    kt: int
    kx: int
    ky: int
    before: tuple[int, int]
    doubles: bool
    joins: bool
    width: int
    block: int
    cores: int

    @property
    def halo(self) -> int:
        """1 if columns beside the tile are needed, else 0."""
        return int(self.kx > 1)

    @property
    def blocks(self) -> int:
        """Registers of a folded row."""
        return self.fold * self.c // LANES

    @property
    def out_frames(self) -> int:
        """T'."""
        return self.past + self.frames - self.kt + 1

    @property
    def group(self) -> int:
        """Frames that one product computes."""
        return self.out_frames if self.joins else 1

    @property
    def out_fold(self) -> int:
        """Picture rows of a folded row of the result."""
        return self.fold * (1 + self.doubles)

    @property
    def out_lanes(self) -> int:
        """Lanes of a folded row of the result."""
        return self.group * self.out_fold * self.o

    @property
    def out_blocks(self) -> int:
        """Registers of a folded row of the result."""
        return -(-self.out_lanes // LANES)

    @property
    def sides(self) -> int:
        """Columns that one column becomes."""
        return 1 + self.doubles

    @property
    def steps(self) -> int:
        """Tiles of one call."""
        return self.x // self.block

    @property
    def part(self) -> int:
        """Columns that one product computes."""
        sizes = [n for n in range(1, self.block + 1) if self.block % n == 0]
        return max(n for n in sizes if n == 1 or n * self.y <= ROWS_AT_ONCE)

    @functools.cached_property
    def products(self) -> tuple[Product, ...]:
        """The products of a folded row and column.

        The outputs are cut into equal parts, as many as let the products read the fewest registers.
        """
        lanes = self.out_lanes
        fewest = -(-lanes // self.width)
        counts = [n for n in range(fewest, max(fewest, self.out_fold) + 1) if lanes % n == 0 and not self.joins]

        def cut(count: int) -> list[Product]:
            size = lanes // count
            return [self._product(side, n * size, (n + 1) * size) for side in range(self.sides) for n in range(count)]

        candidates = [cut(count) for count in counts] or [cut(1)]
        fitting = [products for products in candidates if all(p.width <= self.width for p in products)] or candidates
        return tuple(min(fitting, key=lambda products: sum(len(p.columns) * len(p.registers) for p in products)))

    def _product(self, side: int, start: int, stop: int) -> Product:
        rows = range(self.out_fold) if self.joins else range(start // self.o, (stop - 1) // self.o + 1)
        columns = range(side, side + 2) if self.doubles else range(self.kx)
        first = min(self._first_row(row) for row in rows)
        last = max(self._first_row(row) + self._row_taps for row in rows)
        return Product(side, start, stop, tuple(columns), _registers(first * self.c, last * self.c))

    @property
    def _row_taps(self) -> int:
        return 2 if self.doubles else self.ky

    def _first_row(self, row: int) -> int:
        """Return the first picture row of the window of a row of the result; row 0 is the folded row's first."""
        return (row - 1) // 2 if self.doubles else row - self.before[1]

    @functools.cached_property
    def registers(self) -> tuple[Register, ...]:
        """The lanes that the scratch holds of every column: the folded row's own come first."""
        own = [((block, 0, LANES),) for block in range(self.blocks)]
        read = itertools.chain.from_iterable(product.registers for product in self.products)
        return tuple(dict.fromkeys([*own, *read]))

    @property
    def low(self) -> int:
        """The first block of a register."""
        return min(block for register in self.registers for block, _, _ in register)

    @property
    def weights(self) -> tuple[int, ...]:
        """Size of the weights: sides, frames and columns of a window, lanes that it reads, lanes of the result."""
        high = 1 + max(block for register in self.registers for block, _, _ in register)
        columns = 2 if self.doubles else self.kx
        return self.sides, self.kt + self.group - 1, columns, (high - self.low) * LANES, self.out_blocks * LANES

    def inputs(self, product: Product) -> int:
        """Return the inputs of a product."""
        return (self.kt + self.group - 1) * len(product.columns) * len(product.registers) * LANES


def _registers(start: int, stop: int) -> tuple[Register, ...]:
    """Return registers with lanes start to stop; the first and the last block share one if their lanes differ."""
    first, last = start // LANES, (stop - 1) // LANES
    whole: list[Register] = [((block, 0, LANES),) for block in range(first, last + 1)]
    cut, end = start % LANES, stop % LANES
    if last > first and cut and end and end <= cut:
        return (((last, 0, cut), (first, cut, LANES)), *whole[1:-1])
    return tuple(whole)


def folded_weights(weight: jax.Array, shape: FoldedShape) -> jax.Array:
    """Return the weights from all lanes that a window reads to all lanes of the result, of size `shape.weights`.

    They are zero where a tap doesn't reach. Lanes begin with the first of block `shape.low`.
    """
    sides, _, columns, lanes, outputs = shape.weights
    taps = weight.reshape(*weight.shape[:2], shape.ky * shape.c, sides, sides, shape.o)
    both = []
    for side in range(sides):
        rows = []
        for row in range(shape.out_fold):
            start = (row // sides - shape.before[1]) * shape.c - shape.low * LANES  # Of the window's first row.
            window = taps[:, side : side + columns, :, side, row % sides]
            skipped = max(0, -start), max(0, start + shape.ky * shape.c - lanes)  # Taps of zeros, with `doubles`.
            window = window[:, :, skipped[0] : shape.ky * shape.c - skipped[1]]
            start += skipped[0]
            rows.append(jnp.pad(window, ((0, 0), (0, 0), (start, lanes - start - window.shape[2]), (0, 0))))
        joined = jnp.concatenate(rows, axis=-1)
        if shape.joins:
            shifts = [((i, shape.group - 1 - i), (0, 0), (0, 0), (0, 0)) for i in range(shape.group)]
            joined = jnp.concatenate([jnp.pad(joined, shift) for shift in shifts], axis=-1)
        both.append(jnp.pad(joined, ((0, 0), (0, 0), (0, 0), (0, outputs - joined.shape[-1]))))
    return jnp.stack(both)


def folded_shape(
    x: jax.Array,
    weight: jax.Array,
    past: jax.Array | None,
    fold: int,
    before: tuple[int, int],
    vmem: int,
    *,
    doubles: bool,
    joins: bool,
    results: int,
    interpret: bool,
) -> FoldedShape:
    """Return a call's sizes with the tile to use: the largest that fits.

    Args:
        x, weight, past, fold, before, doubles, joins, interpret: As for `folded_conv`.
        vmem: Bytes of VMEM that the tile may use.
        results: Arrays of the result's size that a tile reads or writes.

    Raises:
        ValueError: The arrays' shapes don't fit together, or rows don't fill tiles or lanes.
    """
    kt, kx, ky, c, outputs = weight.shape
    frames, columns, y, lanes = x.shape
    o = outputs // 4 if doubles else outputs
    if lanes != fold * c or lanes % LANES or y % ROWS or (past is None and kt > 1):
        raise ValueError(
            f"x {x.shape}, weight {weight.shape}, fold {fold}: lanes must be {fold} x {c} and fill registers, and rows "
            f"be a multiple of {ROWS}"
        )
    width, cores = INTERPRETED_CHIP if interpret else _chip()

    def shape(block: int) -> FoldedShape:
        shared = cores if (columns // block) % cores == 0 else 1
        sizes = (frames, kt - 1, columns, y, fold, c, o, kt, kx, ky)
        return FoldedShape(*sizes, before, doubles, joins, width, block, shared)

    sizes = [n for n in range(columns, 0, -1) if columns % n == 0 and (n == 1 or n * y * fold <= PIXELS)]
    fitting = (shape(n) for n in sizes if _vmem_use(shape(n), results, x.dtype.itemsize) <= vmem)
    return next(fitting, shape(1))


def _vmem_use(shape: FoldedShape, results: int, itemsize: int) -> int:
    """Return the VMEM of a tile: double-buffered inputs and outputs, the scratch, a product's operands and result."""
    seen = (shape.past + shape.frames) * (shape.block + 2 * shape.halo) * shape.y
    result = shape.out_frames // shape.group * shape.sides * shape.block * shape.y * shape.out_blocks * LANES
    blocks = 2 * (seen * shape.blocks * LANES + results * result)
    weights = math.prod(shape.weights)
    scratch = seen * len(shape.registers) * LANES
    inputs = max(map(shape.inputs, shape.products))
    product = shape.part * shape.y * (itemsize * inputs + 3 * 4 * shape.out_blocks * LANES)
    return itemsize * (blocks + weights + scratch) + product


def _chip() -> tuple[int, int]:
    """Return the columns of the matrix unit and the cores that share a call."""
    info = pltpu.get_tpu_info()
    return info.mxu_column_size, info.num_cores
