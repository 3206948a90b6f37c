"""What a kernel reads of its operands is read from the kernel's own code."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.lowering import JaxIrContext, upstream_dialects

from wan_tpu.pricing.hlo import parse
from wan_tpu.pricing.jax_private import make_kernel_context
from wan_tpu.pricing.kernel_calls import read_kernel_call

STACK = "f32[40,16,384]"


def copy(numbers, x, y):
    y[...] = x[...]


@pytest.mark.parametrize("choose", [lambda i, numbers: numbers[0], lambda i, numbers: numbers[i]])
def test_no_more_of_a_stack_is_read_than_a_block_each_grid_step(choose):
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(2,),
        in_specs=[pl.BlockSpec((None, 8, 384), lambda i, numbers: (choose(i, numbers), i, 0))],
        out_specs=pl.BlockSpec((8, 384), lambda i, numbers: (i, 0)),
    )
    run = pl.pallas_call(copy, jax.ShapeDtypeStruct((16, 384), jnp.float32), grid_spec=spec)
    numbers, stack = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((40, 16, 384), jnp.float32)
    lowered = jax.jit(run).trace(numbers, stack).lower(lowering_platforms=("tpu",)).as_text()
    config = lowered.split('backend_config = "')[1].split('"')[0].replace("\\22", '"')  # MLIR's quotes
    attributes = f'custom_call_target="tpu_custom_call", backend_config={config}'
    module = parse(f"""
ENTRY %main (n: s32[2], x: {STACK}) -> f32[16,384] {{
  %n = s32[2]{{0}} parameter(0)
  %x = {STACK}{{2,1,0}} parameter(1)
  ROOT %copy.1 = f32[16,384]{{1,0}} custom-call(%n, %x), {attributes}
}}
""")
    entry = module.computations[module.entry]
    call = read_kernel_call(entry.root, entry)
    assert call.unread_bytes == pytest.approx((40 * 16 - 2 * 8) * 384 * 4)


def test_what_is_public_in_jax_does_not_read_kernels():
    """Once it does, `wan_tpu/pricing/jax_private.py` is no longer needed."""
    context = JaxIrContext()
    context.append_dialect_registry(upstream_dialects)
    context.load_all_available_dialects()
    with pytest.raises(IndexError, match="tpu"):
        context.dialects["tpu"]
    assert make_kernel_context().dialects["tpu"]
