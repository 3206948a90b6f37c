"""CogVideoX's VAE on strips of a picture: the arithmetic of diffusers' AutoencoderKLCogVideoX.

Its group norms take their statistics over a chunk of frames and the whole picture, so the chunks are part of the
function: a decoder's first chunk has three latent frames (two if their number is even), all others have two. On several
devices the sums are taken over all strips. diffusers' module has the structure, the parameters' names and their values.

Shapes: T frames, X columns and Y rows of a device's strip, C channels, O channels out, G groups.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.families.shared.causal_vae import RepeatedStart
from wan_tpu.families.shared.convolutions import (
    convolve,
    downsample,
    downsampling_taps,
    pointwise,
    taps_first,
    upsample,
    upsampling_taps,
)
from wan_tpu.families.shared.group_norms import normalise
from wan_tpu.ops.halo import HaloCut
from wan_tpu.runtime.bridge import to_jax

# How each weight is laid out when it is read; the first pattern that matches its whole name decides.
CHANGES: tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...] = (
    (r"decoder\..*upsamplers\.0\.conv\.weight", upsampling_taps),
    (r"encoder\..*downsamplers\.0\.conv\.weight", downsampling_taps),
    (r".*conv[^.]*(\.conv)?\.weight", taps_first),
)


def encoder(module: Any, cut: HaloCut, x: jax.Array, history: RepeatedStart) -> jax.Array:
    """Return the moments [T/4, X, Y, 2C] of a chunk of pixels [T, X, Y, 3]."""
    half = module.encoder
    x = _conv(half.conv_in, cut, x, history)
    for block in half.down_blocks:
        for resnet in block.resnets:
            x = _residual_block(resnet, cut, x, history)
        if block.downsamplers is not None:
            x = _downsample(block.downsamplers[0], cut, x)
    for resnet in half.mid_block.resnets:
        x = _residual_block(resnet, cut, x, history)
    return _conv(half.conv_out, cut, _normalise(half.norm_out, cut, x), history)


def decoder(module: Any, cut: HaloCut, latents: jax.Array, history: RepeatedStart) -> jax.Array:
    """Return the pixels [4T or 4T-3, X, Y, 3] of latents [T, X, Y, C], which norms read as well."""
    half = module.decoder
    x = _conv(half.conv_in, cut, latents, history)
    for resnet in half.mid_block.resnets:
        x = _residual_block(resnet, cut, x, history, latents)
    for block in half.up_blocks:
        for resnet in block.resnets:
            x = _residual_block(resnet, cut, x, history, latents)
        if block.upsamplers is not None:
            x = _upsample(block.upsamplers[0], cut, x)
    return _conv(half.conv_out, cut, _normalise(half.norm_out, cut, x, latents), history)


def _residual_block(
    block: Any, cut: HaloCut, x: jax.Array, history: RepeatedStart, latents: jax.Array | None = None
) -> jax.Array:
    hidden = _conv(block.conv1, cut, _normalise(block.norm1, cut, x, latents), history)
    shortcut = x if block.in_channels == block.out_channels else pointwise(block.conv_shortcut, x)
    return _conv(block.conv2, cut, _normalise(block.norm2, cut, hidden, latents), history, residual=shortcut)


def _conv(
    conv: Any, cut: HaloCut, x: jax.Array, history: RepeatedStart, *, residual: jax.Array | None = None
) -> jax.Array:
    """Apply a CogVideoXCausalConv3d of 3x3x3 taps, plus a residual; x is zero beyond the picture."""
    weight, bias = to_jax(conv.conv.weight), to_jax(conv.conv.bias)
    return convolve(cut, x, weight, bias, past=history.past(x), residual=residual, before=(1, 1))


# ---- Norms over a chunk and the whole picture.


def _normalise(norm: Any, cut: HaloCut, x: jax.Array, latents: jax.Array | None = None) -> jax.Array:
    """Apply a GroupNorm, or with latents a CogVideoXSpatialNorm3D, to x [T, X, Y, C], and then SiLU.

    The latter computes scale and shift of every pixel from the latents at its position. Its convolutions have one tap,
    so they are applied before the latents are enlarged, not after.
    """
    if latents is None:
        return normalise(norm, cut, x)
    around = jnp.concatenate([pointwise(conv.conv, latents) for conv in (norm.conv_y, norm.conv_b)], axis=-1)
    return normalise(norm.norm_layer, cut, x, around)


# ---- Resampling.


def _upsample(block: Any, cut: HaloCut, x: jax.Array) -> jax.Array:
    """Apply a CogVideoXUpsample3D: double columns and rows, and in some blocks all frames but an odd first one."""
    x = upsample(block.conv, cut, x)
    if not block.compress_time or x.shape[0] == 1:
        return x
    if x.shape[0] % 2:
        return jnp.concatenate([x[:1], x[1:].repeat(2, axis=0)])
    return x.repeat(2, axis=0)


def _downsample(block: Any, cut: HaloCut, x: jax.Array) -> jax.Array:
    """Apply a CogVideoXDownsample3D: halve columns and rows, and in some blocks average each two frames."""
    if block.compress_time and x.shape[0] > 1:
        odd = x.shape[0] % 2
        pairs = x[odd:].reshape(-1, 2, *x.shape[1:]).astype(jnp.float32).mean(1).astype(x.dtype)
        x = jnp.concatenate([x[:odd], pairs])
    return downsample(block.conv, cut, x)
