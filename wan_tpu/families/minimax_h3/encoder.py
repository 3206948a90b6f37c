"""The encoder of MiniMax-H3's VAE for single frames: a tile's pixels to moments, float32, as in diffusers.

Its convolutions see the frames before as zeros, so that of their three taps in time only the last one counts for a
single frame; the others aren't even read. Edges are mirrored, and norms take their statistics over a tile.

Shapes: X columns and Y rows of a tile, h w a tile's height and width in the latents, C channels of those.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from wan_tpu.families.shared.convolutions import (
    Changes,
    convolve,
    downsample,
    downsampling_taps,
    pointwise,
    taps_first,
)
from wan_tpu.families.shared.group_norms import normalise
from wan_tpu.families.shared.layers import in_float32
from wan_tpu.ops.halo import HaloCut, cut_picture
from wan_tpu.runtime.bridge import Params, call, to_jax, to_torch

_ENLARGED = 16  # Pixels per pixel of the latents.


def _last_tap(weight: np.ndarray) -> np.ndarray:
    return taps_first(weight[:, :, -1:])


def _downsampling(weight: np.ndarray) -> np.ndarray:
    return downsampling_taps(weight[:, :, -1])


# How each weight is laid out when it is read; the first pattern that matches its whole name decides.
CHANGES: Changes = (
    (r"encoder\..*downsamplers\.0\.conv\.weight", _downsampling),
    (r".*conv[^.]*\.weight", _last_tap),
)


def encode_tile(module: Any, params: Params, mesh: Mesh, pixels: jax.Array) -> jax.Array:
    """Return the moments [2C, 1, h, w] of a tile's normalised pixels [3, 1, 16h, 16w].

    Args:
        module: The VAE without its decoder.
        params: Its weights.
        mesh: The devices; each calls this with its own tiles.
        pixels: The tile.
    """
    # A tile is a whole picture on one device.
    alone = Mesh(mesh.devices.reshape(-1)[:1], ("tile",))
    height, width = (size // _ENLARGED for size in pixels.shape[2:])
    cut = cut_picture(alone, height, width)
    picture = cut.pad(pixels.transpose(1, 3, 2, 0))
    with in_float32():
        moments: jax.Array = call(module, params, lambda module: to_torch(_encode(module, cut, picture)))
    return moments[:, :width, :height].transpose(3, 0, 2, 1)


def _encode(module: Any, cut: HaloCut, x: jax.Array) -> jax.Array:
    """Return the moments [1, X/16, Y/16, 2C] of a tile's pixels [1, X, Y, 3]."""
    half = module.encoder
    x = _conv(half.conv_in, cut, x)
    for block in half.down_blocks:
        for resnet in block.resnets:
            x = _residual_block(resnet, cut, x)
        for downsampler in block.downsamplers or ():
            # The last square is repeated beyond the edge: of its pixels only those count that mirror the picture's.
            x = downsample(downsampler.conv, cut, x, "edge")
    x = _conv(half.conv_out, cut, normalise(half.norm_out, cut, x))
    return pointwise(module.quant_conv, x)


def _residual_block(block: Any, cut: HaloCut, x: jax.Array) -> jax.Array:
    hidden = _conv(block.conv1, cut, normalise(block.norm1, cut, x))
    shortcut = x if block.conv_shortcut is None else pointwise(block.conv_shortcut, x)
    return _conv(block.conv2, cut, normalise(block.norm2, cut, hidden), residual=shortcut)


def _conv(conv: Any, cut: HaloCut, x: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
    """Apply a convolution of 3x3 taps with mirrored edges, plus a residual."""
    x = cut.extend(x, "reflect")
    weight, bias = to_jax(conv.weight), to_jax(conv.bias)
    return convolve(cut, x, weight, bias, residual=residual, before=(1, 1), padding="reflect")
