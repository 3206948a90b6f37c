"""LTX-2's video VAE on strips of a picture: the arithmetic of diffusers' AutoencoderKLLTX2Video.

The encoder is causal in time, so pixels stream through it in chunks. The decoder isn't: the last latent frame moves the
first pixels, so all frames of a video are one chunk. Both are residual blocks of 3x3x3 convolutions, whose norms divide
each pixel by the root mean square of its channels. Between levels, channels become pixels and frames, or the reverse.
diffusers' module has the structure, the parameters' names and their values.

Shapes: T frames, X columns and Y rows of a device's strip, C channels, O channels out, st sy sx what an enlargement
multiplies frames, rows and columns by.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKLLTX2Video
from jax.sharding import Mesh

from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.shared.causal_vae import CausalChunks, History, RepeatedStart
from wan_tpu.families.shared.convolutions import Changes, convolve, patchify, taps_first, vae_component
from wan_tpu.families.shared.flop_count import count
from wan_tpu.ops.halo import HaloCut
from wan_tpu.runtime.bridge import Params, to_jax
from wan_tpu.runtime.components import Component
from wan_tpu_kernels.vae.causal_conv import Padding, zero_outside

EPSILON = 1e-8  # What every norm adds to the mean square.
HALVES = ("encoder", "decoder")
STATISTICS = ("latents_mean", "latents_std")  # What latents of the transformer are scaled and moved by, per channel.
FRAME_STRIDE = 8  # Pixel frames of a latent frame, except the first.

Strides = tuple[int, int, int]

_STRIDES: dict[str, Strides] = {"spatial": (1, 2, 2), "temporal": (2, 1, 1), "spatiotemporal": (2, 2, 2)}
_PADDINGS: dict[str, Padding] = {"zeros": "zeros", "replicate": "edge", "reflect": "reflect"}
# The only values of these keys that the published models have, and that are supported.
_FIXED: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "encoder_causal": True,
    "decoder_causal": False,
    "timestep_conditioning": False,
    "patch_size_t": 1,
}


# ---- Components.


def vae_half(config: Ltx2Config, dropped: str) -> Component:
    """Return the VAE without the half named in `dropped`.

    Raises:
        CheckpointError: The configuration has a value that no published model has.
    """
    _check(config.vae)
    half = vae_component(functools.partial(_build, config), _changes(config.vae), (dropped,))
    return dataclasses.replace(half, float32=STATISTICS)


def statistics(config: Ltx2Config) -> Component:
    """Return the parts of the VAE that belong to neither half: `latents_mean` and `latents_std`, float32 [C]."""
    return dataclasses.replace(vae_component(functools.partial(_build, config), (), HALVES), float32=STATISTICS)


def _build(config: Ltx2Config) -> torch.nn.Module:
    module = AutoencoderKLLTX2Video.from_config(config.vae)
    if any(block.conv_in is not None for block in module.decoder.up_blocks):
        raise CheckpointError(
            f"vae/config.json has decoder_block_out_channels {config.vae['decoder_block_out_channels']} and "
            f"upsample_factor {config.vae['upsample_factor']}, so that a block changes the number of channels "
            "before it enlarges; supported: blocks that keep it, as in all published models"
        )
    return module


def _check(vae: Mapping[str, Any]) -> None:
    for key, value in _FIXED.items():
        if vae[key] != value:
            raise CheckpointError(f"vae/config.json has {key} = {vae[key]}; supported: {value}, as published")
    if np.any(vae["decoder_inject_noise"]):
        raise CheckpointError("vae/config.json has decoder_inject_noise; supported: false everywhere, as published")
    for key in ("spatio_temporal_scaling", "decoder_spatio_temporal_scaling"):
        if not np.all(vae[key]):
            raise CheckpointError(f"vae/config.json has {key} {vae[key]}; supported: true everywhere, as published")
    for key in ("downsample_type", "upsample_type"):
        if unknown := set(vae[key]) - set(_STRIDES):
            raise CheckpointError(f"vae/config.json has {key} {', '.join(unknown)}; supported: {', '.join(_STRIDES)}")
    for half in HALVES:
        mode = vae[f"{half}_spatial_padding_mode"]
        if mode not in _PADDINGS:
            known = ", ".join(_PADDINGS)
            raise CheckpointError(f"vae/config.json has {half}_spatial_padding_mode {mode}; supported: {known}")


def _changes(vae: Mapping[str, Any]) -> Changes:
    """Return how each weight is laid out when it is read; the first pattern that matches its whole name decides."""
    changes: Changes = ()
    for index, kind in enumerate(vae["upsample_type"]):
        name = rf"decoder\.up_blocks\.{index}\.upsamplers\.0\.conv\.conv"
        changes += spreading_changes(name, _STRIDES[kind])
    return (*changes, (r".*\.weight", taps_first))


# ---- The two halves as chunks.


def encoder_chunks(config: Ltx2Config, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
    """Return the functions that encode pixels [1, 3, T, H, W] as normalised moments [1, 2C, T, H, W].

    A first chunk has one frame, all later ones have eight.
    """
    patch = config.vae["patch_size"]
    return CausalChunks(
        module,
        mesh,
        encoder,
        before=lambda pixels: patchify(pixels, patch),
        after=lambda moments: moments,
        scale=math.prod(_STRIDES[kind][2] for kind in config.vae["downsample_type"]),
        later_frames=FRAME_STRIDE,
        history=RepeatedStart,
    )


def encode_frames(chunks: CausalChunks, params: Params, pixels: jax.Array) -> jax.Array:
    """Return the moments of whole frames, of 8n + 1 of which the first begins the video; float32."""
    pixels = pixels.astype(params["encoder.conv_in.conv.weight"].dtype)
    moments, cache = chunks.run_first(params, pixels[:, :, :1])
    parts = [moments]
    for start in range(1, pixels.shape[2], FRAME_STRIDE):
        moments, cache = chunks.run_next(params, pixels[:, :, start : start + FRAME_STRIDE], cache)
        parts.append(moments)
    return jnp.concatenate(parts, axis=2).astype(jnp.float32)


def decoder_chunks(config: Ltx2Config, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
    """Return the function that decodes all latents [1, C, T, H, W] to pixels [1, 3, 8T - 7, 32H, 32W] around [-1, 1].

    The latents are normalised and in float32, as the transformer leaves them.
    """
    same = lambda x: x  # noqa: E731
    planes = functools.partial(join_patches, size=config.vae["patch_size"])
    return CausalChunks(module, mesh, decoder, same, same, scale=1, later_frames=0, planes=planes)


def count_encoding(config: Ltx2Config, shape: tuple[int, ...]) -> int:
    """Count the operations of encoding pixels [1, 3, T, H, W]."""
    pixels = torch.empty(shape, device="meta")
    return count(functools.partial(_build, config), lambda module: module.encode(pixels))


def count_decoding(config: Ltx2Config, shape: tuple[int, ...]) -> int:
    """Count the operations of decoding latents [1, C, T, H, W]."""
    latents = torch.empty(shape, device="meta")
    return count(functools.partial(_build, config), lambda module: module.decode(latents))


# ---- The arithmetic of a chunk.


def encoder(module: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    """Return the moments [T, X, Y, 2C] of a chunk of pixels, float32; the mean is normalised as latents are."""
    half = module.encoder
    x = _conv(half.conv_in, cut, cut.hold_rows(x), history)
    for block in half.down_blocks:
        for resnet in block.resnets:
            x = _residual_block(resnet, cut, x, history)
        x = _downsample(block.downsamplers[0], cut, x, history)
    for resnet in half.mid_block.resnets:
        x = _residual_block(resnet, cut, x, history)
    moments = _conv(half.conv_out, cut, x, history, norm=True).astype(jnp.float32)
    mean, deviation = _statistics(module)
    normalised = (moments[..., :-1] - mean) / deviation
    # All channels share one logarithm of the variance.
    return jnp.concatenate([normalised, moments[..., -1:].repeat(normalised.shape[-1], axis=-1)], axis=-1)


def decoder(module: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    """Return the pixels [8T - 7, X, Y, 48] of normalised latents [T, X, Y, C], 4 x 4 pixels as channels."""
    half = module.decoder
    mean, deviation = _statistics(module)
    dtype = to_jax(half.conv_in.conv.weight).dtype
    x = cut.hold_rows((x.astype(jnp.float32) * deviation + mean).astype(dtype))
    x = _conv(half.conv_in, cut, zero_outside(x, *cut.inside(x)))
    for resnet in half.mid_block.resnets:
        x = _residual_block(resnet, cut, x)
    for block in half.up_blocks:
        x = _upsample(block.upsamplers[0], cut, x)
        for resnet in block.resnets:
            x = _residual_block(resnet, cut, x)
    return _conv(half.conv_out, cut, x, norm=True)


def _statistics(module: Any) -> tuple[jax.Array, jax.Array]:
    """Return the factor and the offset that are applied to latents for the decoder, float32 [C]."""
    mean, deviation = to_jax(module.latents_mean), to_jax(module.latents_std)
    return mean, deviation / module.config.scaling_factor


def _residual_block(block: Any, cut: HaloCut, x: jax.Array, history: History | None = None) -> jax.Array:
    hidden = _conv(block.conv1, cut, x, history, norm=True, norm_after=True)
    return _conv(block.conv2, cut, hidden, history, residual=x)


def _conv(
    conv: Any,
    cut: HaloCut,
    x: jax.Array,
    history: History | None = None,
    *,
    norm: bool = False,
    norm_after: bool = False,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Apply an LTX2VideoCausalConv3d of 3x3x3 taps, with norm and SiLU before and after it, plus a residual.

    Without a history, windows reach as far forwards as backwards.
    """
    weight, padding = to_jax(conv.conv.weight), _PADDINGS[conv.conv.padding_mode]
    x = cut.extend(x, padding)
    return convolve(
        cut,
        x,
        weight,
        to_jax(conv.conv.bias),
        past=None if history is None else history.past(x),
        norm=jnp.ones(weight.shape[-2]) if norm else None,
        norm_after=jnp.ones(weight.shape[-1]) if norm_after else None,
        norm_eps=EPSILON,
        residual=residual,
        before=(1, 1),
        padding=padding,
        centred=history is None,
    )


# ---- Resampling: channels become pixels and frames, and pixels and frames channels.


def spreading_changes(name: str, strides: Strides) -> Changes:
    """Return the changes that order a convolution's outputs as `spread` takes them, by the pattern of its name."""

    def weight(values: np.ndarray) -> np.ndarray:
        return taps_first(order_outputs(values, strides))

    return (rf"{name}\.weight", weight), (rf"{name}\.bias", functools.partial(order_outputs, strides=strides))


def order_outputs(values: np.ndarray, strides: Strides) -> np.ndarray:
    """Reorder the first axis from [C, st, sy, sx] to [st, sx, sy, C]."""
    time, rows, columns = strides
    split = values.reshape(-1, time, rows, columns, *values.shape[1:])
    return split.transpose(1, 3, 2, 0, *range(4, split.ndim)).reshape(values.shape)


def spread(cut: HaloCut, x: jax.Array, strides: Strides) -> jax.Array:
    """Turn [T, X, Y, st sx sy C] into [st T, sx X, sy Y, C]: channels are frames, columns, rows, then channels."""
    time, down, across = strides
    frames, columns, rows, _ = x.shape
    blocks = x.reshape(frames, columns, rows, time, across, down, -1).transpose(0, 3, 1, 4, 2, 5, 6)
    return cut.hold_rows(blocks.reshape(frames * time, columns * across, rows * down, -1))


def _upsample(block: Any, cut: HaloCut, x: jax.Array) -> jax.Array:
    """Apply an LTX2VideoUpsampler3d, which drops the first of the frames that it doubles."""
    residual = None
    if block.residual:
        # Channels that become pixels, and are then repeated: a product with ones and zeros, which is exact, moves them.
        pixels, channels = math.prod(block.stride), x.shape[-1] // block.upscale_factor
        sources = np.arange(channels) % (x.shape[-1] // pixels) * pixels + np.arange(pixels)[:, None]
        pixel_order = order_outputs(np.arange(pixels), block.stride)
        residual = _select(x, sources[pixel_order].reshape(-1))
    out = _conv(block.conv, cut, x, residual=residual)
    return spread(cut, out, block.stride)[block.stride[0] - 1 :]


def _downsample(block: Any, cut: HaloCut, x: jax.Array, history: History) -> jax.Array:
    """Apply an LTX2VideoDownsampler3d, which doubles the first frame of a video if it halves frames."""
    if history.first and block.stride[0] == 2:
        x = jnp.concatenate([x[:1], x])
    packed, pixels = _pack(x, block.stride), math.prod(block.stride)
    out = _pack(_conv(block.conv, cut, x, history), block.stride)
    order = order_outputs(np.arange(out.shape[-1]), block.stride)  # By position in `out`, its place in the result.
    result = _select(out, np.argsort(order), wide=True)
    order = order_outputs(np.arange(pixels * x.shape[-1]), block.stride)
    groups = jnp.asarray(order // block.group_size)[:, None] == jnp.arange(out.shape[-1])
    result = result + _product(packed, groups) / block.group_size
    return cut.hold_rows(result.astype(x.dtype))


def _pack(x: jax.Array, strides: Strides) -> jax.Array:
    """Undo `spread`."""
    time, down, across = strides
    frames, columns, rows, channels = x.shape
    blocks = x.reshape(frames // time, time, columns // across, across, rows // down, down, channels)
    return blocks.transpose(0, 2, 4, 1, 3, 5, 6).reshape(frames // time, columns // across, rows // down, -1)


def _select(x: jax.Array, sources: np.ndarray, *, wide: bool = False) -> jax.Array:
    """Return the channels `sources` of x, in this order; in float32 if `wide`."""
    columns = _product(x, jnp.arange(x.shape[-1])[:, None] == jnp.asarray(sources))
    return columns if wide else columns.astype(x.dtype)


def _product(x: jax.Array, ones: jax.Array) -> jax.Array:
    """Multiply x [T, X, Y, C] by ones and zeros [C, O], exactly; float32 [T, X, Y, O]."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("txyc,co->txyo", x, ones.astype(x.dtype), precision=exact, preferred_element_type=jnp.float32)


def join_patches(x: jax.Array, size: int) -> jax.Array:
    """Turn channels of x [T, X, Y, C size size] into pixels: planes [C, T, size X, size Y].

    Rows are interleaved in lanes, for which a product with ones and zeros is the fast way.
    """
    frames, columns, rows, channels = x.shape
    planes = x.transpose(3, 0, 1, 2).reshape(channels // size**2, size, size, frames, columns, rows)
    ones, exact = _interleave(rows, size, x.dtype)
    joined = jnp.einsum("cpqtxy,qyh->ctxph", planes, ones, precision=exact)
    return joined.reshape(-1, frames, columns * size, rows * size)


def split_patches(planes: jax.Array, size: int) -> jax.Array:
    """Undo `join_patches`."""
    channels, frames, columns, rows = planes.shape
    lines = planes.reshape(channels, frames, columns // size, size, rows)
    ones, exact = _interleave(rows // size, size, planes.dtype)
    split = jnp.einsum("ctxph,qyh->txycpq", lines, ones, precision=exact)
    return split.reshape(*split.shape[:3], -1)


def _interleave(rows: int, size: int, dtype: Any) -> tuple[jax.Array, jax.lax.Precision | None]:
    """Return ones and zeros [size, rows, rows size] that interleave rows, and the precision at which that is exact."""
    row, part, target = (jnp.arange(n) for n in (rows, size, rows * size))
    ones = (row[None, :, None] * size + part[:, None, None] == target).astype(dtype)
    return ones, jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
