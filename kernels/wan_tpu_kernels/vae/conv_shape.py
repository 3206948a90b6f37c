"""Sizes and tiles of a causal convolution, and its weights as the matrix of one product.

Shapes: T frames, X columns, Y rows, C channels in, O channels out, kt kx ky taps of the kernel.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LANES = 128
ROWS = 16  # Sublanes of a bfloat16 tile: Y must be a multiple of it.
PIXELS = 4096  # The most pixels of a tile: at 720 rows, a third as many again are normalised for its edges.
# The most pixels of one product: enough rows to share the weights in the matrix unit, and little code to compile.
PIXELS_AT_ONCE = 512
SLABS = (8, 4, 2, 1)  # Frames of a tile with centred windows, which reads one more on either side.


@dataclass(frozen=True)
class ConvShape:
    """All sizes of one call.

    Attributes:
        all_frames: T.
        frames, past: Frames of a slab, which are all frames unless the windows are centred, and P.
        x, y, c, o: X, Y, C and O.
        kt, kx, ky, before, stride, centred: The kernel's taps and windows, as for `causal_conv`.
        group: Frames that one product computes.
        block: Columns of a tile.
        cores: Cores that share the tiles.
        o_block: Outputs whose weights are in VMEM at once: all of them, unless they don't fit.
    """

    all_frames: int
    frames: int
    past: int
    x: int
    y: int
    c: int
    o: int
    kt: int
    kx: int
    ky: int
    before: tuple[int, int]
    stride: int
    centred: bool
    group: int
    block: int
    cores: int
    o_block: int

    @property
    def lanes(self) -> int:
        """Lanes that a pixel's channels take in the scratch: those of whole vector registers."""
        return -(-self.c // LANES) * LANES

    @property
    def halo(self) -> int:
        """1 if columns beside the tile are needed, else 0."""
        return int(self.kx > 1)

    @property
    def out_frames(self) -> int:
        """Frames of a slab's result: T', unless the windows are centred."""
        return (self.past + self.frames - self.kt) // self.stride + 1

    @property
    def steps(self) -> int:
        """Tiles of one slab."""
        return self.x // self.block

    @property
    def slabs(self) -> int:
        """Slabs of one call; the last may have fewer frames."""
        return -(-self.all_frames // self.frames)

    @property
    def part(self) -> int:
        """Columns that one product computes."""
        return max(
            n for n in range(1, self.block + 1) if self.block % n == 0 and (n == 1 or n * self.y <= PIXELS_AT_ONCE)
        )

    @property
    def inputs(self) -> int:
        """Inputs of one product: taps times lanes."""
        return (self.kt + self.group - 1) * self.kx * self.ky * self.lanes

    @property
    def outputs(self) -> int:
        """Outputs of one product."""
        return self.o_block if self.group == 1 else self.group * LANES

    def tile(self, core: Any, step: Any) -> tuple[Any, Any]:
        """Return the slab of a core's step, and the index of its tile of columns in it."""
        index = core * (self.slabs * self.steps // self.cores) + step
        return (index // self.steps, index % self.steps) if self.slabs > 1 else (0, index)


def conv_matrix(weight: jax.Array, shape: ConvShape) -> jax.Array:
    """Return the matrix of a pixel's products, [inputs, all outputs].

    It has zeros for unused lanes, and for frames that aren't multiplied with each other.
    """
    unused = (0, shape.lanes - shape.c)
    padded = jnp.pad(weight.reshape(shape.kt, -1, shape.c, shape.o), ((0, 0), (0, 0), unused, (0, 0)))
    if shape.group > 1:
        padded = jnp.pad(padded, ((0, 0), (0, 0), (0, 0), (0, LANES - shape.o)))
        shifts = [((i, shape.group - 1 - i), (0, 0), (0, 0), (0, 0)) for i in range(shape.group)]
        padded = jnp.concatenate([jnp.pad(padded, shift) for shift in shifts], axis=-1)
    return padded.reshape(shape.inputs, -1)


def conv_shape(
    x: jax.Array,
    weight: jax.Array,
    past: jax.Array | None,
    before: tuple[int, int],
    stride: int,
    vmem: int,
    *,
    centred: bool = False,
    interpret: bool,
) -> ConvShape:
    """Return the sizes of a call, with the largest tile that fits in `vmem` bytes.

    If all weights don't fit beside a tile that keeps the matrix unit busy, they are fetched again for each tile, a part
    of the outputs at a time.

    Raises:
        ValueError: The arrays' shapes don't fit together, or rows don't fill tiles.
    """
    kt, kx, ky, c, o = weight.shape
    all_frames, columns, y = x.shape[:3]
    count = kt - stride if past is not None or centred else 0
    if x.shape[3] != c or y % ROWS or count + all_frames < kt:
        raise ValueError(f"x {x.shape}, weight {weight.shape}, {count} past frames: rows must be a multiple of {ROWS}")
    if centred and (kt != 3 or stride != 1 or past is not None):
        raise ValueError(f"{kt} taps, stride {stride}: centred windows have 3 frames, stride 1 and no past frames")
    mxu, cores = (256, 1) if interpret else _chip()
    sizes = [n for n in range(1, columns + 1) if columns % n == 0 and (n == 1 or n * y <= PIXELS)]

    def shape(frames: int, block: int, o_block: int) -> ConvShape:
        out_frames = (count + frames - kt) // stride + 1
        group = 2 if o <= LANES and mxu >= 2 * LANES and stride == 1 and out_frames % 2 == 0 else 1
        tiles = -(-all_frames // frames) * (columns // block)
        parts = cores if tiles % cores == 0 else 1
        sizes = (all_frames, frames, count, columns, y, c, o, kt, kx, ky)
        return ConvShape(*sizes, before, stride, centred, group, block, parts, o_block)

    slabs = [n for n in SLABS if n <= all_frames] if centred else [all_frames]
    large = [block for block in sizes if block * y >= PIXELS_AT_ONCE // 2 or block == sizes[-1]]
    output_parts = [n for n in range(o - mxu, 0, -mxu) if o % n == 0] if o % mxu == 0 else []
    candidates = [
        *(shape(frames, block, o) for frames in slabs for block in reversed(large)),
        *(shape(frames, block, part) for frames in slabs for block in reversed(large) for part in output_parts),
        *(shape(frames, block, o) for frames in slabs for block in reversed(sizes)),
        *(shape(frames, block, part) for frames in slabs for block in reversed(sizes) for part in output_parts),
        *(shape(frames, block, LANES) for frames in slabs for block in reversed(sizes) if output_parts),
    ]
    fitting = (candidate for candidate in candidates if _vmem_use(candidate, x.dtype.itemsize) <= vmem)
    return next(fitting, shape(slabs[-1], 1, o))


def _vmem_use(shape: ConvShape, itemsize: int) -> int:
    """Return the VMEM of a tile: double-buffered inputs and outputs, the scratch, a product's operands and result."""
    rows = shape.block * shape.y
    o_lanes = -(-shape.outputs // LANES) * LANES
    seen = (shape.past + shape.frames) * (shape.block + 2 * shape.halo) * shape.y
    blocks = 2 * (seen * shape.lanes + 2 * shape.out_frames * rows * o_lanes)
    weights = 2 * shape.inputs * o_lanes
    scratch = seen * shape.ky * shape.lanes
    product = shape.part * shape.y * (itemsize * shape.inputs + 3 * 4 * o_lanes)
    return itemsize * (blocks + weights + scratch) + product


def _chip() -> tuple[int, int]:
    """Return the columns of the matrix unit and the cores that share a call."""
    info = pltpu.get_tpu_info()
    return info.mxu_column_size, info.num_cores
