"""Run a video VAE with a causal feature cache one chunk at a time, in two fixed-shape programs.

diffusers' AutoencoderKLWan keeps, for every causal convolution, the last frames of its input in a Python list:
None before the first chunk, one frame after it, two from then on, and the string "Rep" where the first chunk
skipped a temporal upsampling. Zeros before the first frame are what the convolutions pad with, so a cache of
fixed shape that starts as zeros gives the same numbers: here every entry has its final shape from the start.
One program runs the first chunk (one pixel frame), another all later ones; compile time and memory are the same
for 5 frames as for 501.

Shapes: B batch, T latent frames, H W latent height and width, C channels.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from wan_tpu.bridge import Params, call, to_jax, to_torch

Cache = tuple[jax.Array | None, ...]
Run = Callable[[torch.nn.Module, torch.Tensor, list[Any], bool], torch.Tensor]


class CausalChunks:
    """One half (encoder or decoder) of a causal VAE as two pure functions.

    run(module, x, cache, first) is torch code that applies the half to one chunk, updating the list `cache`.
    """

    def __init__(self, module: torch.nn.Module, run: Run, *, cache_entries: int, later_frames: int) -> None:
        """later_frames: frames of every chunk after the first, which has one."""
        self._module = module
        self._run = run
        self._entries = cache_entries
        self._later_frames = later_frames

    def first(self, params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
        """Run the first chunk, x [B, C, 1, H, W]; return its output and the cache for the next."""
        out, entries = self._apply(params, x, [None] * self._entries, first=True)
        later = jax.ShapeDtypeStruct((*x.shape[:2], self._later_frames, *x.shape[3:]), x.dtype)
        final = jax.eval_shape(self._second, params, x, later)
        return out, tuple(_to_final(entry, shape) for entry, shape in zip(entries, final, strict=True))

    def next(self, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Run any later chunk from the cache of the one before."""
        out, entries = self._apply(params, x, list(cache), first=False)
        return out, tuple(entries)

    def _second(self, params: Params, x: jax.Array, later: jax.Array) -> list[jax.Array | None]:
        _, entries = self._apply(params, x, [None] * self._entries, first=True)
        return self._apply(params, later, entries, first=False)[1]

    def _apply(self, params: Params, x: jax.Array, cache: list[Any], *, first: bool) -> tuple[jax.Array, list[Any]]:
        def method(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
            entries = [entry if isinstance(entry, str) else to_torch(entry) for entry in cache]
            out = self._run(module, x, entries, first)
            return out, [entry if isinstance(entry, str) else to_jax(entry) for entry in entries]

        return call(self._module, params, method, x)


def _to_final(entry: jax.Array | str | None, shape: jax.ShapeDtypeStruct | None) -> jax.Array | None:
    """Put zeros in front of what a first chunk left in the cache."""
    if shape is None:
        return None
    if isinstance(entry, str):
        return jnp.zeros(shape.shape, shape.dtype)
    assert entry is not None
    missing = shape.shape[2] - entry.shape[2]
    return jnp.pad(entry, ((0, 0), (0, 0), (missing, 0), (0, 0), (0, 0)))
