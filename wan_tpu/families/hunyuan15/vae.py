"""HunyuanVideo-1.5's VAE on strips of a picture: the arithmetic of diffusers' AutoencoderKLHunyuanVideo15.

It has causal convolutions that repeat the first frame and the picture's edges beyond them, and in the middle an
attention of one head over all frames up to a pixel's own. So a video streams frame by frame, with the keys and values
of all frames before. diffusers' module has the structure, the parameters' names and their values.

Shapes: T frames, X columns and Y rows of a device's strip, C channels; W H width and height of the whole picture.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.families.shared.causal_vae import RepeatedStart
from wan_tpu.families.shared.convolutions import convolve, pointwise, taps_first
from wan_tpu.families.shared.vae_attention import attend, rms_norm
from wan_tpu.ops.halo import HaloCut
from wan_tpu.runtime.bridge import to_jax
from wan_tpu_kernels.vae.causal_conv import zero_outside

# The number of queries in the middle block whose scores are computed at once, for all keys of a video.
QUERIES = 128

# How each weight is laid out when it is read; the first pattern that matches its whole name decides.
CHANGES: tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...] = ((r".*\.weight", taps_first),)


class AttentionHistory(RepeatedStart):
    """The convolutions' last frames, and the middle block's keys and values of the whole video, for later chunks.

    The keys and values are whole pictures on every device; each chunk gathers only its own frames.
    """

    frames = 1  # Latent frames of the whole video.

    def add_keys(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Add keys and values of a chunk's frames [T, W, H, C], and remember them for the next chunk.

        Returns:
            Keys and values [frames, W, H, C] of all frames so far, zero for later ones, and the number of frames before
            this chunk's.
        """
        seen: list[jax.Array] = []
        count = jnp.zeros((1, 1, 1, 1), jnp.int32) if self._entries is None else self._entries[len(self._seen)]
        before = count[0, 0, 0, 0]
        self._seen.append(count + key.shape[0])
        for new in (key, value):
            whole = jnp.zeros((self.frames, *new.shape[1:]), new.dtype)
            if self._entries is not None:
                whole = self._entries[len(self._seen)]
            seen.append(jax.lax.dynamic_update_slice(whole, new, (before, 0, 0, 0)))
            self._seen.append(seen[-1])
        return seen[0], seen[1], before


@functools.lru_cache(maxsize=64)
def make_history(frames: int) -> type[AttentionHistory]:
    """Return the history of a video of `frames` latent frames."""
    return type("AttentionHistory", (AttentionHistory,), {"frames": frames})


# ---- The two halves.


def encoder(module: Any, cut: HaloCut, x: jax.Array, history: AttentionHistory) -> jax.Array:
    """Return the moments [1, X, Y, 2C] of a chunk of pixels [1 or 4, X, Y, 3]."""
    half = module.encoder
    x = _conv(half.conv_in, cut, x, history)
    for block in half.down_blocks:
        for resnet in block.resnets:
            x = _residual_block(resnet, cut, x, history)
        for downsampler in block.downsamplers or ():
            x = _downsample(downsampler, cut, x, history)
    x = _middle(half.mid_block, cut, x, history)
    return _conv(half.conv_out, cut, x, history, norm=half.norm_out, residual=_mean(x, half.group_size))


def decoder(module: Any, cut: HaloCut, x: jax.Array, history: AttentionHistory) -> jax.Array:
    """Return the pixels [1 or 4, X, Y, 3] of latents [1, X, Y, C]."""
    half = module.decoder
    x = _conv(half.conv_in, cut, x, history, residual=x.repeat(half.repeat, axis=-1))
    x = _middle(half.mid_block, cut, x, history)
    for block in half.up_blocks:
        for resnet in block.resnets:
            x = _residual_block(resnet, cut, x, history)
        for upsampler in block.upsamplers or ():
            x = _upsample(upsampler, cut, x, history)
    return _conv(half.conv_out, cut, x, history, norm=half.norm_out)


def _middle(block: Any, cut: HaloCut, x: jax.Array, history: AttentionHistory) -> jax.Array:
    x = _residual_block(block.resnets[0], cut, x, history)
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual_block(resnet, cut, _attention_block(attention, cut, x, history), history)
    return x


def _residual_block(block: Any, cut: HaloCut, x: jax.Array, history: AttentionHistory) -> jax.Array:
    shortcut = x if block.conv_shortcut is None else zero_outside(pointwise(block.conv_shortcut, x), *cut.inside(x))
    hidden = _conv(block.conv1, cut, x, history, norm=block.norm1, norm_after=block.norm2)
    return _conv(block.conv2, cut, hidden, history, residual=shortcut)


def _conv(
    conv: Any,
    cut: HaloCut,
    x: jax.Array,
    history: AttentionHistory,
    *,
    norm: Any = None,
    norm_after: Any = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Apply a HunyuanVideo15CausalConv3d of 3x3x3 taps, with RMS norm and SiLU before and after it, plus a residual."""
    x = cut.extend(x, "edge")
    return convolve(
        cut,
        x,
        to_jax(conv.conv.weight),
        to_jax(conv.conv.bias),
        past=history.past(x),
        norm=None if norm is None else _gamma(norm),
        norm_after=None if norm_after is None else _gamma(norm_after),
        residual=residual,
        before=(1, 1),
        padding="edge",
    )


# ---- Resampling: channels become pixels, and pixels channels.


def _upsample(block: Any, cut: HaloCut, x: jax.Array, history: AttentionHistory) -> jax.Array:
    """Apply a HunyuanVideo15Upsample: double columns and rows, and in some blocks all frames but the very first."""
    out, repeats = _conv(block.conv, cut, x, history), block.repeats
    if not block.add_temporal_upsample:
        return _spread(out, 1) + _spread(x.repeat(repeats, axis=-1), 1)
    if history.first:  # Half of the channels of the only frame are dropped.
        first = _spread(out, 1)
        return first[..., : first.shape[-1] // 2] + _spread(x, 1).repeat(repeats // 2, axis=-1)
    return _spread(out, 2) + _spread(x, 2).repeat(repeats, axis=-1)


def _downsample(block: Any, cut: HaloCut, x: jax.Array, history: AttentionHistory) -> jax.Array:
    """Apply a HunyuanVideo15Downsample: halve columns and rows, and in some blocks all frames but the very first."""
    out, group = _conv(block.conv, cut, x, history), block.group_size
    if not block.add_temporal_downsample:
        return _pack(out, 1) + _mean(_pack(x, 1), group)
    if history.first:
        return jnp.concatenate([_pack(out, 1)] * 2, axis=-1) + _mean(_pack(x, 1), group // 2)
    return _pack(out, 2) + _mean(_pack(x, 2), group)


def _spread(x: jax.Array, time: int) -> jax.Array:
    """Turn [T, X, Y, time 2 2 C] into [time T, 2X, 2Y, C]: channels are frames, rows, columns, then channels."""
    frames, columns, rows, _ = x.shape
    blocks = x.reshape(frames, columns, rows, time, 2, 2, -1).transpose(0, 3, 1, 5, 2, 4, 6)
    return blocks.reshape(frames * time, columns * 2, rows * 2, -1)


def _pack(x: jax.Array, time: int) -> jax.Array:
    """Undo `_spread`."""
    frames, columns, rows, channels = x.shape
    blocks = x.reshape(frames // time, time, columns // 2, 2, rows // 2, 2, channels).transpose(0, 2, 4, 1, 5, 3, 6)
    return blocks.reshape(frames // time, columns // 2, rows // 2, -1)


def _mean(x: jax.Array, group: int) -> jax.Array:
    """Return the means of groups of channels, [T, X, Y, C / group]."""
    groups = x.reshape(*x.shape[:3], -1, group)
    return groups.astype(jnp.float32).mean(-1).astype(x.dtype)


# ---- Attention in the middle.


def _attention_block(block: Any, cut: HaloCut, x: jax.Array, history: AttentionHistory) -> jax.Array:
    """Apply a HunyuanVideo15AttnBlock: each pixel of x [T, X, Y, C] attends to its frame and those before it."""
    normed = rms_norm(x, _gamma(block.norm))
    key, value = (cut.gather(pointwise(conv, normed)) for conv in (block.to_k, block.to_v))
    keys, values, before = history.add_keys(key, value)
    query, inside = pointwise(block.to_q, normed), cut.inside_mask(key)
    frames = jnp.arange(len(keys)) <= before + jnp.arange(x.shape[0])[:, None]
    attended = jax.vmap(functools.partial(attend, at_once=QUERIES), in_axes=(0, None, None, 0))(
        query, keys, values, frames[:, :, None, None] & inside
    )
    return zero_outside(x + pointwise(block.proj_out, attended), *cut.inside(x))


def _gamma(norm: Any) -> jax.Array:
    """Return the factors of a HunyuanVideo15RMS_norm, [C]."""
    return to_jax(norm.gamma).reshape(-1)
