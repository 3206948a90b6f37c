"""The table of block sizes, and the rule that fits a row of it to given lengths."""

import dataclasses

import jax.numpy as jnp
import pytest

from wan_tpu_kernels.blocks import TABLE, BlockSizes, Schedule, plan_blocks


@pytest.mark.parametrize(("chip", "dtype"), [*TABLE, ("other", "bfloat16"), ("v6e", "float32")])
@pytest.mark.parametrize("q_len", [1, 127, 257, 18_944, 75_600, 75_776])
@pytest.mark.parametrize("kv_len", [1, 129, 257, 512, 513, 3000, 75_600])
def test_blocks_cover_both_lengths_and_none_is_empty(chip, dtype, q_len, kv_len):
    plan = plan_blocks(q_len, kv_len, dtype=jnp.dtype(dtype), chip=chip)
    blocks = plan.blocks  # BlockSizes itself refuses chunks and columns that don't divide its blocks.
    for length, block, steps in ((q_len, blocks.block_q, plan.q_steps), (kv_len, blocks.block_kv, plan.kv_steps)):
        assert block % 128 == 0
        assert (steps - 1) * block < length <= steps * block
    assert plan.steps == plan.q_steps * plan.kv_steps


def test_long_sequences_get_the_table_s_row_and_queries_in_blocks_that_fit():
    row = TABLE["v5p", "bfloat16"]
    assert plan_blocks(23 * 3328, 75_600, chip="v5p").blocks == row
    plan = plan_blocks(75_776, 75_600, chip="v5p")  # 23 blocks of 3,328 rows would overhang by 768.
    assert plan.blocks == dataclasses.replace(row, block_q=2816)
    assert plan.q_steps * 2816 - 75_776 == 256
    whole = plan_blocks(75_776, 75_600, chip="v6e")
    assert whole.blocks == dataclasses.replace(TABLE["v6e", "bfloat16"], block_q=9472)
    assert (whole.q_steps, whole.kv_steps) == (8, 37)
    minimax = plan_blocks(38_912, 38_912, chip="v6e")
    assert (minimax.blocks, minimax.q_steps, minimax.kv_steps) == (TABLE["v6e", "bfloat16"], 4, 19)


def test_heads_that_share_lanes_get_smaller_blocks():
    alone, sharing = (plan_blocks(75_776, 75_600, chip="v6e", shared=heads) for heads in (1, 2))
    assert sharing.blocks.block_q <= 3328 < alone.blocks.block_q
    assert sharing.blocks == dataclasses.replace(alone.blocks, block_q=sharing.blocks.block_q)
    assert sharing.q_steps * sharing.blocks.block_q >= 75_776


def test_text_keys_fit_into_one_chunk():
    plan = plan_blocks(18_944, 257, chip="v6e")
    assert plan.kv_steps == 1
    assert plan.blocks.online.chunk == plan.blocks.block_kv == 384


def test_short_sequences_of_a_batch_need_no_padding():
    plan = plan_blocks(1808, 1797, chip="v6e", shared=2, pad=False)
    assert (plan.blocks.block_q, plan.q_steps, plan.blocks.block_kv, plan.kv_steps) == (1808, 1, 1024, 2)
    for q_len, kv_len in ((75_776, 75_600), (18_944, 257)):
        assert plan_blocks(q_len, kv_len, chip="v6e", pad=False) == plan_blocks(q_len, kv_len, chip="v6e")


@pytest.mark.parametrize(("chip", "dtype"), TABLE)
def test_fallback_has_smaller_blocks_that_cover_all_rows_and_keys(chip, dtype):
    plan = plan_blocks(75_776, 75_600, dtype=dtype, chip=chip, fallback=True)
    assert plan.blocks.block_q * plan.blocks.block_kv <= 2048 * 1024
    assert plan.q_steps * plan.blocks.block_q >= 75_776
    assert plan.kv_steps * plan.blocks.block_kv >= 75_600


def test_blocks_of_a_video_overhang_by_at_most_one_percent():
    for chip, dtype in TABLE:
        plan = plan_blocks(75_776, 75_600, dtype=dtype, chip=chip)
        assert plan.q_steps * plan.blocks.block_q <= 1.01 * 75_776


def test_chunks_must_divide_blocks():
    with pytest.raises(ValueError, match="block_kv"):
        BlockSizes(256, 256, fixed=Schedule(96), online=Schedule(128))
