"""The table of attention kernels: which are compared on which chip, and the bundles the compiler gives each."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.chips import CHIPS
from wan_tpu.pricing.bundles import CompileError, count_bundles
from wan_tpu_kernels.blocks import DEFAULT, LANES, SHARED_ROWS, TABLE, BlockSizes, Schedule
from wan_tpu_kernels.sparse_kernel import STEP
from wan_tpu_kernels.two_blocks import KEYS, TOGETHER
from wan_tpu_kernels.vsa.tile_attention import ROWS, UNROLLED

CASES = str(Path(__file__).with_name("attention_cases.py"))
# The tile jax's and tokamax's kernels are best known at: the keys of a chunk as their users set them.
PEER_TILE = {"block_q": 3328, "block_kv": 2816, "chunk": 256}


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel on one chip. Bundles are None, and the note says why, where it was not compiled."""

    chip: str
    kernel: str
    tile: str
    per_million: float | None  # The hot region's bundles for each million scores.
    slots_per_million: float | None  # The same for the bound by issue slots, which covers the whole kernel.
    step: int | None  # The hot region's bundles: one grid step.
    outside: int | None  # All other bundles: start, end, last keys.
    note: str = ""


def table(chip: str) -> Iterator[Row]:
    """Yield the rows of a chip, each when it has been compiled."""
    for softmax in ("bounded", "optimistic", "online"):
        yield ours(chip, softmax, None)
    yield ours(chip, "optimistic", None, width=64)
    yield ours(chip, "optimistic", None, counted=True)
    yield ours(chip, "optimistic", CHIPS[chip].mxu_8bit_dtype)
    yield ours(chip, "online", CHIPS[chip].mxu_8bit_dtype)
    yield ours(chip, "online", CHIPS[chip].mxu_8bit_dtype, both=True)
    for blocks in (118, 177):  # 10 and 15 % of 75,600 tokens
        yield sparse(chip, blocks)
    yield tiles(chip, 111)  # What two boxes of FastH3 keep together of 124 frames, if they share half.
    for peer in ("splash", "tokamax"):
        yield _count(chip, peer, PEER_TILE["block_q"], PEER_TILE["block_kv"], PEER_TILE)


def ours(
    chip: str,
    softmax: str,
    qk: str | None,
    blocks: BlockSizes | None = None,
    *,
    width: int = LANES,
    counted: bool = False,
    both: bool = False,
) -> Row:
    """Count one of our kernels, at the block table's sizes unless others are given.

    width  of a head; counted  whether the number of keys is known only when the kernel runs; both  whether qk is the
    type of the second product, too
    """
    if blocks is None:
        blocks = TABLE.get((chip, qk or "bfloat16"), DEFAULT)
        rows = min(SHARED_ROWS, blocks.block_q) if width < LANES else blocks.block_q
        blocks = dataclasses.replace(blocks, block_q=rows)
    schedule: Schedule = blocks.online if softmax == "online" else blocks.fixed
    options = {
        "block_q": blocks.block_q,
        "block_kv": blocks.block_kv,
        "schedule": dataclasses.asdict(schedule),
        "softmax": softmax,
        "vmem_limit": blocks.vmem_limit,
        "qk": qk,
        "shared": LANES // width,
        "counted": counted,
        "pv": qk if both else None,
    }
    more = (
        f"both {qk}" if both else qk,
        f"heads of {width}" if width < LANES else None,
        "any number of keys" if counted else None,
    )
    variant = ", ".join([softmax, *filter(None, more)])
    return _count(chip, "ours", blocks.block_q, blocks.block_kv, options, variant)


def sparse(chip: str, blocks: int, tokens: int = 75_776) -> Row:
    """Count block-sparse attention with `blocks` blocks of keys in a list: a grid step is 512 queries."""
    options = {"tokens": tokens, "blocks": blocks}
    return _count(chip, "sparse", STEP, blocks * KEYS, options, f"{blocks} blocks")


def tiles(chip: str, entries: int, tokens: int = 37_376) -> Row:
    """Count attention of tiles to lists of that many: an iteration of the loop is 16 tiles for each of 512 queries."""
    keys = UNROLLED * TOGETHER * ROWS
    return _count(chip, "tiles", STEP, keys, {"tokens": tokens, "entries": entries}, f"{entries} of two")


def _count(chip: str, function: str, block_q: int, block_kv: int, options: dict[str, Any], variant: str = "") -> Row:
    name, tile = f"{function} {variant}".strip(), f"{block_q} x {block_kv}"
    try:
        kernels = count_bundles(f"{CASES}:{function}", options, CHIPS[chip].host_topology)
        if options.get("softmax") != "online":
            kernels = [kernel for kernel in kernels if "_online" not in kernel.name]  # what the call is repeated with
        kernel = kernels[0]
    except CompileError as error:
        return Row(chip, name, tile, None, None, None, None, _why(" ".join(str(error).split())))
    scores = options.get("shared", 1) * block_q * block_kv / 1e6
    return Row(
        chip,
        name,
        tile,
        round(kernel.hot.bundles / scores, 1),
        round(kernel.slot_bound / scores, 1),
        kernel.hot.bundles,
        kernel.total - kernel.hot.bundles,
    )


def _why(error: str) -> str:
    if "No module named" in error:
        return "not installed: pip install '.[peers]'"
    if "Ran out of memory in memory space vmem" in error:
        return "doesn't fit: needs more VMEM than the chip has at this tile"
    return error[:160]
