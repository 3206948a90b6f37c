"""Block sizes of flash attention, by chip, dtype and length: a table, and the rule that fits a row to given lengths."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

MIB = 2**20
LANES = 128


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Rows of Q and keys of one grid step; keys computed at once (chunk, which divides block_kv)."""

    block_q: int
    block_kv: int
    chunk: int
    vmem_limit: int | None = None  # bytes; None: the compiler's default

    def __post_init__(self) -> None:
        if min(self.block_q, self.block_kv, self.chunk) < 1 or self.block_kv % self.chunk or self.chunk % 8:
            raise ValueError(f"chunk must be a multiple of 8 that divides block_kv, got {self}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The blocks chosen for a shape, and the grid steps of one head."""

    blocks: BlockSizes
    q_steps: int
    kv_steps: int

    @property
    def steps(self) -> int:
        """Grid steps a head."""
        return self.q_steps * self.kv_steps


# The largest useful blocks by (chip, dtype of Q and K); lengths below are fitted by `plan_blocks`.
# Source of every row: scripts/tune_attention.py.
TABLE: dict[tuple[str, str], BlockSizes] = {
    ("v6e", "bfloat16"): BlockSizes(3328, 2560, 512, 100 * MIB),
}
# Chips and dtypes that nobody tuned: small enough for any chip's VMEM (16 MiB).
DEFAULT = BlockSizes(512, 1024, 256)


def this_chip() -> str:
    """Return the chip of the current mesh or process ("v5p", "v6e", "v7x", ...), "other" where it is no TPU."""
    try:
        version = str(pltpu.get_tpu_info().chip_version)
    except ValueError:
        return "other"
    return version if version.startswith("v") else f"v{version}"


def plan_blocks(q_len: int, kv_len: int, *, dtype: Any = jnp.bfloat16, chip: str | None = None) -> Plan:
    """Choose blocks for q_len queries and kv_len keys.

    dtype is that of Q and K as the kernel gets them (int8 or float8 with low-precision logits); chip None is the
    present one. Lengths below a block get one block of whole lanes; longer ones are divided evenly, so that the last
    block is not nearly empty.
    """
    row = TABLE.get((chip or this_chip(), jnp.dtype(dtype).name), DEFAULT)
    chunk = min(row.chunk, _ceil(kv_len, LANES))
    block_q, q_steps = _even(q_len, row.block_q, 2 * LANES)
    block_kv, kv_steps = _even(kv_len, row.block_kv, chunk)
    return Plan(BlockSizes(block_q, block_kv, chunk, row.vmem_limit), q_steps, kv_steps)


def _even(length: int, largest: int, unit: int) -> tuple[int, int]:
    """Divide length into the fewest equal blocks of at most `largest`, a multiple of unit; the last may overhang."""
    steps = -(-length // max(largest, unit))
    block = _ceil(-(-length // steps), unit)
    return block, -(-length // block)


def _ceil(length: int, unit: int) -> int:
    return -(-length // unit) * unit
