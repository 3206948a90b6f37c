"""Block sizes of flash attention, by chip and dtype: a table, and the rule that fits a row of it to given lengths."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

MIB = 2**20
LANES = 128
FALLBACK = 2048, 1024  # The most rows and keys in a block of a fallback, see `plan_blocks`.
# The fixed cost of a block of queries, in rows: between 30 (v5p) and 133 (v6e, where 37 x 2,048 keys take 551,914
# bundles for 4,736 rows and 1,088,766 for 9,472, so 113 a row and 15,062 for none).
BLOCK_ROWS = 64
# The most rows of a block when heads share a tile's lanes: on v6e this takes 1,453 bundles per million scores, against
# 1,480 with 9,472 rows.
SHARED_ROWS = 3328


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a grid step is unrolled.

    Attributes:
        chunk: Keys of a unit.
        columns: Queries of a unit; None for all of the block.
        ahead: How many units ahead of the softmax logits are computed.
        mxu_sums: Whether the weights are added up by a row of ones in the second matmul, which frees the vector unit
            and costs a sixteenth of that matmul; else the vector unit does it.
    """

    chunk: int
    columns: int | None = None
    ahead: int = 0
    mxu_sums: bool = False


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The size of one grid step, and how it is unrolled.

    Attributes:
        block_q: Rows of Q.
        block_kv: Keys.
        fixed: The schedule of "bounded" and "optimistic", which have no running maximum.
        online: The schedule of "online".
        vmem_limit: In bytes; None for the compiler's default.
    """

    block_q: int
    block_kv: int
    fixed: Schedule
    online: Schedule
    vmem_limit: int | None = None

    def __post_init__(self) -> None:
        for schedule in (self.fixed, self.online):
            if self.block_kv % schedule.chunk or schedule.chunk % 8 or self.block_q % (schedule.columns or 1):
                raise ValueError(f"chunk must be a multiple of 8 that divides block_kv, columns divide block_q: {self}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The blocks chosen for a shape, and the grid steps of one head."""

    blocks: BlockSizes
    q_steps: int
    kv_steps: int

    @property
    def steps(self) -> int:
        """Grid steps per head."""
        return self.q_steps * self.kv_steps


def _ahead(chunk: int, ahead: int, mxu_sums: bool = True) -> Schedule:
    return Schedule(chunk, columns=256, ahead=ahead, mxu_sums=mxu_sums)


# The largest useful blocks by (chip, dtype of Q and K); `plan_blocks` fits them to shorter lengths. Above each row: its
# bundles a million scores, counted by `scripts/kernel_cycles.py --chip C` on 2026-11-26 with libtpu 0.0.50.1 (bounded,
# optimistic, online; or 8-bit bounded). Schedules are from `scripts/tune_attention.py --chip C --softmax S` of
# 2026-11-21 with tiles of 3,328 x 2,560. Of larger ones, maxdiffusion's among them, those of 9,472 rows gain on v6e.
TABLE: dict[tuple[str, str], BlockSizes] = {
    # 1,497, 1,509, 1,806; online has 1,800 in chunks of 256, but text of 512 is then two
    ("v6e", "bfloat16"): BlockSizes(9728, 2048, Schedule(512), _ahead(512, 4), 64 * MIB),
    # 1,318; online 1,901, and 2,383 with both products
    ("v6e", "int8"): BlockSizes(9472, 2048, _ahead(512, 2), _ahead(512, 4), 64 * MIB),
    # 1,469, 1,484, 1,790; of 2,816 rows, as a video of 720p has them, 1,475 for optimistic; of 9,472 x 1,024 1,486
    ("v7x", "bfloat16"): BlockSizes(3328, 2560, Schedule(512), _ahead(512, 4), 48 * MIB),
    # 1,235; online 1,768, and 1,792 with both products
    ("v7x", "float8_e4m3fn"): BlockSizes(3328, 2560, _ahead(512, 2), _ahead(512, 4), 48 * MIB),
    # 3,561, 3,747, 4,076
    ("v5p", "bfloat16"): BlockSizes(3328, 2560, Schedule(1280), _ahead(512, 4, mxu_sums=False), 48 * MIB),
    # 2,756; online 3,719, and 4,206 with both products
    ("v5p", "int8"): BlockSizes(3328, 2560, Schedule(512), _ahead(512, 4), 48 * MIB),
    # 3,448, 3,529, 4,141 on 2026-11-26 with libtpu 0.0.42.1; the matrix units alone need 3,906
    ("v5e", "bfloat16"): BlockSizes(3328, 2560, _ahead(512, 4, mxu_sums=False), _ahead(512, 4), 48 * MIB),
    # 2,852
    ("v5e", "int8"): BlockSizes(3328, 2560, Schedule(512), _ahead(512, 4), 48 * MIB),
}
# For chips and dtypes that aren't tuned: small enough for the 16 MiB that a kernel may use by default.
DEFAULT = BlockSizes(512, 1024, Schedule(256), Schedule(256))


def this_chip() -> str:
    """Return the chip of the current mesh or process ("v5p", "v6e", "v7x", ...), or "other" if it isn't a TPU."""
    try:
        version = str(pltpu.get_tpu_info().chip_version)
    except ValueError:
        return "other"
    return version if version.startswith("v") else f"v{version}"


def plan_blocks(
    q_len: int,
    kv_len: int,
    *,
    dtype: Any = jnp.bfloat16,
    chip: str | None = None,
    shared: int = 1,
    fallback: bool = False,
    pad: bool = True,
) -> Plan:
    """Choose blocks for the queries and keys of a head, or of heads that share a tile's lanes.

    Lengths below a block get one block of whole lanes; longer ones are divided evenly, so that the last block is not
    nearly empty.

    Args:
        q_len: Number of queries.
        kv_len: Number of keys.
        dtype: That of Q and K as the kernel gets them (int8 or float8 with low-precision logits).
        chip: Such as "v6e"; the current one by default.
        shared: Heads that share a tile's lanes.
        fallback: Whether the call is the "online" repeat of another method. It hardly ever runs, so it gets blocks of
            at most `FALLBACK` rows and keys, which compile in an eighth of the time (2.0 s of CPU against 16 for v6e)
            and run a ninth slower.
        pad: Whether queries and keys may be padded to a block. Otherwise one block has all queries if they are fewer
            than a block (and fill registers), and keys are divided into shorter blocks. A batch of 4 x 1,808 x 1,797
            with 32 heads of 64 takes 0.43 ms on v6e, not 0.58, and isn't copied.
    """
    row = TABLE.get((chip or this_chip(), jnp.dtype(dtype).name), DEFAULT)
    if shared > 1:
        row = dataclasses.replace(row, block_q=min(SHARED_ROWS, row.block_q))
    if fallback:
        largest_q, largest_kv = min(FALLBACK[0], row.block_q), min(FALLBACK[1], row.block_kv)
        row = dataclasses.replace(row, block_q=largest_q, block_kv=largest_kv, fixed=row.online)
    block_q, q_steps = _divide_fastest(q_len, row.block_q, 2 * LANES)
    if not pad and 4 * LANES < q_len < block_q and q_len % 16 == 0:
        block_q, q_steps = q_len, 1
        fixed, online = (dataclasses.replace(schedule, columns=None) for schedule in (row.fixed, row.online))
        row = dataclasses.replace(row, fixed=fixed, online=online)
    if kv_len <= row.online.chunk:  # There is one chunk in all.
        chunk = _round_up(kv_len, LANES)
        fixed, online = (dataclasses.replace(s, chunk=chunk) for s in (row.fixed, row.online))
        block_kv, kv_steps = chunk, 1
    else:
        fixed, online = row.fixed, row.online
        unit = math.lcm(fixed.chunk, online.chunk)
        largest = row.block_kv if pad else min(row.block_kv, kv_len // unit * unit)
        block_kv, kv_steps = _divide_evenly(kv_len, largest, unit)
    return Plan(BlockSizes(block_q, block_kv, fixed, online, row.vmem_limit), q_steps, kv_steps)


def _divide_fastest(length: int, largest: int, unit: int) -> tuple[int, int]:
    """Divide as `_divide_evenly`, but into the fastest number of blocks, up to a third more than the fewest.

    The overhang is computed as well, and every block has a fixed cost (`BLOCK_ROWS`).
    """
    fewest = -(-length // max(largest, unit))
    plans = [_divide_evenly(length, -(-length // steps), unit) for steps in range(fewest, fewest * 4 // 3 + 1)]
    return min(plans, key=lambda plan: plan[1] * (plan[0] + BLOCK_ROWS))


def _divide_evenly(length: int, largest: int, unit: int) -> tuple[int, int]:
    """Divide `length` into the fewest equal blocks of at most `largest`, multiples of `unit`; the last may overhang."""
    steps = -(-length // max(largest, unit))
    block = _round_up(-(-length // steps), unit)
    return block, -(-length // block)


def _round_up(length: int, unit: int) -> int:
    return -(-length // unit) * unit
