"""The encoder of MiniMax-H3's VAE for clips of frames: a tile's pixels to moments, float32, as in diffusers.

Convolutions see two frames before the first one as zeros; norms take their statistics over a frame. Single frames have
an encoder of their own, `encoder`, which leaves out two of three taps in time.

Shapes: T frames, h w a tile's height and width in the latents, C channels.
"""

from typing import Any

import jax
import jax.numpy as jnp

from wan_tpu.families.shared.layers import in_float32
from wan_tpu.runtime.bridge import Params, call, to_jax, to_torch

_LAYOUT = ("NCDHW", "OIDHW", "NCDHW")


def encode_tile(module: Any, params: Params, pixels: jax.Array) -> jax.Array:
    """Return the moments [2C, T, h, w] of a tile's normalised pixels [3, T, 16h, 16w].

    Args:
        module: The VAE without its decoder.
        params: Its weights.
        pixels: The tile.
    """
    with in_float32():
        moments: jax.Array = call(module, params, lambda module: to_torch(_encode(module, pixels[None])))
    return moments[0]


def _encode(module: Any, x: jax.Array) -> jax.Array:
    half = module.encoder
    x = _convolve(half.conv_in, _mirror(x, 1, 1))
    for block in half.down_blocks:
        for resnet in block.resnets:
            hidden = _convolve(resnet.conv1, _mirror(_normalise(resnet.norm1, x), 1, 1))
            hidden = _convolve(resnet.conv2, _mirror(_normalise(resnet.norm2, hidden), 1, 1))
            shortcut = x if resnet.conv_shortcut is None else _convolve(resnet.conv_shortcut, x)
            x = shortcut + hidden
        for downsampler in block.downsamplers or ():
            x = _convolve(downsampler.conv, _mirror(x, 0, 1) if downsampler.spatial_stride == 2 else x)
    x = _convolve(half.conv_out, _mirror(_normalise(half.norm_out, x), 1, 1))
    return _convolve(module.quant_conv, x)


def _mirror(x: jax.Array, before: int, after: int) -> jax.Array:
    """Extend height and width by mirrored pixels."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (before, after), (before, after)), mode="reflect")


def _convolve(conv: Any, x: jax.Array) -> jax.Array:
    """Apply a convolution to frames whose edges are already extended, behind zeros for the frames before them."""
    weight, bias = to_jax(conv.weight), to_jax(conv.bias)
    padding = [(weight.shape[2] - 1, 0), (0, 0), (0, 0)]
    output = jax.lax.conv_general_dilated(x, weight, conv.stride, padding, dimension_numbers=_LAYOUT)
    return output + bias[:, None, None, None]


def _normalise(norm: Any, x: jax.Array) -> jax.Array:
    """Apply a GroupNorm to each frame of x [1, C, T, H, W], and then SiLU."""
    grouped = x.reshape(norm.num_groups, -1, *x.shape[2:])
    mean = grouped.mean((1, 3, 4), keepdims=True)
    variance = jnp.square(grouped - mean).mean((1, 3, 4), keepdims=True)
    normed = ((grouped - mean) * jax.lax.rsqrt(variance + norm.eps)).reshape(x.shape)
    weight, bias = (to_jax(value)[:, None, None, None] for value in (norm.weight, norm.bias))
    return jax.nn.silu(normed * weight + bias)
