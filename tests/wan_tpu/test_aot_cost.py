"""The cost of a small program, counted by hand."""

import pytest

from wan_tpu.aot.topology import Hardware
from wan_tpu.pricing.analyse import analyse
from wan_tpu.pricing.hlo import parse, parse_shapes
from wan_tpu.pricing.ici import Interconnect
from wan_tpu.pricing.report import describe

# One cycle a second and one byte a second: seconds are cycles, bytes, or bytes over a link.
HARDWARE = Hardware("toy", "toy:1x1", clock_hz=1.0, peak_flops=1.0, hbm_bytes=1e9, hbm_bytes_per_s=1.0)
LINKS = Interconnect(((0, 0, 0, 0), (1, 0, 0, 0)), 1.0, 1.0)
CYCLES = 'backend_config={{"window_config":{{"estimated_cycles":"{}"}}}}'


def cost(text: str, links: Interconnect = LINKS, **options):
    options = {"kernel_cycles": lambda call: None, "others": "vector", **options}
    return analyse(text.replace("  ENTRY", "ENTRY"), HARDWARE, links, **options)


LOOP = f"""
HloModule jit_step, is_scheduled=true

%slice_body (stack: f32[8,4,128], i: s32[]) -> f32[4,128] {{
  %stack = f32[8,4,128]{{2,1,0:T(4,128)}} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[1,4,128]{{2,1,0:T(4,128)}} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={{1,4,128}}
}}

%product_body (a: bf16[16,128], b: bf16[128,256]) -> bf16[16,256] {{
  %a = bf16[16,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %b = bf16[128,256]{{1,0:T(8,128)(2,1)}} parameter(1)
  ROOT %dot = bf16[16,256]{{1,0:T(8,128)(2,1)}} convolution(%a, %b), dim_labels=bf_io->bf
}}

%body (p: (s32[], f32[8,4,128])) -> (s32[], f32[8,4,128]) {{
  %p = (s32[], f32[8,4,128]{{2,1,0:T(4,128)}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p), index=0
  %stack.1 = f32[8,4,128]{{2,1,0:T(4,128)}} get-tuple-element(%p), index=1
  %fast = f32[4,128]{{1,0:T(4,128)S(1)}} fusion(%stack.1, %i.1), kind=kLoop, calls=%slice_body, {CYCLES.format(7)}
  ROOT %next = (s32[], f32[8,4,128]{{2,1,0:T(4,128)}}) tuple(%i.1, %stack.1)
}}

%condition (p.1: (s32[], f32[8,4,128])) -> pred[] {{
  %p.1 = (s32[], f32[8,4,128]) parameter(0)
  %counter = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(6)
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}}

ENTRY %main (x: f32[8,4,128], a.1: bf16[16,128], b.1: bf16[128,256]) -> bf16[16,256] {{
  %x = f32[8,4,128]{{2,1,0:T(4,128)}} parameter(0)
  %a.1 = bf16[16,128]{{1,0:T(8,128)(2,1)}} parameter(1)
  %b.1 = bf16[128,256]{{1,0:T(8,128)(2,1)}} parameter(2)
  %start = s32[] constant(2)
  %state = (s32[], f32[8,4,128]) tuple(%start, %x)
  %loop = (s32[], f32[8,4,128]) while(%state), condition=%condition, body=%body
  ROOT %product = bf16[16,256]{{1,0:T(8,128)(2,1)}} fusion(%a.1, %b.1), kind=kOutput, calls=%product_body, """
LOOP += CYCLES.format(50) + ', metadata={op_name="jit(step)/dot"}\n}\n'


def test_a_loop_costs_its_body_times_its_trips():
    loop_cost = cost(LOOP)
    part = 4 * 128 * 4 + 4  # bytes: the slice and its index are read, what it makes stays in VMEM
    assert loop_cost.by_category()["copies"].estimate == 4 * 7
    assert loop_cost.by_category()["copies"].floor == 4 * part
    assert loop_cost.loops() == [("body", 4.0)]


def test_a_slice_of_a_stack_that_is_read_as_other_tiles_is_a_slice():
    """As XLA has it: a fusion in the fusion changes nothing but how the stack's memory is read."""
    again = """
%other_tiles (input: f32[8,4,128]) -> f32[8,4,128] {
  %input = f32[8,4,128]{2,1,0:T(4,128)} parameter(0)
  ROOT %same = f32[8,4,128]{2,1,0:T(2,128)} copy(%input)
}

%slice_body"""
    aliased = LOOP.replace("\n%slice_body", again, 1).replace(
        "  %i = s32[] parameter(1)\n",
        "  %seen = f32[8,4,128]{2,1,0:T(2,128)} fusion(%stack), kind=kLoop, "
        "output_to_operand_aliasing={{}: (0, {})}, calls=%other_tiles\n  %i = s32[] parameter(1)\n",
        1,
    )
    aliased = aliased.replace("dynamic-slice(%stack,", "dynamic-slice(%seen,")
    assert aliased.count("%seen") == 2
    copies, expected = (cost(text).by_category()["copies"] for text in (aliased, LOOP))
    assert copies == expected
    another = aliased.replace("output_to_operand_aliasing={{}: (0, {})}, ", "")
    assert cost(another).by_category()["copies"].floor > expected.floor


def test_matrix_products_keep_their_estimate_at_the_floor_and_count_their_operations():
    loop_cost = cost(LOOP)
    assert (loop_cost.by_category()["matmul"].estimate, loop_cost.by_category()["matmul"].floor) == (50, 50)
    assert loop_cost.matmul_flops == 2 * 16 * 128 * 256
    assert loop_cost.total.estimate == 50 + 4 * 7
    [top] = loop_cost.top(1, where="main")
    assert (top.name, top.op_name, top.shape) == ("product", "jit(step)/dot", "bf16[16,256]")
    assert top.hbm_bytes == 2 * (16 * 128 + 128 * 256 + 16 * 256)


def test_a_fusion_that_the_compiler_cannot_estimate_counts_by_its_bytes_or_its_products():
    unknown = f'"estimated_cycles":"{2**63 - 1}"'
    assert cost(LOOP.replace('"estimated_cycles":"7"', unknown)).total.estimate == cost(LOOP).total.floor
    [product] = [item for item in cost(LOOP.replace('"estimated_cycles":"50"', unknown)).items if item.flops]
    assert product.seconds.estimate == product.flops == 2 * 16 * 128 * 256


def test_the_report_names_what_costs():
    text = describe(cost(LOOP), top=3)
    assert "product" in text
    assert "an iteration of body (4 in all)" in text


def test_bytes_are_padded_to_tiles_and_vmem_is_told_from_hbm():
    [padded] = parse_shapes("bf16[3,100]{1,0:T(8,128)(2,1)}")
    [fast] = parse_shapes("f32[5]{0:T(1024)S(1)}")
    assert padded.bytes == 8 * 128 * 2
    assert padded.in_hbm
    assert not fast.in_hbm
    assert [shape.dims for shape in parse_shapes("(f32[2]{0}, /*index=1*/(s32[], pred[3]))")] == [(2,), (), (3,)]


OVERLAP = f"""
ENTRY %main (x: f32[128]) -> f32[128] {{
  %x = f32[128]{{0:T(128)}} parameter(0)
  %gather = (f32[128]{{0:T(128)}}, f32[256]{{0:T(128)}}) all-gather-start(%x), replica_groups={{{{0,1}}}}
  %work = f32[128]{{0:T(128)S(1)}} add(%x, %x), {CYCLES.format(200)}
  %gathered = f32[256]{{0:T(128)}} all-gather-done(%gather)
  %reduced = f32[128]{{0:T(128)}} all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%sum
  %fetch = (f32[128]{{0:T(128)S(1)}}, f32[128]{{0:T(128)}}, u32[]{{:S(2)}}) copy-start(%x)
  %fetched = f32[128]{{0:T(128)S(1)}} copy-done(%fetch)
  %look = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore"
  %look.update = ((f32[4096], s32[128]), f32[128]{{0:T(128)}}) call-update(%look, %table, %x)
  ROOT %looked = f32[128]{{0:T(128)}} call-done(%look.update)
}}
"""


def test_only_what_no_work_hides_is_exposed():
    items = {item.name: item for item in cost(OVERLAP).items}
    # Two devices, one link: half of the 1,024 gathered bytes comes in, over a ring of two halves, in one direction.
    assert items["gathered"].seconds.estimate == 512 - 200
    assert items["gathered"].hidden_s.estimate == 200
    assert items["gathered"].seconds.floor == 0  # the addition reads 512 bytes: exactly as long
    assert items["reduced"].seconds.estimate == 512
    assert items["fetched"].seconds.floor == 512
    assert items["looked"].seconds.floor == 512  # what a SparseCore looks up, from the update on
    assert items["fetched"].category == "copies"
    whole_numbers = {item.name: item for item in cost(OVERLAP.replace("f32[", "s32[")).items}
    assert whole_numbers["gathered"].seconds == items["gathered"].seconds


def test_the_limit_is_the_peak_or_the_bandwidth_with_all_transfers_hidden():
    slow = cost(LOOP.replace('"estimated_cycles":"50"', '"estimated_cycles":"9999999"')).by_category()
    assert slow["matmul"].limit == 2 * 16 * 128 * 256
    assert slow["copies"].limit == slow["copies"].estimate  # Shorter than what its bytes take: some are in VMEM.
    assert cost(OVERLAP).by_category()["collectives"].limit == 0


CARRIED = f"""
%begun (w: f32[128]) -> (f32[128], f32[256], s32[2], u32[]) {{
  %w = f32[128]{{0:T(128)}} parameter(0)
  %gather.1 = f32[256]{{0:T(128)}} all-gather(%w), channel_id=5, replica_groups={{{{0,1}}}}, dimensions={{0}}
  %place = s32[2]{{0:S(4)}} constant({{0, 0}})
  %flag = u32[]{{:S(2)}} constant(0)
  ROOT %all = (f32[128]{{0:T(128)}}, f32[256]{{0:T(128)}}, s32[2]{{0:S(4)}}, u32[]{{:S(2)}}) tuple(%w, %gather.1, %place, %flag)
}}

%async_collective_fusion.7 (v: f32[128], g: f32[256], y: f32[32]) -> (f32[32], f32[128], f32[256]) {{
  %v = f32[128]{{0:T(128)}} parameter(0)
  %g = f32[256]{{0:T(128)}} parameter(1)
  %y = f32[32]{{0:T(32)}} parameter(2)
  %sine = f32[32]{{0:T(32)}} sine(%y)
  %gather.2 = f32[256]{{0:T(128)}} all-gather(%v), channel_id=5, replica_groups={{{{0,1}}}}, dimensions={{0}}
  ROOT %both = (f32[32]{{0:T(32)}}, f32[128]{{0:T(128)}}, f32[256]{{0:T(128)}}) tuple(%sine, %v, %gather.2)
}}

%ended (u: f32[128], h: f32[256]) -> f32[256] {{
  %u = f32[128]{{0:T(128)}} parameter(0)
  %h = f32[256]{{0:T(128)}} parameter(1)
  ROOT %gather.3 = f32[256]{{0:T(128)}} all-gather(%u), channel_id=5, replica_groups={{{{0,1}}}}, dimensions={{0}}
}}

  ENTRY %main (x: f32[128], z: f32[32]) -> f32[256] {{
  %x = f32[128]{{0:T(128)}} parameter(0)
  %z = f32[32]{{0:T(32)}} parameter(1)
  %async-collective-start = (f32[128]{{0:T(128)}}, f32[256]{{0:T(128)}}, s32[2]{{0:S(4)}}, u32[]{{:S(2)}}) fusion(%x), kind=kCustom, calls=%begun
  %held = f32[128]{{0:T(128)}} get-tuple-element(%async-collective-start), index=0
  %half = f32[256]{{0:T(128)}} get-tuple-element(%async-collective-start), index=1
  %waves = (f32[32]{{0:T(32)}}, f32[128]{{0:T(128)}}, f32[256]{{0:T(128)}}) fusion(%held, %half, %z), kind=kOutput, calls=%async_collective_fusion.7, {CYCLES.format(200)}
  %held.1 = f32[128]{{0:T(128)}} get-tuple-element(%waves), index=1
  %half.1 = f32[256]{{0:T(128)}} get-tuple-element(%waves), index=2
  ROOT %async-collective-done = f32[256]{{0:T(128)}} fusion(%held.1, %half.1), kind=kCustom, calls=%ended
}}
"""  # noqa: E501


def test_fusions_that_carry_a_collective_hide_it():
    items = {item.name: item for item in cost(CARRIED).items}
    assert {name: item.category for name, item in items.items()} == {
        "waves": "vector",
        "async-collective-done": "collectives",
    }
    moved = {item.name: item.category for item in cost(CARRIED.replace("sine(", "copy(")).items}
    assert moved["waves"] == "copies"
    assert items["waves"].seconds.estimate == 200
    assert items["waves"].seconds.floor == 2 * 32 * 4  # its own, not what is gathered
    assert items["async-collective-done"].seconds.estimate == 512 - 200


TWO_CORES_A_CHIP = """
ENTRY %main (x: f32[128]) -> f32[128] {
  %x = f32[128]{0:T(128)} parameter(0)
  %far = (f32[128]{0:T(128)}, f32[128]{0:T(128)}) collective-permute-start(%x), source_target_pairs={{0,2}}
  %farther = (f32[128]{0:T(128)}, f32[128]{0:T(128)}) collective-permute-start(%x), source_target_pairs={{0,2}}
  %near = (f32[128]{0:T(128)}, f32[128]{0:T(128)}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %near.done = f32[128]{0:T(128)} collective-permute-done(%near)
  %far.done = f32[128]{0:T(128)} collective-permute-done(%far)
  ROOT %farther.done = f32[128]{0:T(128)} collective-permute-done(%farther)
}
"""


def test_transfers_wait_for_those_on_their_own_links_alone():
    links = Interconnect(((0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0)), 1.0, 4.0)  # four times as fast within a chip
    seconds = {item.name: item.seconds.floor for item in cost(TWO_CORES_A_CHIP, links).items}
    assert seconds == {"near.done": 128, "far.done": 512 - 128, "farther.done": 512}


def test_computations_of_a_sparsecore_are_read():
    looking_up = """
%looking_up (x.1: f32[128]) -> f32[128] {
  ROOT %x.1 = f32[128]{0} parameter(0)
}, execution_thread="sparsecore"
"""
    module = parse(looking_up + OVERLAP.replace("call-start()", "call-start(), to_apply=%looking_up"))
    called = {name for each in module.computations["main"].instructions for name in each.list_called("to_apply")}
    assert called - {"sum"} == {"looking_up"} == set(module.computations) - {"main"}


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule nothing")
