"""Group norms over a picture that is cut over devices.

Shapes: T frames, X columns and Y rows of a device's strip, C channels.
"""

from typing import Any

import jax
import jax.numpy as jnp

from wan_tpu.ops.dispatch import ops_for
from wan_tpu.ops.halo import HaloCut
from wan_tpu.runtime.bridge import to_jax
from wan_tpu_kernels.vae.group_norm import merge_moments


def normalise(norm: Any, cut: HaloCut, x: jax.Array, around: jax.Array | None = None) -> jax.Array:
    """Apply a GroupNorm to x [T, X, Y, C], and then SiLU; `around` is as for the kernel `norm_silu`."""
    ops, (columns, rows) = ops_for(cut.mesh.devices.flat[0].platform), cut.inside(x)
    return ops.norm_silu(x, *fold_norm(norm, cut, x), around, columns=columns, rows=rows)


def fold_norm(norm: Any, cut: HaloCut, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return scale and shift of each channel, [C], by which a GroupNorm normalises x [T, X, Y, C] of all devices."""
    ops, (columns, rows) = ops_for(cut.mesh.devices.flat[0].platform), cut.inside(x)
    moments, groups = ops.channel_moments(x, columns=columns, rows=rows), norm.num_groups
    if cut.mesh.size > 1:
        moments = merge_moments(*jax.lax.all_gather(moments, cut.mesh.axis_names))
    count, *of_channels = moments
    mean, squares = (moment.reshape(groups, -1).T for moment in of_channels)
    total, mean, squares = merge_moments(jnp.broadcast_to(count, mean.shape), mean, squares)
    size = len(of_channels[0]) // groups
    scale = jax.lax.rsqrt((squares / total).repeat(size) + norm.eps) * to_jax(norm.weight)
    return scale, to_jax(norm.bias) - mean.repeat(size) * scale
