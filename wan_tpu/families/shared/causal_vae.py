"""Run a video VAE with a causal feature cache one chunk at a time, in two fixed-shape programs.

diffusers' AutoencoderKLWan keeps, for every causal convolution, the last frames of its input in a Python list:
None before the first chunk, one frame after it, two from then on, and the string "Rep" where the first chunk
skipped a temporal upsampling. Zeros before the first frame are what the convolutions pad with, so a cache of
fixed shape that starts as zeros gives the same numbers: here every entry has its final shape from the start.
One program runs the first chunk (one pixel frame), another all later ones; compile time and memory are the same
for 5 frames as for 501.

Each program is one `jax.shard_map` over all devices, which share the picture's columns out (wan_tpu/ops/halo.py);
the cache stays on them between calls.

Shapes: T frames, X columns and Y rows of a device's strip, W H width and height of the whole picture, C channels.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.ops.halo import Cut, cut_of, strips
from wan_tpu.runtime.bridge import Params, call, to_torch
from wan_tpu.runtime.mesh import replicated

Cache = tuple[jax.Array, ...]


class History:
    """The entries of a cache, in the order in which a module's convolutions ask for them."""

    def __init__(self, entries: Cache | None) -> None:
        """entries: None before the first chunk."""
        self.first = entries is None
        self._entries = entries
        self._seen: list[jax.Array] = []

    def past(self, x: jax.Array) -> jax.Array | None:
        """Return the frames [T, X, Y, C] before x, and remember x for the next chunk.

        All frames of x are kept, though two are enough: an input that is kept whole needs no copy.
        """
        past = None if self._entries is None else self._entries[len(self._seen)]
        kept = x if past is None or x.shape[0] > 1 else jnp.concatenate([past[-1:], x])
        self._seen.append(kept)
        return past

    @classmethod
    def final(cls, entry: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        """Give what a first chunk left in the cache its final shape: zeros in front, as before the first frame."""
        missing = shape.shape[0] - entry.shape[0]
        return jnp.pad(entry, ((missing, 0), (0, 0), (0, 0), (0, 0)))

    @property
    def entries(self) -> Cache:
        """What the next chunk needs."""
        return tuple(self._seen)


class RepeatedStart(History):
    """A history of convolutions that see the first frame twice more before it, where others see zeros."""

    def past(self, x: jax.Array) -> jax.Array:
        """Return the two frames or more before x [T, X, Y, C], and remember x for the next chunk."""
        past = x[:1].repeat(2, axis=0) if self._entries is None else self._entries[len(self._seen)]
        kept = jnp.concatenate([past[-1:], x]) if x.shape[0] == 1 else x[x.shape[0] % 2 :]  # pairs, as the kernel reads
        self._seen.append(kept)
        return past


Run = Callable[[Any, Cut, jax.Array, Any], jax.Array]


@dataclass(frozen=True)
class CausalChunks:
    """One half (encoder or decoder) of a causal VAE as two pure functions.

    run           run(module, cut, x, history) applies the half to one chunk [T, X, Y, C]
    before, after  done to the whole input and output, [1, C, T, H, W]
    scale         pixels of the input (after `before`) to a pixel of the latents, in height and width
    later_frames  frames of every chunk after the first
    history       what convolutions see before the first frame
    history_of    makes the history from the number of chunks, where it keeps something of every one
    """

    module: torch.nn.Module
    mesh: Mesh
    run: Run
    before: Callable[[jax.Array], jax.Array]
    after: Callable[[jax.Array], jax.Array]
    scale: int
    later_frames: int
    history: type[History] = History
    history_of: Callable[[int], type[History]] | None = None

    def of(self, count: int) -> "CausalChunks":
        """Return it for so many chunks."""
        return self if self.history_of is None else dataclasses.replace(self, history=self.history_of(count))

    def first(self, params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
        """Run the first chunk, x [1, C, T, H, W]; return its output and the cache for the next."""

        def local(cut: Cut, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            out, entries = self._apply(cut, params, x, None)
            later = jax.ShapeDtypeStruct((self.later_frames, *x.shape[1:]), x.dtype)
            final = jax.eval_shape(lambda later: self._apply(cut, params, later, entries)[1], later)
            return out, tuple(map(self.history.final, entries, final))

        return self._on_strips(local, params, x, ())

    def next(self, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Run any later chunk, x [1, C, T, H, W], from the cache of the one before."""
        return self._on_strips(self._apply, params, x, cache)

    def cache(self, params: Any, x: jax.ShapeDtypeStruct) -> Any:
        """Return the shapes and shardings of the cache that `first` leaves, from the shapes of its arguments."""
        shapes = jax.eval_shape(self.first, params, x)[1]
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.cache_format), shapes)

    @property
    def out_format(self) -> Format:
        """How the output lies: column after column, as the strips do; it is turned on its way to the host."""
        return Format(Layout((0, 1, 2, 4, 3)), replicated(self.mesh))

    @property
    def cache_format(self) -> Format:
        """How each entry of the cache lies: as the kernels read it, where XLA would swap dimensions to save padding."""
        return Format(Layout((0, 1, 2, 3)), NamedSharding(self.mesh, strips(self.mesh)))

    def _cut(self, x: Any) -> Cut:
        height, width = jax.eval_shape(self.before, x).shape[3:]
        return cut_of(self.mesh, height // self.scale, width // self.scale)

    def _on_strips(self, local: Callable[..., Any], params: Params, x: jax.Array, cache: Cache) -> Any:
        """Run local(cut, params, strip, cache) on every device; its output becomes a whole picture again."""
        cut = self._cut(x)

        def device(params: Params, strip: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            out, entries = local(cut, params, strip, cache)
            # Channels first before it is gathered: three of them in a TPU's 128 lanes are 42 times as many bytes.
            frames, _, _, channels = out.shape
            planes = cut.gather(out.transpose(3, 0, 1, 2).reshape(-1, *out.shape[1:3]))
            return planes.reshape(channels, frames, *planes.shape[1:]), entries

        spec = strips(self.mesh)
        run = jax.shard_map(device, mesh=self.mesh, in_specs=(P(), spec, spec), out_specs=(P(), spec), check_vma=False)
        out, entries = run(params, cut.pad(self.before(x)[0].transpose(1, 3, 2, 0)), cache)
        return self.after(out.transpose(0, 1, 3, 2)[None]), entries

    def _apply(self, cut: Cut, params: Params, x: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache]:
        def method(module: torch.nn.Module) -> tuple[Any, ...]:
            history = self.history(cache)
            return to_torch((self.run(module, cut, x, history), history.entries))

        return call(self.module, params, method)
