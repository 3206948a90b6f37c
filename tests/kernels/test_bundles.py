"""The TPU compiler's bundle counts of each kernel meet the targets. These tests need libtpu, but no TPU."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.chips import CHIPS
from scripts.kernel_tables.attention_kernels import CASES, ours, sparse, tiles
from scripts.kernel_tables.conv_cases import CASES as CONVOLUTIONS
from wan_tpu.aot.topology import Hardware
from wan_tpu.errors import Unavailable
from wan_tpu.pricing.bundles import (
    Body,
    CompileError,
    count_bundles,
    find_hot_bundles,
    read_loops,
    read_regions,
    read_slot_use,
)
from wan_tpu.pricing.kernel_prices import KernelPrices, StepBundles, step_bundles
from wan_tpu_kernels.blocks import TABLE, BlockSizes, Schedule

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which holds the TPU compiler, is not installed"
)

NORMS = str(Path(__file__).with_name("bundle_cases.py"))
# Bundles per million scores on v6e of the default way, with the libtpu of every supported pair: of the tiles that a
# video has, and of tiles that compile in a tenth of the time, for which the start of a tile counts more. In bfloat16 no
# schedule of large tiles can beat 1,455, the MXU's issue slots.
TARGETS = {
    (None, 128): (1510, 1690),
    ("int8", 128): (1350, 1600),
    (None, 64): (1460, 1560),  # Heads share a register.
}
SMALL = BlockSizes(2048, 1024, Schedule(512), Schedule(512))


@needs_libtpu
@pytest.mark.thorough  # A minute each.
@pytest.mark.parametrize(("least", "block_q"), [(1000, None), (1400, 1024)], ids=["usual tiles", "small tiles"])
@pytest.mark.parametrize(("qk", "width"), TARGETS)
def test_v6e_meets_its_targets(qk, width, least, block_q):
    blocks = block_q and replace(TABLE["v6e", qk or "bfloat16"], block_q=block_q)
    row = ours("v6e", "optimistic", qk, blocks, width=width)
    assert row.per_million is not None, row.note
    assert least < row.per_million <= TARGETS[qk, width][bool(block_q)]


@needs_libtpu
@pytest.mark.thorough
@pytest.mark.parametrize(("chip", "kind", "target"), [("v6e", "int8", 2400), ("v7x", "float8_e4m3fn", 1800)])
def test_both_products_in_8_bits_meet_their_target(chip, kind, target):
    row = ours(chip, "online", kind, both=True)
    assert row.per_million is not None, row.note
    assert 1300 < row.per_million <= target


@needs_libtpu
@pytest.mark.thorough
def test_a_number_of_keys_that_only_the_program_knows_costs_nothing():
    known, counted = (ours("v6e", "optimistic", None, SMALL, counted=counted).per_million for counted in (False, True))
    assert known is not None and counted == pytest.approx(known, rel=0.005)


@needs_libtpu
@pytest.mark.parametrize(
    ("kernel", "tokens", "entries", "target"),
    [
        pytest.param(sparse, 75_776, 177, 2250, marks=pytest.mark.thorough),  # 15 % of a video's blocks.
        pytest.param(sparse, 8192, 32, 2820, marks=pytest.mark.thorough),
        pytest.param(tiles, 8192, 111, 2450, marks=pytest.mark.thorough),  # An iteration is the same for all lengths.
    ],
)
def test_sparse_attention_meets_its_target(kernel, tokens, entries, target):
    """The MXU's issue slots would allow `sparse` 1,972 bundles per million kept scores of a video."""
    row = kernel("v6e", entries, tokens)
    assert row.per_million is not None, row.note
    assert 1900 < row.per_million <= target


V6E = CHIPS["v6e"]
MACS = V6E.bf16_flops / 2 / V6E.clock_hz  # Multiply-adds per cycle of v6e.


@needs_libtpu
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "rows", "inputs", "outputs", "more"),
    [
        ("linear_8_bits", 4736, 5120, 5120, {"residual": True}),
        ("linear_8_bits", 4736, 5120, 13824, {"activation": "gelu_tanh"}),
        ("linear_8_bits", 4736, 13824, 5120, {"residual": True}),
        ("linear_layer", 4768, 14336, 5376, {"segments": 4}),
        ("linear_layer", 4768, 5376, 28672, {"activation": "swiglu"}),
    ],
)
def test_linear_layers_reach_their_share_of_the_peak(case, rows, inputs, outputs, more):
    """The layers are those of a 14B, in int8, and of MiniMax-H3; the start and end of each tile are counted as well."""
    cycles = count_cycles(f"{NORMS}:{case}", {"rows": rows, "inputs": inputs, "outputs": outputs, **more}, "linear")
    speed, least = (2, 0.85) if case == "linear_8_bits" else (1, 0.95)  # int8 is twice as fast as bfloat16.
    assert least <= rows * inputs * outputs / (speed * MACS) / cycles <= 1


# The last block of a decoder, at the chip's peak: Wan's four frames take 0.47 million cycles with folded rows, or 0.86
# with the zeros that fill products; else 0.44, and took 2.1 before two frames shared the columns of a matrix unit.
# LTX-2's, in 16 slabs of 8 tiles, take 3.6 million, and a third more because of two frames in a product.
@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "sizes", "more", "steps", "least", "most"),
    [
        ("build_folded", (4, 160, 768, 96), {"fold": 8}, None, 0.86e6, 1.15e6),
        pytest.param("build_causal", (4, 160, 720, 96), {}, 32, 0.9e6, 1.5e6, marks=pytest.mark.thorough),
        pytest.param("build_centred", (121, 64, 272, 128), {}, 128, 5e6, 9e6, marks=pytest.mark.thorough),
    ],
)
def test_convolutions_keep_the_matrix_units_busy(case, sizes, more, steps, least, most):
    options = dict(zip(("frames", "columns", "rows", "channels"), sizes, strict=True)) | more
    assert least < count_cycles(f"{CONVOLUTIONS}:{case}", options, steps=steps) < most


def count_cycles(target, options, name="", steps=None):
    """Return the cycles of all steps of a kernel's grid on v6e: of the largest kernel whose name begins so."""
    kernel = next(kernel for kernel in count_bundles(target, options) if kernel.name.startswith(name))
    if steps is None:
        [steps] = {trips[0] - 2 for trips in kernel.loops if trips}
    cycles = step_bundles(kernel.loops, steps)
    return steps * (cycles.products + cycles.other)


@needs_libtpu
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "options", "target"),
    [
        ("window_attention_strip", {"columns": 16, "shape": [16, 48]}, 9400),  # A box of four heads.
        ("norm_qkv_strip", {"columns": 8, "shape": [16, 272]}, 2700),  # Two columns of 272 rows.
        ("norm_swiglu_rows", {"rows": 4096}, 2250),  # 512 rows.
    ],
)
def test_blocks_of_windows_meet_their_targets(case, options, target):
    name = f"{case.rpartition('_')[0]}."
    [kernel] = [kernel for kernel in count_bundles(f"{NORMS}:{case}", options) if kernel.name.startswith(name)]
    assert target / 2 < kernel.hot.bundles <= target


@needs_libtpu
def test_groups_that_arent_whole_registers_are_laid_out_as_a_tpu_reads_them():
    """15 of CogVideoX-2b's heads of 64: the interpreter takes blocks that the compiler refuses."""
    kernels = count_bundles(f"{NORMS}:linear_in_groups", {"outputs": 1920, "groups": 2})
    assert any(kernel.name.startswith("linear") for kernel in kernels)


@needs_libtpu
@pytest.mark.long
def test_a_norm_takes_fewer_cycles_than_its_bytes():
    """HBM bounds it: each iteration of its loop reads and writes 64 rows once, in bfloat16."""
    [kernel] = count_bundles(f"{NORMS}:layer_norm_rows", {"rows": 4096, "channels": 5120})
    bytes_ = 2 * 64 * 5120 * 2
    assert 500 < kernel.hot.bundles <= bytes_ / V6E.hbm_bytes_per_s * V6E.clock_hz


@needs_libtpu
@pytest.mark.long
def test_kernel_that_does_not_fit_names_vmem():
    with pytest.raises(CompileError, match="vmem"):
        count_bundles(f"{NORMS}:copy_one_block", {"megabytes": 256})


def test_count_that_times_out_reports_a_busy_machine():
    with pytest.raises(Unavailable, match=r"ours.*v6e:2x2.* 0 s"):
        count_bundles(f"{CASES}:ours", timeout_s=0.01)


NOP, LOOPED = "  0x0 : { nop }\n", "  0x1 : > { nop }\n"
BUNDLES = (
    "// Start region 1\n" + NOP + LOOPED
    + "// Start region 4 :: Start region 2\n" + LOOPED + "// End region 4\n" + 19 * LOOPED + "// End region 2\n"
    + LOOPED + "// Start region 3 :: Start region 5\n" + 6 * LOOPED + "// End region 3\n" + "// End region 1\n" + NOP
)  # fmt: skip


def test_regions_include_the_regions_inside_them():
    """Regions that begin together are listed in any order, and one has no end."""
    regions, bundles = read_regions(BUNDLES)
    assert [(region.start, region.end) for region in regions] == [(0, 29), (2, 22), (2, 3), (23, 29)]
    assert [bundle.depth for bundle in bundles] == [0] + 28 * [1] + [0]
    # Bundles of the loop that are in no other region surround the body.
    assert find_hot_bundles(regions, bundles) == (Body(20, idle=20), 2)


def test_body_directly_in_the_loop_is_the_hot_one():
    waits = "// Start region 2\n" + 3 * LOOPED + "// End region 2\n"
    text = "// Start region 1\n" + NOP + 10 * LOOPED + waits + 10 * LOOPED + "// End region 1\n" + NOP
    assert find_hot_bundles(*read_regions(text)) == (Body(21, idle=21), 0)
    inner = "// Start region 2\n" + 6 * LOOPED.replace(">", ">>") + "// End region 2\n"  # a loop in it goes before
    assert find_hot_bundles(*read_regions(text.replace(waits, inner))) == (Body(6, idle=6), 20)


def test_matrix_units_stand_still_before_the_first_product_and_after_the_last():
    """A bundle may go over several lines."""
    product = "  0x1 : > { %5 = vadd.f32 %3, %4 /* of\n two */ ;; %1 = vmatmul.bf16.gmra.mxu0 %2 }\n"
    body = 3 * LOOPED + product + 7 * LOOPED + product + 2 * LOOPED
    text = "// Start region 1\n" + NOP + "// Start region 2\n" + body + "// End region 2\n// End region 1\n"
    assert find_hot_bundles(*read_regions(text)) == (Body(14, idle=5), 0)
    assert read_loops(text.replace("0x1 :", "0x1 LB:", 1)) == {(): Body(1, idle=1), (1,): Body(14, idle=5)}


def test_bundles_count_as_often_as_the_loops_around_them_run():
    text = """
   0x0   :  { %s1 = smov.u32 0 }
   0x1 LB: > { %s10 = sphi %s1, %s11  ;;  %s12 = sphi %s1, %s13 }
   0x2 LB: >> { %s20_s5 = sphi %s1, %s21_s5  ;;  %7 = vmatmul.bf16.gmra.mxu0 %6 }
   0x3   : >> { %p2 = scmp.ge.s32.totalorder %s21_s5, 8 /* loop exit test */ }
   0x4   :  {}
   0x5   : > { %p1 = scmp.ge.s32.totalorder (%p2), %s13, 34 /* loop exit test */ }
   0x6   :  { %s9 = smov.u32 0 }
"""
    loops = read_loops(text)
    assert loops == {(): Body(3, 3), (34,): Body(2, 2), (34, 8): Body(2, 1)}
    assert step_bundles(loops, steps=32) == StepBundles(
        products=2 * 8, other=2, idle=8
    )  # The loop of 34 is the grid's.
    assert step_bundles(loops, steps=1) == StepBundles(products=34 * 2 * 8, other=3 + 34 * 2, idle=34 * 8)
    with pytest.raises(CompileError, match=r"\b64\b"):
        step_bundles(loops, steps=64)
    # These are two loops on a grid of one axis, whose length is no constant with libtpu 0.0.42.1.
    unknown = {(): Body(19, 19), (1,): Body(79, 79), (1, 32): Body(59, 59), (1, 16): Body(521, 40)}
    assert step_bundles(unknown, steps=80) == StepBundles(products=16 * 521, other=79 + 32 * 59, idle=16 * 40)


def test_slots_are_shares_of_their_capacity():
    text = "header\nMATMUL, VALU\n2 4\n\n2 0\n2 2\n"
    assert read_slot_use(text) == ({"MATMUL": 1.0, "VALU": 0.25}, 2)


@pytest.mark.parametrize("content", ["", "{}", '{"bundles": {"products"'])
def test_price_whose_file_is_cut_off_is_counted_again(content, tmp_path):
    counted = []

    def count(calls, host, cores):
        counted.extend(calls)
        return [StepBundles(7, 1)] * len(calls)

    hardware = Hardware("v6e", "v6e:2x2", clock_hz=1, peak_flops=1, hbm_bytes=1, hbm_bytes_per_s=1)
    call = SimpleNamespace(digest="x", name="kernel", grid=(1,), steps_a_core=lambda cores: 1)
    prices = KernelPrices(tmp_path, hardware, 1, count)
    assert prices.bundles(call) == StepBundles(7, 1)
    (file,) = tmp_path.glob("*.json")
    file.write_text(content)
    assert [prices.bundles(call), prices.bundles(call)] == [StepBundles(7, 1)] * 2
    assert len(counted) == 2


def test_kernels_are_counted_together_and_one_that_is_refused_alone(tmp_path):
    asked = []

    def count(calls, host, cores):
        asked.append([call.name for call in calls])
        if "large" in asked[-1]:
            raise CompileError("large needs 200 MiB of VMEM")
        return [StepBundles(len(call.name)) for call in calls]

    def call(name):
        return SimpleNamespace(digest=name, name=name, grid=(1,), steps_a_core=lambda cores: 1)

    hardware = Hardware("v6e", "v6e:2x2", clock_hz=1, peak_flops=1, hbm_bytes=1, hbm_bytes_per_s=1)
    prices = KernelPrices(tmp_path, hardware, 1, count)
    prices.count([call("small"), call("middle")])
    assert (prices.bundles(call("small")), prices.bundles(call("middle"))) == (StepBundles(5), StepBundles(6))
    with pytest.raises(CompileError, match="200 MiB"):
        prices.count([call("small"), call("tiny"), call("large")])
    assert asked == [["small", "middle"], ["tiny", "large"], ["tiny"], ["large"]]
