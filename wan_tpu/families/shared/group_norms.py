"""Statistics of group norms over a picture that is cut over devices."""

import jax
import jax.numpy as jnp

from wan_tpu.ops.halo import HaloCut
from wan_tpu_kernels.vae.group_norm import Moments, merge_moments


def group_moments(cut: HaloCut, moments: Moments, groups: int) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance of each channel's group over all devices, [C], from this device's channel moments."""
    if cut.mesh.size > 1:
        moments = merge_moments(*jax.lax.all_gather(moments, cut.mesh.axis_names))
    count, *of_channels = moments
    mean, squares = (moment.reshape(groups, -1).T for moment in of_channels)
    total, mean, squares = merge_moments(jnp.broadcast_to(count, mean.shape), mean, squares)
    size = len(of_channels[0]) // groups
    return mean.repeat(size), (squares / total).repeat(size)
