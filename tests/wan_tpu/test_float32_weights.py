"""Weights that stay in float32 whatever the precision, in the programs of every family: nothing rounds their products.

A CPU multiplies exactly whatever a program asks for, so the programs are read instead of run.
"""

import jax
import jax.numpy as jnp
import pytest

from wan_tpu import GenerationRequest
from wan_tpu.adapters.merging import abstract_merge
from wan_tpu.aot.programs import STEP, AbstractRuntime, stage_programs
from wan_tpu.families import list_published
from wan_tpu.families.model import published_model
from wan_tpu.runtime.mesh import make_mesh, replicated_sharding

PRODUCTS = ("dot_general", "conv_general_dilated")


def operations(jaxpr):
    """Every operation of a program, those inside of loops and calls, too."""
    for operation in jaxpr.eqns:
        yield operation
        for value in jax.tree.leaves(operation.params, is_leaf=lambda value: hasattr(value, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from operations(inner)


def is_rounded(operation):
    """Whether a TPU would multiply float32 values as bfloat16."""
    if operation.primitive.name not in PRODUCTS or {x.aval.dtype.name for x in operation.invars[:2]} != {"float32"}:
        return False
    return set(jax.tree.leaves(operation.params["precision"])) != {jax.lax.Precision.HIGHEST}


def raises_to_many_powers(operation):
    return operation.primitive.name == "pow" and operation.invars[1].aval.ndim > 0


KINDS = sorted({family.model: kind for kind, family in list_published().items()}.values())


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "turbowan2.2-i2v-a14b" else pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS],
)
def test_products_in_float32_are_exact_in_bfloat16_and_rotary_speeds_are_computed_on_the_host(kind):
    model = published_model(kind)
    runtime = AbstractRuntime(model, make_mesh((1, 1, 1), heads=1), "bfloat16")
    request = GenerationRequest(prompt="a cat").resolve(model.spec.defaults, {})
    looked_at = 0
    for name, (program, arguments, _) in stage_programs(runtime, request, images=max(model.spec.image_counts)).items():
        has_float32 = any(weight.dtype == jnp.float32 for weight in jax.tree.leaves(arguments[0]))
        reads_images = name == "text_encoder" and model.spec.reads_images
        if not has_float32 and not reads_images and name != STEP:
            continue
        with jax.default_matmul_precision("default"):
            traced = jax.make_jaxpr(program.function)(*arguments)
        looked_at += 1
        assert not [str(x) for x in operations(traced.jaxpr) if is_rounded(x)], name
        assert not [str(x) for x in operations(traced.jaxpr) if raises_to_many_powers(x)], name
    assert looked_at


def test_adapters_are_multiplied_exactly():
    mesh = make_mesh((1, 1, 1), heads=1)
    runtime = AbstractRuntime(published_model("wan2.1-t2v-1.3b"), mesh, "bfloat16")
    weight = jax.ShapeDtypeStruct((2, 16, 8), jnp.bfloat16, sharding=replicated_sharding(mesh))
    program, arguments = abstract_merge(runtime, weight, None, ranks=4)
    with jax.default_matmul_precision("default"):
        traced = jax.make_jaxpr(program.function)(*arguments)
    products = [x for x in operations(traced.jaxpr) if x.primitive.name in PRODUCTS]
    assert products and not any(map(is_rounded, products))
