"""Calls of kernels at full size for `bundles.count_bundles`, which loads this file by its path."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from wan_tpu_kernels.layer_norm import layer_norm
from wan_tpu_kernels.linear import linear
from wan_tpu_kernels.low_precision import LANES, Rounded
from wan_tpu_kernels.windows.attention import count_key_rows, count_side_columns, window_attention
from wan_tpu_kernels.windows.norm_qkv import norm_qkv
from wan_tpu_kernels.windows.norm_swiglu import norm_swiglu


def layer_norm_rows(rows, channels):
    """Return a call of layer_norm and the shapes of its arguments."""
    x = jax.ShapeDtypeStruct((rows, channels), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((1, channels), jnp.float32)
    return lambda x, scale, shift: layer_norm(x, scale, shift, eps=1e-6), (x, row, row)


def linear_8_bits(rows, inputs, outputs, activation=None, residual=False):
    """Return a linear layer in int8 of a 14B on one of eight devices, and the shapes of its arguments."""
    array = jax.ShapeDtypeStruct
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


def linear_in_groups(outputs, groups):
    """Return a linear layer whose outputs are written in groups, and the shapes of its arguments."""
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, outputs), (outputs, outputs), (outputs,)))
    return functools.partial(linear, groups=groups), tuple(shapes)


def copy_one_block(megabytes):
    """Return a kernel whose only block is the whole array, of which it copies a few rows, and the array's shape."""
    x = jax.ShapeDtypeStruct((megabytes * 2048, 128), jnp.float32)

    def kernel(x_ref, o_ref):
        o_ref[:8] = x_ref[:8]

    return pl.pallas_call(kernel, out_shape=x), (x,)


def window_attention_strip(columns, window=(11, 11, 11), shape=(121, 272), channels=256):
    """Return attention of windows on one of the devices that share a video's columns, and the arguments' shapes."""
    (frames, rows), sides = shape, 2 * count_side_columns(columns, 8 * columns, window[1])
    q = jax.ShapeDtypeStruct((frames, columns, rows, channels), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((frames, columns + sides, count_key_rows(rows), channels), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)

    def run(q, k, v, first, largest):
        width = 8 * columns
        return window_attention(q, k, v, first, largest, heads=channels // 64, window=tuple(window), width=width)

    return run, (q, k, k, *numbers)


def norm_qkv_strip(columns, shape=(121, 272), channels=256):
    """Return what precedes that attention in a block, and the arguments' shapes."""
    array, frames, rows = jax.ShapeDtypeStruct, *shape
    x = array((frames, columns, rows, channels), jnp.bfloat16)
    linear = array((channels, channels), jnp.bfloat16), array((channels,), jnp.bfloat16)
    linears = dict.fromkeys(("context", "q", "k", "v"), linear)
    sizes = {"scale": channels, "shift": channels, "q": 64, "k": 64}
    vectors = {name: array((size,), jnp.float32) for name, size in sizes.items()}
    tables = [(array((size, 64), jnp.float32),) * 2 for size in (frames, columns, rows)]
    return lambda *arrays: norm_qkv(*arrays, reach=6, eps=1e-6), (x, x, linears, vectors, tables)


def norm_swiglu_rows(rows, channels=256):
    """Return what follows it, and the arguments' shapes."""
    x, hidden = jax.ShapeDtypeStruct((rows, channels), jnp.bfloat16), 4 * channels
    sizes = {"out": (channels, channels), "gate": (hidden, channels), "up": (hidden, channels)}
    sizes["down"] = channels, hidden
    weights = {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in sizes.items()}
    vectors = dict.fromkeys(("bias", "scale", "shift"), jax.ShapeDtypeStruct((channels,), jnp.float32))
    return lambda *arrays: norm_swiglu(*arrays, eps=1e-6), (x, x, weights, vectors)
