"""The cost of a program's kernels and of the branches that hold them, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from tests.wan_tpu.test_aot_cost import CYCLES, LOOP, cost
from wan_tpu.pricing.report import describe

BUNDLES = {"fast_kernel": 10_000, "slow_kernel": 100_000}  # More cycles than the arrays have bytes.


def copy(x, y):
    y[...] = x[...]


def kernel_config(kernel=copy) -> str:
    """What stands at a real kernel of grid (2, 3) in a program: lowering for a TPU needs neither chip nor compiler."""
    block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    run = pl.pallas_call(
        kernel, jax.ShapeDtypeStruct((16, 384), jnp.float32), grid=(2, 3), in_specs=[block], out_specs=block
    )
    lowered = jax.jit(run).trace(jax.ShapeDtypeStruct((16, 384), jnp.float32)).lower(lowering_platforms=("tpu",))
    return lowered.as_text().split('backend_config = "')[1].split('"')[0].replace("\\22", '"')  # MLIR's quotes


def looping(x, y):
    """Five products at every grid step, and a loop that only the first runs."""

    def square(i, total):
        return total + jnp.dot(x[...], x[...].T, preferred_element_type=jnp.float32)

    product = jax.lax.fori_loop(0, 5, square, jnp.zeros((8, 8), jnp.float32))
    y[...] = jnp.broadcast_to(product.sum(), (8, 128))

    @pl.when(pl.program_id(0) == 0)
    def first():
        y[...] = jax.lax.fori_loop(0, 7, lambda i, total: total * 2, y[...])


def alternating(x, y):
    """Four products at every grid step but the last of three, which has one; the first has one more."""

    def product():
        return jnp.broadcast_to(jnp.dot(x[...], x[...].T, preferred_element_type=jnp.float32).sum(), (8, 128))

    step = pl.program_id(1)

    @pl.when(step == 0)
    def first():
        y[...] = product()

    y[...] += jax.lax.cond(step < 2, lambda: sum(product() for _ in range(4)), product)


def test_a_kernels_loops_and_products_are_read():
    text = """
ENTRY %main (x: f32[16,384]) -> f32[16,384] {
  %x = f32[16,384]{1,0} parameter(0)
  ROOT %looping.1 = f32[16,384]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config=CONFIG
}
"""
    calls = {}
    for kernel in (copy, looping, alternating):
        [item] = cost(text.replace("CONFIG", kernel_config(kernel)), kernel_cycles=lambda call: 0.0).items
        calls[kernel] = item.kernel
    assert (calls[copy].macs, calls[copy].repeats) == (0, 1)
    assert (calls[looping].macs, calls[looping].repeats) == (5 * 8 * 128 * 8, 5)
    assert (calls[alternating].macs, calls[alternating].busy) == (4 * 8 * 128 * 8, (4 + 1 + 4 + 1) / (3 * 4))
    assert calls[looping].busy == calls[copy].busy == 1
    assert calls[copy].steps_a_core(2) == 6  # neither axis is parallel
    assert calls[copy].digest != calls[looping].digest


def branches(inner: str) -> str:
    kernel = f'custom_call_target="tpu_custom_call", backend_config={kernel_config()}'
    return f"""
%fast (x.1: f32[16,384]) -> f32[16,384] {{
  %x.1 = f32[16,384]{{1,0}} parameter(0)
  ROOT %fast_kernel.3 = f32[16,384]{{1,0}} custom-call(%x.1), {kernel}
}}

%slow (x.2: f32[16,384]) -> f32[16,384] {{
  %x.2 = f32[16,384]{{1,0}} parameter(0)
  ROOT %slow_kernel.4 = f32[16,384]{{1,0}} custom-call(%x.2), {kernel}
}}

%none (x.3: f32[16,384]) -> f32[16,384] {{
  %x.3 = f32[16,384]{{1,0}} parameter(0)
  ROOT %same = f32[16,384]{{1,0}} add(%x.3, %x.3), {CYCLES.format(1)}
}}

ENTRY %main (p: pred[], x: f32[16,384]) -> f32[16,384] {{
  %p = pred[] parameter(0)
  %x = f32[16,384]{{1,0}} parameter(1)
  ROOT %chosen = f32[16,384]{{1,0}} conditional(%p, %x, %x), branch_computations={{{inner}}}
}}
"""


@pytest.mark.parametrize(
    ("inner", "prefer", "seconds"),
    [
        ("%fast, %slow", ("fast",), 60_000.0),
        ("%slow, %fast", ("slow",), 600_000.0),
        ("%fast, %slow", ("none such",), 600_000.0),  # the costliest
        ("%none, %slow", ("fast",), 1.0),  # a repeat that isn't needed
        ("%none, %slow", ("slow", "fast"), 600_000.0),
    ],
)
def test_the_preferred_branch_is_followed(inner, prefer, seconds):
    program_cost = cost(branches(inner), prefer=prefer, kernel_cycles=lambda call: BUNDLES[call.name] * call.steps)
    assert program_cost.total.estimate == seconds


@pytest.mark.parametrize(("prefer", "seconds"), [(("fast",), 0.0), (("slow",), 600_000.0), ((), 0.0)])
def test_a_repeat_runs_where_its_kernel_is_preferred(prefer, seconds):
    """A loop whose length nobody knows is no repeat, unless it holds a kernel: then it runs no time or once."""
    kernel = f'custom_call_target="tpu_custom_call", backend_config={kernel_config()}'
    text = f"""
%again (s: (pred[], f32[16,384])) -> (pred[], f32[16,384]) {{
  %s = (pred[], f32[16,384]{{1,0}}) parameter(0)
  %wrong = pred[] get-tuple-element(%s), index=0
  %x.1 = f32[16,384]{{1,0}} get-tuple-element(%s), index=1
  %slow_kernel.4 = f32[16,384]{{1,0}} custom-call(%x.1), {kernel}
  ROOT %next = (pred[], f32[16,384]{{1,0}}) tuple(%wrong, %slow_kernel.4)
}}

%is_wrong (s.1: (pred[], f32[16,384])) -> pred[] {{
  %s.1 = (pred[], f32[16,384]{{1,0}}) parameter(0)
  ROOT %wrong.1 = pred[] get-tuple-element(%s.1), index=0
}}

ENTRY %main (p: pred[], x: f32[16,384]) -> (pred[], f32[16,384]) {{
  %p = pred[] parameter(0)
  %x = f32[16,384]{{1,0}} parameter(1)
  %state = (pred[], f32[16,384]{{1,0}}) tuple(%p, %x)
  ROOT %repeat = (pred[], f32[16,384]{{1,0}}) while(%state), condition=%is_wrong, body=%again
}}
"""
    program_cost = cost(text, prefer=prefer, kernel_cycles=lambda call: BUNDLES[call.name] * call.steps)
    assert (program_cost.total.estimate, program_cost.unpriced) == (seconds, ())


@pytest.mark.parametrize(("name", "category"), [("online-softmax", "attention"), ("fast_kernel", "vector")])
def test_xla_s_own_kernel_is_attention(name, category):
    """`others` of `cost` is vector work."""
    text = branches("%fast, %slow").replace("%fast_kernel.3", f"%{name}.3")
    [item] = cost(text, prefer=("fast", name), kernel_cycles=lambda call: 1.0).items
    assert item.category == category


def test_a_kernel_takes_at_least_as_long_as_its_bytes():
    [item] = cost(branches("%fast, %slow"), prefer=("fast",), kernel_cycles=lambda call: 1.0).items
    assert item.seconds.estimate == item.hbm_bytes == 2 * 16 * 384 * 4


def test_what_cannot_be_priced_is_said():
    program_cost = cost(branches("%fast, %slow"), prefer=("fast",))
    assert program_cost.unpriced == ("kernel fast_kernel, grid (2, 3)",)
    assert "NOT COUNTED: kernel fast_kernel" in describe(program_cost)
    unknown = LOOP.replace("%start = s32[] constant(2)", "%start = s32[] parameter(3)")
    assert cost(unknown).unpriced == ("loop loop of unknown length",)
