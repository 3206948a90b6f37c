"""Choose the tiles of linear layers that take the least time, by a model of the matrix units and of HBM.

Larger tiles read less from HBM, and a tile with all inputs is computed without adding to sums in VMEM. Neither the rows
nor the outputs of a layer are multiples of every size, so the best tile isn't the largest one that fits.

Shapes: L rows (tokens), I inputs, O outputs, G column groups.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.low_precision import LANES
from wan_tpu_kernels.tiles import even_block, vmem_bytes

# Largest rows, outputs and inputs of a tile. The code of a step grows with its rows and inputs: these take about 11
# thousand bundles.
ROWS, OUTPUTS, INPUTS = 1216, 2048, 8960
OUTPUTS_8, INPUTS_8 = 2560, 16384  # Those of 8-bit weights, with which a step has half as many bundles.
MXU_COLUMNS = 256  # Columns and rows of the widest MXU, which narrower ones divide: 1152 outputs take as long as 1280.
UNROLLED = 1024  # The most outputs of a single, uneven iteration; the code of more takes minutes to compile.
COLUMNS_8 = 512  # Columns of one iteration with 8-bit weights, if a tile has a multiple of them.
INTERPRETED_MACS_A_BYTE = 280  # Multiply-adds while HBM delivers a byte, where no chip says it: near a real one's.
HBM_SHARE = 0.9  # Of the published bandwidth.
# An iteration takes about 250 cycles more than its products, before the first and after the last; a step of the grid
# about 500 more than its bundles. Sums in VMEM take as long as multiplying this many more inputs; integers are also
# converted in every part.
ITERATION_MACS, STEP_MACS = 2**26, 2**27
SUM_INPUTS, SUM_INPUTS_8 = 50, 850


class Layer(NamedTuple):
    """A linear layer.

    Attributes:
        rows: L.
        outputs: O of all groups.
        inputs: I.
        groups: G.
        in_bytes: Bytes of an input value.
        out_bytes: Bytes of an output value, and of one of the residual.
        joined: Whether groups of columns are put side by side in VMEM, with all inputs at once.
        halves: Products for each output: two with "swiglu".
        added: Whether there is a residual.
    """

    rows: int
    outputs: int
    inputs: int
    groups: int
    in_bytes: int
    out_bytes: int
    joined: bool
    halves: int
    added: bool


class LinearTile(NamedTuple):
    """Rows, outputs and inputs of a grid step; outputs are those of several groups or of a part of one."""

    rows: int
    outputs: int
    inputs: int


def choose_tile(layer: Layer, *, interpret: bool) -> LinearTile:
    """Return the fastest tile that fits into VMEM, double-buffered.

    Raises:
        ValueError: No tile fits.
    """
    limit, chip = vmem_bytes(interpret=interpret), None if interpret else pltpu.get_tpu_info()
    published = INTERPRETED_MACS_A_BYTE if chip is None else chip.bf16_ops_per_second / 2 / chip.mem_bw_bytes_per_second
    macs_a_byte = published * (2 if layer.in_bytes == 1 else 1) / HBM_SHARE
    fitting = [tile for tile in _list_tiles(layer) if _count_vmem(layer, tile) <= limit]
    if not fitting:
        raise ValueError(f"no tile of {layer.rows} x {layer.outputs} x {layer.inputs} fits into {limit} bytes of VMEM")
    return min(fitting, key=lambda tile: _count_macs(layer, tile, macs_a_byte))


def _list_tiles(layer: Layer) -> Iterator[LinearTile]:
    most_outputs, most_inputs = (OUTPUTS_8, INPUTS_8) if layer.in_bytes == 1 else (OUTPUTS, INPUTS)
    most_outputs //= layer.halves
    width = layer.outputs // layer.groups
    sublanes = 32 // layer.in_bytes
    rows = {even_block(layer.rows, max(sublanes, ROWS * 4 // n), sublanes) for n in (4, 5, 6, 8, 12, 16, 24, 32)}
    steps = range(MXU_COLUMNS, max(most_outputs, MXU_COLUMNS) + 1, MXU_COLUMNS)
    outputs = {even_block(width, largest, MXU_COLUMNS) for largest in steps}
    if layer.groups > 1:  # A tile of a part of a group may not reach into the next one.
        outputs = {block for block in outputs if width % block == 0} or {width}
    if width % LANES == 0:  # Others can't be addressed in one tile.
        several = (number for number in range(2, layer.groups + 1) if layer.groups % number == 0)
        outputs |= {number * width for number in several if number * width <= most_outputs}
    outputs = {block for block in outputs if block % MXU_COLUMNS == 0 or block <= UNROLLED} or outputs
    inputs = {
        layer.inputs // parts
        for parts in range(1, layer.inputs // LANES + 1)
        if layer.inputs % (parts * LANES) == 0 and layer.inputs // parts <= most_inputs and not layer.joined
    }
    # Parts that aren't whole lanes can't be addressed, so the inputs are taken in one.
    for sizes in itertools.product(sorted(rows), sorted(outputs), sorted(inputs) or [layer.inputs]):
        yield LinearTile(*sizes)


def _count_vmem(layer: Layer, tile: LinearTile) -> int:
    """Return the bytes of VMEM that a tile needs."""
    input_bytes = 2 * layer.in_bytes * (tile.rows + layer.halves * tile.outputs) * tile.inputs
    output_bytes = tile.rows * tile.outputs * (4 * max(layer.out_bytes, 2) + 2 * 4)
    # The compiler copies the rows, and joining them is another copy.
    rows_again = (1 + layer.joined) * layer.in_bytes * tile.rows * tile.inputs
    return input_bytes + output_bytes + rows_again


def _count_macs(layer: Layer, tile: LinearTile, macs_a_byte: float) -> float:
    """Return the time of a layer, in multiply-adds at the peak."""
    parts = layer.inputs // tile.inputs
    width = layer.outputs // layer.groups
    columns = pl.cdiv(width, tile.outputs) * layer.groups if tile.outputs <= width else layer.outputs // tile.outputs
    eight = layer.in_bytes == 1
    iteration = COLUMNS_8 if eight and tile.outputs % COLUMNS_8 == 0 else MXU_COLUMNS
    sums = 0 if parts == 1 else SUM_INPUTS_8 if eight else SUM_INPUTS
    padded = pl.cdiv(tile.inputs, MXU_COLUMNS) * MXU_COLUMNS + sums
    lanes = pl.cdiv(tile.outputs, MXU_COLUMNS) * MXU_COLUMNS
    overhead = STEP_MACS + pl.cdiv(tile.outputs, iteration) * ITERATION_MACS
    step = tile.rows * lanes * layer.halves * padded + overhead * (2 if eight else 1)
    weights = layer.halves * tile.outputs * tile.inputs * layer.in_bytes
    x = tile.rows * tile.inputs * layer.in_bytes
    results = tile.rows * tile.outputs * layer.out_bytes * (1 + layer.added)
    # Between tiles with the same rows, the last part of the inputs stays in VMEM.
    traffic = parts * weights + (parts - 1) * x + results
    each = max(parts * step, traffic * macs_a_byte)
    # The next rows arrive during the last step of the current ones.
    waits = max(0.0, (weights + x + results) * macs_a_byte - step)
    return pl.cdiv(layer.rows, tile.rows) * (columns * each + waits)
