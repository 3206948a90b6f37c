"""Convolutions of a VAE on strips of a picture, with weights laid out as the kernel reads them.

Resampling is folded into convolutions at the lower resolution.
Shapes: T frames, X columns and Y rows of a device's strip, C channels, O channels out.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh

from wan_tpu.ops.dispatch import ops_for
from wan_tpu.ops.halo import HaloCut
from wan_tpu.runtime.bridge import to_jax
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule
from wan_tpu_kernels.vae.causal_conv import Padding
from wan_tpu_kernels.vae.folded_conv import enlarge

# ---- Weights, laid out once, as they are read.


def taps_first(weight: np.ndarray) -> np.ndarray:
    """Reorder [O, C, (t,) y, x] to [t, x, y, C, O], as the convolutions take it."""
    weight = weight if weight.ndim == 5 else weight[:, :, None]
    return weight.transpose(2, 4, 3, 1, 0)


def upsampling_taps(weight: np.ndarray) -> np.ndarray:
    """Fold "enlarge twice, nearest, then convolve with [O, C, 3, 3]" into [1, 3, 3, C, 4 O] at the original size.

    The four pixels that one becomes are channel groups: upper left, lower left, upper right, lower right.
    """
    outputs, inputs = weight.shape[:2]
    taps = np.zeros((1, 3, 3, inputs, 2, 2, outputs), np.float32)
    for x, y, dx, dy in np.ndindex(3, 3, 2, 2):
        # Tap x of the pixel dx to the right reads column dx + x - 1 of the enlarged picture.
        taps[0, (dx + x - 1) // 2 + 1, (dy + y - 1) // 2 + 1, :, dx, dy] += weight[:, :, y, x].T
    return taps.reshape(1, 3, 3, inputs, 4 * outputs)


def downsampling_taps(weight: np.ndarray) -> np.ndarray:
    """Fold "convolve every second pixel with [O, C, 3, 3]" into [1, 2, 2, 4 C, O] on squares of four pixels."""
    outputs, inputs = weight.shape[:2]
    taps = np.zeros((1, 2, 2, 2, 2, inputs, outputs), np.float32)
    for x, y in np.ndindex(3, 3):
        taps[0, x // 2, y // 2, x % 2, y % 2] = weight[:, :, y, x].T
    return taps.reshape(1, 2, 2, 4 * inputs, outputs)


Changes = tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...]


def lay_out(module: torch.nn.Module, changes: Changes) -> None:
    """Give a module's parameters the shapes that their values will have; the first pattern that matches decides."""
    for name, parameter in list(module.named_parameters()):
        change = next((change for pattern, change in changes if re.fullmatch(pattern, name)), None)
        if change is not None:
            shape = change(np.broadcast_to(np.float32(0), tuple(parameter.shape))).shape
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent).register_parameter(
                leaf, torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
            )


def vae_component(build: Callable[[], torch.nn.Module], changes: Changes, dropped: Sequence[str]) -> Component:
    """Return a VAE without the parts named in `dropped`, replicated on every device."""

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        for part in dropped:
            delattr(module, part)
        lay_out(module, changes)

    return Component("vae", build, adapt, scanned=(), rules=(Rule(r".*", ()),), changes=changes)


# ---- Operations on a strip.


def convolve(
    cut: HaloCut, x: jax.Array, weight: jax.Array, bias: jax.Array, *, past: jax.Array | None = None, **options: Any
) -> Any:
    """Convolve a strip; the result is zero beyond the picture.

    Args:
        cut: How the picture is cut.
        x: [T, X, Y, C]. With a padding that isn't zeros, x and past must have been extended by `HaloCut.extend`.
        weight: [t, x, y, C, O], laid out as above.
        bias: [O].
        past: Frames before x; missing ones are zeros.
        **options: As for `wan_tpu_kernels.vae.causal_conv.causal_conv`, or for `folded_conv` beside it if `fold` is
            among them.
    """
    taps = weight.shape[0]
    count = 0 if past is None else taps - options.get("stride", 1)
    if past is not None and past.shape[0] < count:
        past = jnp.pad(past, ((count - past.shape[0], 0), (0, 0), (0, 0), (0, 0)))
    if weight.shape[1] > 1:
        frames = [x] if not count else [past[-count:], x]  # type: ignore[index]
        padding = options.get("padding", "zeros")
        near = 2 if padding == "reflect" else 1
        first, last = (jnp.concatenate([part[:, side] for part in frames]) for side in (np.s_[:near], np.s_[-near:]))
        options["edges"] = cut.edges(first, last, padding=padding)
    columns, rows = cut.inside(x)
    ops = ops_for(cut.mesh.devices.flat[0].platform)
    kernel = ops.folded_conv if "fold" in options else ops.causal_conv
    return kernel(x, weight, bias, past=past, columns=columns, rows=rows, **options)


def pointwise(conv: Any, x: jax.Array) -> jax.Array:
    """Apply a convolution of one tap to [T, X, Y, C] and return [T, X, Y, O]."""
    product = jnp.einsum("txyc,co->txyo", x, to_jax(conv.weight)[0, 0, 0], preferred_element_type=jnp.float32)
    return (product + to_jax(conv.bias)).astype(x.dtype)


def upsample(conv: Any, cut: HaloCut, x: jax.Array) -> jax.Array:
    """Double columns and rows, nearest, and apply a 3x3 convolution whose weight `upsampling_taps` has folded."""
    return enlarge(convolve(cut, x, to_jax(conv.weight), jnp.tile(to_jax(conv.bias), 4), before=(1, 1)))


def downsample(conv: Any, cut: HaloCut, x: jax.Array, padding: Padding = "zeros") -> jax.Array:
    """Apply a 3x3 convolution to every second column and row; `downsampling_taps` has folded its weight.

    Squares of four pixels are channels here, and `padding` is what lies beyond the edge's squares.
    """
    frames, columns, rows, channels = x.shape
    squares = x.reshape(frames, columns // 2, 2, rows // 2, 2 * channels).transpose(0, 1, 3, 2, 4)
    squares = squares.reshape(frames, columns // 2, rows // 2, 4 * channels)
    if padding != "zeros":
        squares = cut.extend(squares, padding)
    return convolve(cut, squares, to_jax(conv.weight), to_jax(conv.bias), padding=padding)


# ---- Squares of a whole video's pixels as channels, before and after the strips.


def patchify(x: jax.Array, size: int) -> jax.Array:
    """Turn squares of pixels into channels: [B, C, T, H, W] becomes [B, C size size, T, H/size, W/size]."""
    batch, channels, frames, height, width = x.shape
    squares = x.reshape(batch, channels, frames, height // size, size, width // size, size)
    return squares.transpose(0, 1, 6, 4, 2, 3, 5).reshape(batch, -1, frames, height // size, width // size)


def unpatchify(x: jax.Array, size: int) -> jax.Array:
    """Undo `patchify`."""
    batch, channels, frames, height, width = x.shape
    squares = x.reshape(batch, channels // size**2, size, size, frames, height, width)
    return squares.transpose(0, 1, 4, 5, 3, 6, 2).reshape(batch, -1, frames, height * size, width * size)
