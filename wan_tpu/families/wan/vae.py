"""Wan's VAE on strips of a picture: the arithmetic of diffusers' AutoencoderKLWan, with kernels written for it.

diffusers' module has the structure, the parameters' names and their values; the arithmetic is here. Its three
elementwise passes before and after every convolution are parts of the convolution (`causal_conv`), and resampling is
folded into convolutions at the lower resolution.

Shapes: T frames, X columns and Y rows of a device's strip, C channels, O channels out, N tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.autoencoders import autoencoder_kl_wan as wan

from wan_tpu.families.shared.causal_vae import History, channels_first
from wan_tpu.families.shared.convolutions import (
    convolve,
    downsample,
    downsampling_taps,
    pointwise,
    taps_first,
    upsample,
    upsampling_taps,
)
from wan_tpu.families.shared.vae_attention import attend, rms_norm
from wan_tpu.ops.halo import HaloCut
from wan_tpu.runtime.bridge import to_jax
from wan_tpu_kernels.vae.causal_conv import zero_outside
from wan_tpu_kernels.vae.folded_conv import suits_chip

# The number of queries in the middle block whose scores are computed at once (a column of a strip has 45 to 160): with
# the 14,400 keys of a frame of 1280x720, the float32 scores of 180 queries are 10 MB, which stay in VMEM.
QUERIES = 180


# How each weight is laid out when it is read; the first pattern that matches its whole name decides.
CHANGES: tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...] = (
    (r"decoder\..*resample\.1\.weight", upsampling_taps),
    (r"encoder\..*resample\.1\.weight", downsampling_taps),
    (r".*\.weight", taps_first),
)


# ---- The two halves.


def encoder(module: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    """Return the moments [1, X, Y, 2C] of a chunk of pixels [1 or 4, X, Y, 3]."""
    half = module.encoder
    x = _conv(half.conv_in, cut, x, history)
    for block in half.down_blocks:
        x = _DOWN[type(block)](block, cut, x, history)
    x = _conv(half.conv_out, cut, _middle(half.mid_block, cut, x, history), history, norm=half.norm_out)
    return pointwise(module.quant_conv, x)


def decoder(module: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    """Return the planes of pixels [3, 1 or 4, X, Y] of latents [1, X, Y, C]."""
    half = module.decoder
    x = zero_outside(pointwise(module.post_quant_conv, x), *cut.inside(x))
    x = _middle(half.mid_block, cut, _conv(half.conv_in, cut, x, history), history)
    if _can_fold(half, cut):
        return _decode_folded(half, cut, x, history)
    for block in half.up_blocks:
        x = _up_block(block, cut, x, history)
    return channels_first(_conv(half.conv_out, cut, x, history, norm=half.norm_out))


def _can_fold(half: Any, cut: HaloCut) -> bool:
    """Return whether the decoder's rows are folded: those of Wan 2.1's, on chips that have room for its tiles."""
    if any(isinstance(block, wan.WanResidualUpBlock) for block in half.up_blocks):
        return False
    return cut.mesh.devices.flat[0].platform != "tpu" or suits_chip()


def _middle(block: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    x = _residual_block(block.resnets[0], cut, x, history)
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual_block(resnet, cut, _attention_block(attention, cut, x, history), history)
    return x


def _down_block(block: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    out = x
    for resnet in block.resnets:
        out = _residual_block(resnet, cut, out, history)
    if block.downsampler is not None:
        out = _downsample(block.downsampler, cut, out, history)
    return out + _average(block.avg_shortcut, x)


def _up_block(block: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    """Apply a WanUpBlock or WanResidualUpBlock whose rows aren't folded."""
    out = x
    for resnet in block.resnets:
        out = _residual_block(resnet, cut, out, history)
    is_residual = isinstance(block, wan.WanResidualUpBlock)
    upsampler = block.upsampler if is_residual else (block.upsamplers or [None])[0]
    if upsampler is not None:
        out = upsample(upsampler.resample[1], cut, _double_frames(upsampler, cut, out, history))
    if is_residual and block.avg_shortcut is not None:
        out = out + _repeat(block.avg_shortcut, x, first=history.first)
    return out


def _residual_block(block: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    shortcut = x if isinstance(block.conv_shortcut, torch.nn.Identity) else pointwise(block.conv_shortcut, x)
    hidden = _conv(block.conv1, cut, x, history, norm=block.norm1, norm_after=block.norm2)
    return _conv(block.conv2, cut, hidden, history, residual=shortcut)


def _conv(
    conv: Any,
    cut: HaloCut,
    x: jax.Array,
    history: History,
    *,
    norm: Any = None,
    norm_after: Any = None,
    residual: jax.Array | None = None,
    **options: Any,
) -> Any:
    """Apply a WanCausalConv3d of 3x3x3 taps, with RMS norm and SiLU before and after it, plus a residual."""
    past = history.past(x)
    weight = to_jax(conv.weight)
    if norm is not None:
        options["norm"] = _gamma(norm)
    return convolve(
        cut,
        x,
        weight if past is not None else weight[-1:],  # Zeros before the first frame need no taps.
        to_jax(conv.bias),
        past=past,
        norm_after=None if norm_after is None else _gamma(norm_after),
        residual=residual,
        before=(1, 1),
        **options,
    )


# ---- The decoder's blocks with folded rows.


def _decode_folded(half: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    """Return the planes of pixels [3, T, X, Y] of the middle block's result.

    After every doubling, the rows that were one row of the latents lie in the lanes of one: 384, 192 and 96 channels
    fill registers and matrix units so. Every convolution normalises for the next one.
    """
    folded, fold = (x, x), 1  # Normalised for the next residual block, and not.
    convolutions = [conv for block in half.up_blocks for conv in (*block.resnets, *(block.upsamplers or ()))]
    norms = [getattr(conv, "norm1", None) for conv in convolutions[1:]]
    for conv, norm in zip(convolutions, [*norms, half.norm_out], strict=True):
        if isinstance(conv, wan.WanResample):
            doubled = _double_frames(conv, cut, folded[1], history, fold)
            weight, bias = to_jax(conv.resample[1].weight), to_jax(conv.resample[1].bias)
            options: dict[str, Any] = {"norm_after": _gamma(norm), "keeps_raw": True}
            folded = convolve(cut, doubled, weight, bias, before=(1, 1), fold=fold, doubles=True, **options)
            fold *= 2
        elif fold == 1:
            folded = (_residual_block(conv, cut, folded[1], history),) * 2
        else:
            keeps_raw = norm is not None and norm is not half.norm_out
            folded = _folded_block(conv, cut, folded, history, fold, norm_after=norm, keeps_raw=keeps_raw)
    return _pixel_planes(half.conv_out, cut, folded[0], history, fold)


def _folded_block(
    block: Any, cut: HaloCut, inputs: tuple[jax.Array, jax.Array], history: History, fold: int, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Apply a residual block.

    Args:
        block: A WanResidualBlock.
        cut: How the picture is cut.
        inputs: x [T, X, Y / fold, C fold], normalised for this block and not.
        history: The earlier frames.
        fold: Rows that are folded into one.
        **options: Of the second convolution, whose result is the block's.

    Returns:
        The result normalised for the next block, and not; twice the same if only one of these is needed.
    """
    normed, x = inputs
    if not isinstance(block.conv_shortcut, torch.nn.Identity):
        x = convolve(cut, x, to_jax(block.conv_shortcut.weight), to_jax(block.conv_shortcut.bias), fold=fold)
    hidden = _conv(block.conv1, cut, normed, history, norm_after=block.norm2, fold=fold)
    out = _conv(block.conv2, cut, hidden, history, residual=x, fold=fold, **options)
    return out if isinstance(out, tuple) else (out, out)


def _pixel_planes(conv: Any, cut: HaloCut, x: jax.Array, history: History, fold: int) -> jax.Array:
    """Return [3, T, X, Y], the last convolution of x [T, X, Y / fold, C fold].

    Three channels would take the space of 128, so all frames and folded rows of a column lie beside each other.
    """
    frames, columns, rows, _ = x.shape
    joined = _conv(conv, cut, x, history, fold=fold, joins=True)
    pixels = joined.reshape(columns, rows, frames, fold, -1)
    return pixels.transpose(4, 2, 0, 1, 3).reshape(-1, frames, columns, rows * fold)


# ---- Resampling.


def _double_frames(block: Any, cut: HaloCut, x: jax.Array, history: History, fold: int | None = None) -> jax.Array:
    """Apply the first half of a WanResample: in "upsample3d" all frames but the very first are doubled."""
    if block.mode != "upsample3d":
        return x
    past = history.past(jnp.zeros_like(x) if history.first else x)
    if past is None:
        return x
    weight, bias = to_jax(block.time_conv.weight), to_jax(block.time_conv.bias)
    if fold is None:
        both = jnp.split(convolve(cut, x, weight, bias, past=past), 2, axis=-1)
    else:  # The rows of one result would lie between those of the other.
        halves = zip(jnp.split(weight, 2, axis=-1), jnp.split(bias, 2), strict=True)
        both = [convolve(cut, x, *half, past=past, fold=fold) for half in halves]
    return jnp.stack(both, axis=1).reshape(-1, *x.shape[1:])


def _downsample(block: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    """Apply a WanResample that halves columns and rows, and in "downsample3d" all frames but the very first."""
    x = downsample(block.resample[1], cut, x)
    if block.mode == "downsample3d":
        past = history.past(x)
        if past is not None:
            conv = block.time_conv
            x = convolve(cut, x, to_jax(conv.weight), to_jax(conv.bias), past=past, stride=2)
    return x


def _average(shortcut: Any, x: jax.Array) -> jax.Array:
    """Apply an AvgDown3D: average groups of the channels of all pixels of a block together."""
    time, space = shortcut.factor_t, shortcut.factor_s
    x = jnp.pad(x, ((-x.shape[0] % time, 0), (0, 0), (0, 0), (0, 0)))
    frames, columns, rows, channels = x.shape
    blocks = x.reshape(frames // time, time, columns // space, space, rows // space, space, channels)
    groups = blocks.transpose(0, 2, 4, 6, 1, 5, 3).reshape(*blocks.shape[:6:2], shortcut.out_channels, -1)
    return groups.astype(jnp.float32).mean(-1).astype(x.dtype)


def _repeat(shortcut: Any, x: jax.Array, *, first: bool) -> jax.Array:
    """Apply a DupUp3D: repeated channels become the pixels of a block; the first chunk keeps its one frame."""
    time, space = shortcut.factor_t, shortcut.factor_s
    frames, columns, rows, _ = x.shape
    repeated = x.repeat(shortcut.repeats, axis=-1).reshape(frames, columns, rows, -1, time, space, space)
    transposed = repeated.transpose(0, 4, 1, 6, 2, 5, 3)
    out = transposed.reshape(frames * time, columns * space, rows * space, shortcut.out_channels)
    return out[time - 1 :] if first else out


# ---- Attention in the middle.


def _attention_block(block: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    """Apply a WanAttentionBlock: each pixel of x [T, X, Y, C] attends to all of its frame, on all devices."""
    query, key, value = jnp.split(pointwise(block.to_qkv, rms_norm(x, _gamma(block.norm))), 3, axis=-1)
    attended = jax.vmap(functools.partial(attend, at_once=QUERIES))(query, cut.gather(key), cut.gather(value))
    return zero_outside(x + pointwise(block.proj, attended), *cut.inside(x))


def _gamma(norm: Any) -> jax.Array:
    """Return the factors of a WanRMS_norm, [C]."""
    return to_jax(norm.gamma).reshape(-1)


_DOWN: dict[type, Callable[[Any, HaloCut, jax.Array, History], jax.Array]] = {
    wan.WanResidualBlock: _residual_block,
    wan.WanResample: _downsample,
    wan.WanAttentionBlock: _attention_block,
    wan.WanResidualDownBlock: _down_block,
}
