"""Run a video VAE with a causal feature cache one chunk at a time, in two fixed-shape programs.

diffusers' AutoencoderKLWan keeps the last frames of every causal convolution's input in a Python list: None before the
first chunk, one frame after it, two from then on, and the string "Rep" where the first chunk skipped a temporal
upsampling. The convolutions pad with zeros before the first frame, so a cache of fixed shape that starts as zeros gives
the same numbers: here every entry has its final shape from the start. One program runs the first chunk (one pixel
frame), another all later ones; compile time and memory are the same for 5 frames as for 501.

Each program is one `jax.shard_map` over all devices, which divide the picture's columns among them
(wan_tpu/ops/halo.py); the cache stays on them between calls.

Shapes: T frames, X columns and Y rows of a device's strip, W H width and height of the whole picture, C channels.
"""

import abc
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

from wan_tpu.ops.halo import HaloCut, cut_picture, strip_spec
from wan_tpu.runtime.bridge import Params, call, to_torch
from wan_tpu.runtime.mesh import replicated_sharding

Cache = tuple[jax.Array, ...]


class History:
    """The entries of a cache, in the order in which a module's convolutions read them."""

    def __init__(self, entries: Cache | None) -> None:
        """Start from the entries that the last chunk left, None before the first."""
        self.first = entries is None
        self._entries = entries
        self._seen: list[jax.Array] = []

    def past(self, x: jax.Array) -> jax.Array | None:
        """Return the frames [T, X, Y, C] before x, and remember x for the next chunk.

        All frames of x are kept, though two are enough, because an input that is kept whole needs no copy.
        """
        past = None if self._entries is None else self._entries[len(self._seen)]
        frames = x if past is None or x.shape[0] > 1 else jnp.concatenate([past[-1:], x])
        self._seen.append(frames)
        return past

    @classmethod
    def pad_entry(cls, entry: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        """Give an entry of the first chunk its final shape: zeros in front, as there are before the first frame."""
        missing = shape.shape[0] - entry.shape[0]
        if entry.shape[0] == 1:  # By XLA's estimate, its pad takes three times as long.
            return jnp.where(jnp.arange(shape.shape[0])[:, None, None, None] < missing, 0, entry)
        return jnp.pad(entry, ((missing, 0), (0, 0), (0, 0), (0, 0)))

    @property
    def entries(self) -> Cache:
        """The entries that the next chunk starts from."""
        return tuple(self._seen)


class RepeatedStart(History):
    """A history for convolutions whose first frame is preceded by two copies of itself instead of zeros."""

    def past(self, x: jax.Array) -> jax.Array:
        """Return the two or more frames before x [T, X, Y, C], and remember x for the next chunk."""
        past = x[:1].repeat(2, axis=0) if self._entries is None else self._entries[len(self._seen)]
        # An even number of frames is kept, because the kernel reads them in pairs.
        frames = jnp.concatenate([past[-1:], x]) if x.shape[0] == 1 else x[x.shape[0] % 2 :]
        self._seen.append(frames)
        return past


def channels_first(x: jax.Array) -> jax.Array:
    """Return frames [T, X, Y, C] as planes [C, T, X, Y]."""
    return x.transpose(3, 0, 1, 2)


class Chunks(abc.ABC):
    """One half (encoder or decoder) of a VAE as two pure functions: of the first chunk of frames, and of later ones.

    A program is compiled for each shape of a chunk; the cache that it leaves for the next chunk stays on the devices.
    """

    mesh: Mesh

    @property
    def depends_on_count(self) -> bool:
        """Whether the functions depend on the number of chunks."""
        return False

    def for_chunks(self, count: int) -> "Chunks":
        """Return the half for a number of chunks."""
        return self

    @abc.abstractmethod
    def run_first(self, params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
        """Run the first chunk, x [1, C, T, H, W]; return its output and the cache for the next."""

    @abc.abstractmethod
    def run_next(self, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Run any later chunk, x [1, C, T, H, W], from the cache of the one before."""

    def cache_shapes(self, params: Any, x: jax.ShapeDtypeStruct) -> Any:
        """Return the shapes and shardings of the cache that `run_first` leaves, from the shapes of its arguments."""
        shapes = jax.eval_shape(self.run_first, params, x)[1]
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.cache_format), shapes)

    @property
    def out_format(self) -> Format:
        """The output's layout: column by column, as in the strips; it is transposed on its way to the host."""
        return Format(Layout((0, 1, 2, 4, 3)), replicated_sharding(self.mesh))

    @property
    def cache_format(self) -> Format:
        """The layout of each entry of the cache, as the kernels read it; XLA would swap dimensions to save padding."""
        return Format(Layout((0, 1, 2, 3)), NamedSharding(self.mesh, strip_spec(self.mesh)))


def gather_planes(cut: HaloCut, planes: jax.Array) -> jax.Array:
    """Return whole planes [C, T, W, H] from those of the strips [C, T, X, Y].

    Channels come first before the gathering: three of them in a TPU's 128 lanes would be 42 times the bytes.
    """
    whole = cut.gather(planes.reshape(-1, *planes.shape[2:]))
    return whole.reshape(*planes.shape[:2], *whole.shape[1:])


Run = Callable[[Any, HaloCut, jax.Array, Any], jax.Array]


@dataclass(frozen=True)
class CausalChunks(Chunks):
    """One half (encoder or decoder) of a causal VAE.

    Attributes:
        run: run(module, cut, x, history) applies the half to one chunk [T, X, Y, C].
        before, after: Applied to the whole input and output, [1, C, T, H, W].
        scale: Pixels of the input (after `before`) per pixel of the latents, in height and width.
        later_frames: Frames of every chunk after the first; 0 if there is only one chunk.
        history: Provides the frames before the first one.
        history_of: Creates the history for a number of chunks, if it keeps something from every chunk.
        planes: Turns what `run` returns into planes [C, T, X, Y], which may have more rows and columns.
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
    planes: Callable[[jax.Array], jax.Array] = channels_first

    @property
    def depends_on_count(self) -> bool:
        """Whether the history keeps something of every chunk."""
        return self.history_of is not None

    def for_chunks(self, count: int) -> "CausalChunks":
        """Return the half for a number of chunks."""
        return self if self.history_of is None else dataclasses.replace(self, history=self.history_of(count))

    def run_first(self, params: Params, x: jax.Array) -> tuple[jax.Array, Cache]:
        """Run the first chunk, x [1, C, T, H, W]; return its output and the cache for the next."""

        def local(cut: HaloCut, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            out, entries = self._apply(cut, params, x, None)
            if not self.later_frames:
                return out, ()
            later = jax.ShapeDtypeStruct((self.later_frames, *x.shape[1:]), x.dtype)
            final = jax.eval_shape(lambda later: self._apply(cut, params, later, entries)[1], later)
            return out, tuple(map(self.history.pad_entry, entries, final))

        return self._on_strips(local, params, x, ())

    def run_next(self, params: Params, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Run any later chunk, x [1, C, T, H, W], from the cache of the one before."""
        return self._on_strips(self._apply, params, x, cache)

    def _cut(self, x: Any) -> HaloCut:
        height, width = jax.eval_shape(self.before, x).shape[3:]
        return cut_picture(self.mesh, height // self.scale, width // self.scale)

    def _on_strips(self, local: Callable[..., Any], params: Params, x: jax.Array, cache: Cache) -> Any:
        """Run local(cut, params, strip, cache) on every device; its output becomes a whole picture again."""
        cut = self._cut(x)

        def device(params: Params, strip: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            out, entries = local(cut, params, strip, cache)
            return gather_planes(cut, self.planes(out)), entries

        spec = strip_spec(self.mesh)
        run = jax.shard_map(device, mesh=self.mesh, in_specs=(P(), spec, spec), out_specs=(P(), spec), check_vma=False)
        out, entries = run(params, cut.pad(self.before(x)[0].transpose(1, 3, 2, 0)), cache)
        return self.after(out.transpose(0, 1, 3, 2)[None]), entries

    def _apply(self, cut: HaloCut, params: Params, x: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache]:
        def method(module: torch.nn.Module) -> tuple[Any, ...]:
            history = self.history(cache)
            return to_torch((self.run(module, cut, x, history), history.entries))

        return call(self.module, params, method)
