"""Calls of kernels at full size for `bundles.count_bundles`, which loads this file by its path."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from wan_tpu_kernels.layer_norm import layer_norm
from wan_tpu_kernels.linear import linear
from wan_tpu_kernels.low_precision import LANES, Rounded


def layer_norm_rows(rows, channels):
    """Return a call of layer_norm and the shapes of its arguments."""
    x = jax.ShapeDtypeStruct((rows, channels), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((1, channels), jnp.float32)
    return lambda x, scale, shift: layer_norm(x, scale, shift, eps=1e-6), (x, row, row)


def linear_8_bits(inputs, outputs, activation=None, residual=False):
    """Return a linear layer in int8 of a 14B on one of eight devices, and the shapes of its arguments."""
    rows, array = 4736, jax.ShapeDtypeStruct
    rounded = Rounded(array((rows, inputs), jnp.int8), array((rows, LANES), jnp.float32))
    weight, scales = array((outputs, inputs), jnp.int8), array((outputs,), jnp.float32)
    shapes = [rounded, weight, scales, array((outputs,), jnp.bfloat16)]
    if residual:
        shapes += [array((rows, outputs), jnp.bfloat16), array((1, outputs), jnp.float32)]

    def run(x, weight, scales, bias, *added):
        more = dict(zip(("residual", "gate"), added, strict=False))
        return linear(x, weight, bias, scales=scales, activation=activation, **more)

    return run, shapes


def linear_layer(rows, inputs, outputs, activation=None, segments=0):
    """Return a linear layer without a bias, with a residual if its gate has segments, and the shapes of its arguments.

    Outputs are rows of the weight, so SwiGLU's result has half as many.
    """
    array = jax.ShapeDtypeStruct
    shapes = [array((rows, inputs), jnp.bfloat16), array((outputs, inputs), jnp.bfloat16)]
    if segments:
        shapes += [array((rows, outputs), jnp.bfloat16), array((segments, outputs), jnp.float32)]
        shapes.append(array((segments - 1,), jnp.int32))

    def run(x, weight, *added):
        more = dict(zip(("residual", "gate", "first_rows"), added, strict=False))
        return linear(x, weight, None, activation=activation, **more)

    return run, shapes


def copy_one_block(megabytes):
    """Return a kernel whose only block is the whole array, of which it copies a few rows, and the array's shape."""
    x = jax.ShapeDtypeStruct((megabytes * 2048, 128), jnp.float32)

    def kernel(x_ref, o_ref):
        o_ref[:8] = x_ref[:8]

    return pl.pallas_call(kernel, out_shape=x), (x,)
