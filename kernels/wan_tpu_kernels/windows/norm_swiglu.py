"""What follows attention in a block, in one pass over HBM: its output's projection, norm, SwiGLU and both residuals.

The hidden units, four times the channels, never leave VMEM: with 256 channels, writing and reading them takes longer
than their products.

Shapes: L rows (tokens), C channels, F hidden units.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.flash_kernel import dot
from wan_tpu_kernels.tiles import by_rows, even_block, sublanes, vmem_bytes

ROWS, ROWS_AT_ONCE = 1024, 512  # Rows of a tile, and of one iteration of the inner loop.
HIDDEN = 512  # Hidden units that are computed at once.
SHARE = 3  # All weights may take one part in so many of VMEM.


def norm_swiglu(
    attended: jax.Array,
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    vectors: Mapping[str, jax.Array],
    *,
    eps: float,
    interpret: Any = False,
) -> jax.Array:
    """Compute y = x + attended W + b, then y + (silu(n G) * (n U)) D with n = y / rms(y) * scale + shift.

    Args:
        attended, x: [L, C].
        weights: "out" [C, C], which is W; "gate" and "up" [F, C]; "down" [C, F].
        vectors: "bias", which is b, "scale" and "shift", [C].
        eps: Added to the mean square.
        interpret: As for `pallas_call`.

    Returns:
        An array of the shape and dtype of x.
    """
    rows, channels = x.shape
    limit = vmem_bytes(interpret=bool(interpret))
    hidden, size = len(weights["gate"]), sum(weight.size for weight in weights.values())
    if size * weights["out"].dtype.itemsize > limit // SHARE or hidden % HIDDEN:
        return norm_swiglu_reference(attended, x, weights, vectors, eps=eps)
    block = even_block(rows, ROWS, ROWS_AT_ONCE if rows > ROWS else sublanes(x.dtype))
    tile = pl.BlockSpec((block, channels), lambda i: (i, 0))
    rows_of = (vectors[name][None].astype(jnp.float32) for name in ("bias", "scale", "shift"))
    small = [weights["out"], *rows_of, *(weights[name] for name in ("gate", "up", "down"))]
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(pl.cdiv(rows, block),),
        in_specs=[tile, tile, *(pl.BlockSpec(array.shape, lambda i: (0, 0)) for array in small)],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=limit),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * size,
            transcendentals=rows * hidden,
            bytes_accessed=3 * x.size * x.dtype.itemsize,
        ),
        interpret=interpret,
        name="norm_swiglu",
    )(attended, x, *small)


def norm_swiglu_reference(
    attended: jax.Array,
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    vectors: Mapping[str, jax.Array],
    *,
    eps: float,
) -> jax.Array:
    """Compute the same as `norm_swiglu` in plain jnp."""

    def project(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    y = x.astype(jnp.float32) + project(attended, weights["out"]) + vectors["bias"].astype(jnp.float32)
    normed = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + eps) * vectors["scale"] + vectors["shift"]
    normed = normed.astype(x.dtype)
    hidden = (jax.nn.silu(project(normed, weights["gate"])) * project(normed, weights["up"])).astype(x.dtype)
    return (y + project(hidden, weights["down"])).astype(x.dtype)


def _kernel(  # type: ignore[no-untyped-def]
    attended_ref, x_ref, weight_ref, bias_ref, scale_ref, shift_ref, gate_ref, up_ref, down_ref, o_ref, *, eps
) -> None:
    def rows(start: jax.Array, count: int) -> None:
        here = pl.ds(start, count)
        y = x_ref[here, :].astype(jnp.float32) + bias_ref[...]
        y = y + dot(attended_ref[here, :], weight_ref[...], contract=(1, 1))
        inverse = lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)
        normed = (y * inverse * scale_ref[...] + shift_ref[...]).astype(x_ref.dtype)
        for first in range(0, gate_ref.shape[0], HIDDEN):
            units = slice(first, first + HIDDEN)
            half = 0.5 * dot(normed, gate_ref[units, :], contract=(1, 1))
            gates = half + half * jnp.tanh(half)  # SiLU with one transcendental instruction.
            hidden = (gates * dot(normed, up_ref[units, :], contract=(1, 1))).astype(x_ref.dtype)
            y = y + dot(hidden, down_ref[:, units], contract=(1, 1))
        o_ref[here, :] = y.astype(o_ref.dtype)

    by_rows(x_ref.shape[0], ROWS_AT_ONCE, sublanes(x_ref.dtype), rows)
