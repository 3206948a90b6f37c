"""Tile sizes that fit the VMEM of the chip a kernel is compiled for."""

from collections.abc import Callable

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# The share of VMEM that a kernel may use. The compiler needs the rest for spills and its own scratch; 0.85 compiles
# for every chip tried.
VMEM_SHARE = 0.85
INTERPRET_VMEM_BYTES = 64 * 2**20  # Where no chip says it: what the smallest one has.


def vmem_bytes(*, interpret: bool) -> int:
    """Return how much VMEM a kernel may ask for on the chip of the current mesh."""
    capacity = INTERPRET_VMEM_BYTES if interpret else pltpu.get_tpu_info().vmem_capacity_bytes
    return int(VMEM_SHARE * capacity)


def even_block(size: int, largest: int, multiple: int) -> int:
    """Return the block size, a multiple of `multiple` and at most `largest`, that covers `size` with the least waste.

    Of several that waste the same, it is the largest. The last block is ragged if the block doesn't divide `size`. A
    size of at most `largest` is one block, whether it is a multiple or not.
    """
    if size <= largest:
        return size
    smallest = max(multiple, largest // 2 // multiple * multiple)
    candidates = range(smallest, largest // multiple * multiple + 1, multiple)
    return min(candidates, key=lambda block: (-(-size // block) * block, -block))


def sublanes(dtype: jax.typing.DTypeLike) -> int:
    """Return the rows of a native tile: 8 for float32, 16 for bfloat16."""
    return 32 // jax.numpy.dtype(dtype).itemsize


def by_rows(rows: int, largest: int, multiple: int, run: Callable[[jax.Array, int], None]) -> None:
    """Call run(start, count) for the rows of a tile, a few at a time, in a loop that is compiled once.

    The count is a multiple of `multiple`, at most `largest`, and divides `rows`; without such a count, the tile is run
    in one piece.
    """
    count = next((n for n in range(largest, 0, -multiple) if rows % n == 0), rows)

    def chunk(index: jax.Array, _: None) -> None:
        run(pl.multiple_of(index * count, multiple), count)

    jax.lax.fori_loop(0, rows // count, chunk, None)


def pass_over(x: jax.Array) -> pl.CostEstimate:
    """Return the cost of reading x and writing as much, which XLA uses to schedule transfers alongside a kernel."""
    return pl.CostEstimate(flops=8 * x.size, transcendentals=0, bytes_accessed=2 * x.size * x.dtype.itemsize)
