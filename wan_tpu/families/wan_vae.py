"""Pieces of diffusers' AutoencoderKLWan that are replaced for XLA, and for pictures cut into patches.

Parameter names stay the checkpoint's. What isn't replaced works on each pixel, or each square of pixels that lies in
one patch, by itself: norms, activations, shortcuts.

Shapes: N patches, T frames, H W height and width of a patch, C channels.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from diffusers.models.autoencoders import autoencoder_kl_wan as wan
from jax.experimental.layout import Layout, with_layout_constraint

from wan_tpu.bridge import to_jax, to_torch
from wan_tpu.families.wan_scan import scan_residual_blocks
from wan_tpu.halo import Patches

# Rows of queries (a device's part of a picture is 20 to 160 pixels wide) whose scores are formed at once in the
# middle block: with the 14,400 keys of a frame of 720x1280, 160 queries' float32 scores are 9 MB, which stay in VMEM.
QUERY_ROWS = 8


def adapt_vae(module: torch.nn.Module, cut: Patches) -> None:
    """Replace convolutions, resampling and attention of an AutoencoderKLWan that runs on patches; scan equal blocks."""
    scan_residual_blocks(module)
    convolve = _convolve_by_taps if cut.mesh.devices.flat[0].platform == "cpu" else _convolve
    for child in module.modules():
        if type(child) is wan.WanCausalConv3d:
            child.forward = functools.partial(_causal_conv3d, child, cut, convolve)
        elif type(child) is wan.WanResample:
            child.forward = functools.partial(_resample, child, cut, convolve)
        elif type(child) is wan.WanAttentionBlock:
            child.forward = functools.partial(_attention_block, child, cut)


Pads = tuple[int, int]
Convolve = Callable[[jax.Array, jax.Array, tuple[int, ...], tuple[Pads, ...]], jax.Array]


def _causal_conv3d(
    conv: Any, cut: Patches, convolve: Convolve, x: torch.Tensor, cache_x: torch.Tensor | None = None
) -> torch.Tensor:
    """WanCausalConv3d.forward: x [N, C, T, H, W], preceded in time by `cache_x` or by zeros."""
    left, right, top, bottom, past, _ = conv._padding
    array, weight, bias = to_jax((x, conv.weight, conv.bias))
    if cache_x is not None and past > 0:
        cache = to_jax(cache_x)
        array, past = jnp.concatenate([cache, array], axis=2), past - cache.shape[2]
    array = cut.widen(array, (top, bottom), (left, right))
    return to_torch(convolve(array, weight, conv.stride, ((past, 0), (0, 0), (0, 0))) + bias[:, None, None, None])


def _resample(
    block: Any,
    cut: Patches,
    convolve: Convolve,
    x: torch.Tensor,
    feat_cache: list[Any],
    feat_idx: list[int],
) -> torch.Tensor:
    """WanResample.forward with a cache: twice or half the height and width, and of the frames in the "3d" modes.

    x stays [N, C, T, H, W]: the module's own reshape to [N T, C, H, W] would move every element on TPU.
    """
    resize, conv = block.resample
    weight, bias = to_jax((conv.weight[:, :, None], conv.bias[:, None, None, None]))
    if block.mode == "upsample3d":
        x = _twice_the_frames(block, x, feat_cache, feat_idx)
    array = to_jax(x)
    if isinstance(resize, wan.WanUpsample):
        rows, columns = ((n, n) for n in conv.padding)
        array = array.repeat(2, axis=-2).repeat(2, axis=-1)  # nearest
    else:
        left, right, *rows = resize.padding
        columns = (left, right)
    array = cut.widen(array, tuple(rows), columns)
    x = to_torch(convolve(array, weight, (1, *conv.stride), ((0, 0),) * 3) + bias)
    return _half_the_frames(block, x, feat_cache, feat_idx) if block.mode == "downsample3d" else x


def _twice_the_frames(block: Any, x: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]) -> torch.Tensor:
    """The part of "upsample3d" in time; the very first frame stays one."""
    index = feat_idx[0]
    feat_idx[0] += 1
    past = feat_cache[index]
    if past is None:
        feat_cache[index] = "Rep"
        return x
    if isinstance(past, str):
        past = torch.zeros_like(x[:, :, :1]).repeat(1, 1, wan.CACHE_T, 1, 1)
    feat_cache[index] = torch.cat([past, x], dim=2)[:, :, -wan.CACHE_T :]
    even, odd = block.time_conv(x, past).chunk(2, dim=1)
    return torch.stack((even, odd), dim=3).flatten(2, 3)


def _half_the_frames(block: Any, x: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]) -> torch.Tensor:
    """The part of "downsample3d" in time; the very first frame stays one."""
    index = feat_idx[0]
    feat_idx[0] += 1
    past = feat_cache[index]
    feat_cache[index] = x[:, :, -1:]
    return x if past is None else block.time_conv(torch.cat([past[:, :, -1:], x], dim=2))


def _convolve(x: jax.Array, weight: jax.Array, stride: tuple[int, ...], padding: tuple[Pads, ...]) -> jax.Array:
    """XLA's own 3D convolution; x [N, C, T, H, W], weight [C', C, t, h, w].

    The weight is laid out [t, h, w, C, C'], which XLA doesn't do by itself: compiled alone, 0.76 M cycles by its own
    estimate against 1.30 M for 96 channels, 3x3x3, four frames of 128 patches of 24x40 on v6e.
    """
    kernel = with_layout_constraint(weight.transpose(2, 3, 4, 1, 0), Layout(tuple(range(5))))
    return jax.lax.conv_general_dilated(x, kernel, stride, padding, dimension_numbers=("NCDHW", "DHWIO", "NCDHW"))


def _convolve_by_taps(x: jax.Array, weight: jax.Array, stride: tuple[int, ...], padding: tuple[Pads, ...]) -> jax.Array:
    """The same as a 2D convolution whose input channels are the taps in time, which XLA runs 2 to 4 x faster on CPU.

    Measured at 32 channels, 4 frames of 320x320: 186 GFLOP/s against 45; torch 160.
    """
    taps, height, width = weight.shape[2:]
    x = jnp.pad(x, ((0, 0), (0, 0), padding[0], (0, 0), (0, 0)))
    frames = (x.shape[2] - taps) // stride[0] + 1
    x = x.transpose(0, 2, 3, 4, 1)  # [B, T, H, W, C]
    past = [x[:, tap : tap + (frames - 1) * stride[0] + 1 : stride[0]] for tap in range(taps)]
    stacked = jnp.concatenate(past, axis=-1) if taps > 1 else past[0]
    batch, _, rows, columns, _ = stacked.shape
    kernel = weight.transpose(3, 4, 2, 1, 0).reshape(height, width, -1, weight.shape[0])
    if height == width == 1:
        out = stacked @ kernel[0, 0]
    else:
        out = jax.lax.conv_general_dilated(
            stacked.reshape(batch * frames, rows, columns, -1),
            kernel,
            stride[1:],
            padding[1:],
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        out = out.reshape(batch, frames, *out.shape[1:])
    return out.transpose(0, 4, 1, 2, 3)


def _attention_block(block: Any, cut: Patches, x: torch.Tensor) -> torch.Tensor:
    """WanAttentionBlock.forward: each pixel of x [N, C, T, H, W] attends to all of its frame, on all devices."""
    weight, bias = to_jax((block.to_qkv.weight, block.to_qkv.bias))
    normed = torch.stack([block.norm(frame) for frame in x.unbind(2)], dim=2)
    projected = jnp.einsum("ncthw,oc->nothw", to_jax(normed), weight[:, :, 0, 0]) + bias[:, None, None, None]
    query, key, value = jnp.split(projected, 3, axis=1)
    mixed = jax.vmap(_attend, in_axes=1, out_axes=1)(cut.join(query)[0], cut.gather(key)[0], cut.gather(value)[0])
    weight, bias = to_jax((block.proj.weight, block.proj.bias))
    out = jnp.einsum("ncthw,oc->nothw", cut.cut(mixed[None]), weight[:, :, 0, 0]) + bias[:, None, None, None]
    return x + to_torch(out)


def _attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of one head with scale 1/sqrt(C), some rows of queries at a time.

    query [C, H, W] of one device; key and value [C, H, W] of the whole picture -> like query
    """
    keys, values = key.reshape(key.shape[0], -1), value.reshape(value.shape[0], -1)
    scale = query.shape[0] ** -0.5

    def row(queries: jax.Array) -> jax.Array:
        scores = jnp.einsum("cw,ck->wk", queries, keys, preferred_element_type=jnp.float32) * scale
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        mixed = jnp.einsum("wk,ck->cw", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return (mixed / weights.sum(-1)).astype(queries.dtype)

    return jax.lax.map(row, query.transpose(1, 0, 2), batch_size=QUERY_ROWS).transpose(1, 0, 2)
