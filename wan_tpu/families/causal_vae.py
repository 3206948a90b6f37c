"""Run a video VAE with a causal feature cache one chunk at a time, in two fixed-shape programs.

diffusers' AutoencoderKLWan keeps, for every causal convolution, the last frames of its input in a Python list:
None before the first chunk, one frame after it, two from then on, and the string "Rep" where the first chunk
skipped a temporal upsampling. Zeros before the first frame are what the convolutions pad with, so a cache of
fixed shape that starts as zeros gives the same numbers: here every entry has its final shape from the start.
One program runs the first chunk (one pixel frame), another all later ones; compile time and memory are the same
for 5 frames as for 501.

Each program is one `jax.shard_map` over all devices, which split the width; the cache stays split between calls.

Shapes: B batch, T latent frames, H W latent height and width, C channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.bridge import Params, call, to_jax, to_torch
from wan_tpu.halo import Columns

Cache = tuple[jax.Array | None, ...]
Adapt = Callable[[torch.nn.Module, Columns], None]
Run = Callable[[torch.nn.Module, torch.Tensor, list[Any], bool], torch.Tensor]


@dataclass(frozen=True)
class CausalChunks:
    """One half (encoder or decoder) of a causal VAE as two pure functions.

    adapt          makes the module exchange columns with other devices; called whenever the half is traced
    run            run(module, x, cache, first) is torch code that applies the half to one chunk, updating the list
                   `cache`; what it returns has the columns last
    scale          pixels of the input a column of the latents
    cache_entries  how long that list is
    later_frames   frames of every chunk after the first, which has one
    """

    module: torch.nn.Module
    mesh: Mesh
    adapt: Adapt
    run: Run
    scale: int
    cache_entries: int
    later_frames: int

    def first(self, params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
        """Run the first chunk, x [B, C, 1, H, W]; return its output and the cache for the next."""
        columns = self._columns(x)

        def local(params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
            out, entries = self._apply(params, x, [None] * self.cache_entries, columns, first=True)
            later = jax.ShapeDtypeStruct((*x.shape[:2], self.later_frames, *x.shape[3:]), x.dtype)
            final = jax.eval_shape(lambda later: self._apply(params, later, entries, columns, first=False)[1], later)
            return out, tuple(_to_final(entry, shape) for entry, shape in zip(entries, final, strict=True))

        return self._split(columns, local, params, columns.pad(x))

    def next(self, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Run any later chunk from the cache of the one before."""
        columns = self._columns(x)

        def local(params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            out, entries = self._apply(params, x, list(cache), columns, first=False)
            return out, tuple(entries)

        return self._split(columns, local, params, columns.pad(x), cache)

    def _columns(self, x: jax.Array) -> Columns:
        return Columns(self.mesh, x.shape[-1] // self.scale)

    def _split(self, columns: Columns, local: Callable[..., Any], params: Params, *split: Any) -> Any:
        """Run `local` on every device's columns; its first result is the same on all, the others stay split."""
        split_spec = columns.spec(5)
        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P(), *[split_spec] * len(split)),
            out_specs=(P(), split_spec),
            check_vma=False,
        )
        return run(params, *split)

    def _apply(
        self, params: Params, x: jax.Array, cache: list[Any], columns: Columns, *, first: bool
    ) -> tuple[jax.Array, list[Any]]:
        def method(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
            entries = [entry if isinstance(entry, str) else to_torch(entry) for entry in cache]
            out = self.run(module, x, entries, first)
            return out, [entry if isinstance(entry, str) else to_jax(entry) for entry in entries]

        self.adapt(self.module, columns)
        out, entries = call(self.module, params, method, x)
        return columns.gather(out), entries


def _to_final(entry: jax.Array | str | None, shape: jax.ShapeDtypeStruct | None) -> jax.Array | None:
    """Put zeros in front of what a first chunk left in the cache."""
    if shape is None:
        return None
    if isinstance(entry, str):
        return jnp.zeros(shape.shape, shape.dtype)
    assert entry is not None
    missing = shape.shape[2] - entry.shape[2]
    return jnp.pad(entry, ((0, 0), (0, 0), (missing, 0), (0, 0), (0, 0)))
