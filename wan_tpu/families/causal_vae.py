"""Run a video VAE with a causal feature cache one chunk at a time, in two fixed-shape programs.

diffusers' AutoencoderKLWan keeps, for every causal convolution, the last frames of its input in a Python list:
None before the first chunk, one frame after it, two from then on, and the string "Rep" where the first chunk
skipped a temporal upsampling. Zeros before the first frame are what the convolutions pad with, so a cache of
fixed shape that starts as zeros gives the same numbers: here every entry has its final shape from the start.
One program runs the first chunk (one pixel frame), another all later ones; compile time and memory are the same
for 5 frames as for 501.

Each program is one `jax.shard_map` over all devices, which cut the picture into patches (wan_tpu/halo.py); the cache
stays on them between calls.

Shapes: N patches on a device, T frames, H W height and width (of a picture, or of a patch beside N), C channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.bridge import Params, call, to_jax, to_torch
from wan_tpu.halo import Patches, patches

Cache = tuple[jax.Array | None, ...]
Adapt = Callable[[torch.nn.Module, Patches], None]
Run = Callable[[torch.nn.Module, torch.Tensor, list[Any], bool], torch.Tensor]


@dataclass(frozen=True)
class CausalChunks:
    """One half (encoder or decoder) of a causal VAE as two pure functions.

    adapt          makes the module work on patches; called whenever the half is traced
    run            run(module, x, cache, first) is torch code that applies the half to one chunk [N, C, T, H, W],
                   updating the list `cache`
    scale          pixels of the input to a pixel of the latents, in height and width
    cache_entries  how long that list is
    later_frames   frames of every chunk after the first, which has one
    patches        into how many a device cuts its part of a picture
    """

    module: torch.nn.Module
    mesh: Mesh
    adapt: Adapt
    run: Run
    scale: int
    cache_entries: int
    later_frames: int
    patches: int

    def first(self, params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
        """Run the first chunk, x [1, C, 1, H, W]; return its output and the cache for the next."""

        def local(cut: Patches, params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
            out, entries = self._apply(cut, params, x, [None] * self.cache_entries, first=True)
            later = jax.ShapeDtypeStruct((*x.shape[:2], self.later_frames, *x.shape[3:]), x.dtype)
            final = jax.eval_shape(lambda later: self._apply(cut, params, later, entries, first=False)[1], later)
            return out, tuple(map(_to_final, entries, final))

        return self._on_patches(local, params, x, ())

    def next(self, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Run any later chunk, x [1, C, T, H, W], from the cache of the one before."""

        def local(cut: Patches, params: Params, x: jax.Array, *cache: jax.Array | None) -> tuple[jax.Array, Cache]:
            out, entries = self._apply(cut, params, x, list(cache), first=False)
            return out, tuple(entries)

        return self._on_patches(local, params, x, cache)

    def cache(self, params: Any, x: jax.ShapeDtypeStruct) -> Any:
        """Return the shapes and shardings of the cache that `first` leaves, from the shapes of its arguments."""
        sharding = NamedSharding(self.mesh, _on_last(self.mesh))
        shapes = jax.eval_shape(self.first, params, x)[1]
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)

    def _on_patches(self, local: Callable[..., Any], params: Params, x: jax.Array, cache: Cache) -> Any:
        """Run local(cut, params, patches, *cache) on every device; its output becomes a whole picture again."""
        cut = patches(self.mesh, x.shape[3] // self.scale, x.shape[4] // self.scale, self.patches)
        on_columns = _on_last(self.mesh)

        def device(params: Params, part: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            out, entries = local(cut, params, cut.cut(part), *jax.tree.map(_from_cache, cache))
            return cut.gather(out), jax.tree.map(_to_cache, entries)

        run = jax.shard_map(
            device,
            mesh=self.mesh,
            in_specs=(P(), on_columns, on_columns),
            out_specs=(P(), on_columns),
            check_vma=False,
        )
        return run(params, cut.pad(x), cache)

    def _apply(
        self, cut: Patches, params: Params, x: jax.Array, cache: list[Any], *, first: bool
    ) -> tuple[jax.Array, list[Any]]:
        def method(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
            entries = [entry if isinstance(entry, str) else to_torch(entry) for entry in cache]
            out = self.run(module, x, entries, first)
            return out, [entry if isinstance(entry, str) else to_jax(entry) for entry in entries]

        self.adapt(self.module, cut)
        return call(self.module, params, method, x)


def _on_last(mesh: Mesh) -> P:
    """Return how the last of five dimensions is split over all devices."""
    return P(None, None, None, None, mesh.axis_names)


def _to_cache(entry: jax.Array) -> jax.Array:
    """[N, C, T, H, W] -> [T, H, W, C, N]: what a program's inputs and outputs have last lies in the TPU's lanes."""
    return entry.transpose(2, 3, 4, 1, 0)


def _from_cache(entry: jax.Array) -> jax.Array:
    return entry.transpose(4, 3, 0, 1, 2)


def _to_final(entry: jax.Array | str | None, shape: jax.ShapeDtypeStruct | None) -> jax.Array | None:
    """Put zeros in front of what a first chunk left in the cache."""
    if shape is None:
        return None
    if isinstance(entry, str):
        return jnp.zeros(shape.shape, shape.dtype)
    assert entry is not None
    missing = shape.shape[2] - entry.shape[2]
    return jnp.pad(entry, ((0, 0), (0, 0), (missing, 0), (0, 0), (0, 0)))
