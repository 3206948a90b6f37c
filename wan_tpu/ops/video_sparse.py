"""Video sparse attention (VSA, arXiv 2505.13389) of some heads on one device: few tiles exactly, all tiles by means.

As in FastVideo's FastH3. A tile of the video attends to those of the video's tiles whose mean key has the largest
product with its mean query, and to all rows that aren't video; these attend to everything. A second, coarse result
stands for what that misses: softmax over the same products of all tiles, times the means of values. Every row of a tile
gets its tile's coarse result, times a gate that the caller has for each row.

Shapes: L rows, T tiles, V of which are the video's, N heads, D head width; token-major, [L, N * D].
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.ops.attention import attention_part
from wan_tpu.ops.local_heads import LocalHeads
from wan_tpu.ops.tiles import ROWS, Tiles
from wan_tpu.switches import uses_kernel
from wan_tpu_kernels.attempt import Attempt
from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.sla.block_means import block_means
from wan_tpu_kernels.sla.top_lists import pair_lists, top_lists_reference
from wan_tpu_kernels.vsa.tile_attention import STEP, Part, try_tile_attention


@jax.tree_util.register_static
@dataclass(frozen=True)
class Sparsity:
    """The share of the video's tiles that are left out, as a static argument of a program."""

    value: float


@dataclass(frozen=True)
class VideoSparse:
    """The settings of a layer's video sparse attention.

    Attributes:
        tiles: The tiles of the sequence.
        kept: How many of the video's tiles each of them attends to.
    """

    tiles: Tiles
    kept: int
    kernel: ClassVar = "tile_attention"


def video_sparse_attention(
    local: LocalHeads, layer: VideoSparse, spread_axes: tuple[str, ...] = ()
) -> tuple[Attempt[jax.Array], jax.Array]:
    """Try exact attention to the chosen tiles, and compute the coarse result of every tile.

    Args:
        local: Which heads of which rows.
        layer: How the layer attends.
        spread_axes: Mesh axes over which the rows of q are spread.

    Returns:
        The rows' results [Lq, N * D] and the tiles' [T, N * D], in the dtype of q. Results of padding are arbitrary.
    """
    # The kernels take heads that fill registers, as the published model has them.
    kernels = local.width % LANES == 0 and (uses_kernel(layer.kernel, local.platform) or bool(local.interpret))
    rows = _Rows(layer.tiles, local, kernels)
    queries = rows.sum_queries()
    if spread_axes:  # Devices may share a tile's rows.
        queries = jax.lax.psum(queries, spread_axes)
    share = 1 / jnp.maximum(rows.counts, 1)[:, None]
    _, first_k, first_v = local.first_heads
    means = [share * sums for sums in (queries, rows.sum_rows(local.k, first_k), rows.sum_rows(local.v, first_v))]
    scores = jnp.einsum("nqd,nkd->nqk", *means[:2], precision="highest")
    weights = jax.nn.softmax(jnp.log(2.0) * jnp.where(rows.counts > 0, scores, -jnp.inf))
    coarse = jnp.einsum("nqk,nkd->qnd", weights, means[2], precision="highest")
    if kernels:
        attempt = rows.attend(scores, layer.kept)
    else:
        attend = functools.partial(rows.attend_plainly, choose_tiles(scores, layer))
        attempt = Attempt(attend(), jnp.asarray(True), attend)
    dtype = local.q.dtype
    return attempt.then(lambda out: out.astype(dtype)), coarse.reshape(len(rows.counts), -1).astype(dtype)


def choose_tiles(scores: jax.Array, layer: VideoSparse) -> jax.Array:
    """Return which of the video's tiles each of them attends to, int32 [N, V, kept], from all scores [N, T, T]."""
    video = layer.tiles.video
    return top_lists_reference(scores[:, :video, :video].swapaxes(1, 2), layer.kept)


@dataclass(frozen=True)
class _Rows:
    """The tiles' rows of some heads on one device.

    Queries and keys are of whole tiles, which come first and are read in place, of the video's other tiles, and of the
    segments that aren't video. The kernel gets the latter two padded to 64 rows a tile.
    """

    tiles: Tiles
    local: LocalHeads
    kernels: bool

    @functools.cached_property
    def counts(self) -> jax.Array:
        """The number of real rows of each tile, int32 [T]."""
        return jnp.clip(self.local.kv_len - self.tiles.starts, 0, self.tiles.sizes).astype(jnp.int32)

    # ---- Sums of tiles.

    def sum_rows(self, x: jax.Array, first: int) -> jax.Array:
        """Return the sums of each tile's rows of K or V, or of all queries, float32 [N, T, D]."""
        inside = self.tiles.whole * ROWS
        if not self.kernels:
            return self._sum_few(x[: self.tiles.rows], first, 0)
        others = self._sum_few(x[inside : self.tiles.rows], first, self.tiles.whole)
        return jnp.concatenate([self._sum_blocks(x, first)[:, : self.tiles.whole], others], axis=1)

    def sum_queries(self) -> jax.Array:
        """Return the same of this device's queries; tiles without any have zeros."""
        local, whole, (first, *_) = self.local, self.tiles.whole, self.local.first_heads
        if self._has_all:
            return self.sum_rows(local.q, first)
        if not self.kernels:
            return self._sum_few(self._take(local.q, 0, self.tiles.rows), first, 0)
        blocks = self._sum_blocks(local.q, first)
        room = jnp.zeros((local.heads, whole + blocks.shape[1], local.width), jnp.float32)
        start = jnp.minimum(local.first_query // ROWS, whole)
        placed = jax.lax.dynamic_update_slice(room, blocks, (0, start, 0))[:, :whole]
        others = self._take(local.q, whole * ROWS, self.tiles.rows - whole * ROWS)
        return jnp.concatenate([placed, self._sum_few(others, first, whole)], axis=1)

    def _sum_blocks(self, x: jax.Array, first: int) -> jax.Array:
        """Return the sums of every 64 rows, [N, blocks, D]."""
        local = self.local
        columns = {"tiles": local.heads, "lanes": local.width, "first": first}
        return ROWS * block_means(x, ROWS, real=len(x), interpret=local.interpret, **columns)

    def _sum_few(self, x: jax.Array, first: int, tile: int) -> jax.Array:
        """Return the sums of all tiles from one on, given their rows."""
        real = self.tiles.starts[tile] + jnp.arange(len(x)) < self.local.kv_len
        x = jnp.where(real[:, None], self.local.select(x, first), 0)  # Padding may be NaN.
        padded = _pad_tiles(x, self.tiles.sizes[tile:], repeats=False).reshape(
            -1, ROWS, self.local.heads, self.local.width
        )
        return padded.astype(jnp.float32).sum(axis=1).swapaxes(0, 1)

    # ---- Attention.

    def attend_plainly(self, lists: jax.Array) -> jax.Array:
        """Return attention's results, float32 [Lq, N * D], of all products and a mask."""
        video, others = self.tiles.video, len(self.counts) - self.tiles.video
        chosen = jnp.any(lists[..., None] == jnp.arange(video), axis=-2)
        chosen = jnp.pad(chosen, ((0, 0), (0, others), (0, others)), constant_values=True)
        of_rows = jnp.asarray(self.tiles.of_rows)
        rows = [jnp.arange(len(self.local.k)), self.local.first_query + jnp.arange(len(self.local.q))]
        of_keys, of_queries = (of_rows[jnp.minimum(x, self.tiles.rows - 1)] for x in rows)
        real = rows[0] < self.local.kv_len
        mask = jnp.take(jnp.take(chosen, of_queries, axis=1), of_keys, axis=2) & real
        q, k, v = (x.astype(jnp.float32) for x in self.local.select_all())
        k, v = (jnp.where(real[:, None], x, 0) for x in (k, v))
        q, k, v = (x.reshape(len(x), self.local.heads, -1) for x in (q, k, v))
        logits = jnp.log(2.0) * jnp.einsum("qnd,knd->nqk", q, k, precision="highest")
        weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
        return jnp.einsum("nqk,knd->qnd", weights, v, precision="highest").reshape(len(q), -1)

    def attend(self, scores: jax.Array, kept: int) -> Attempt[jax.Array]:
        """Try the same by kernels, in the dtype of q."""
        tiles, local, (first_q, first_k, first_v) = self.tiles, self.local, self.local.first_heads
        q, k, v, inside = local.q, local.k, local.v, self.tiles.whole * ROWS
        others, dense = tiles.video_rows - inside, tiles.rows - tiles.video_rows
        # Tiles of queries: whole ones in place, and copies of the others, which are few.
        rows = inside if self._has_all else len(q)
        queries = [(Part(q, rows, first_q), local.first_query // ROWS, tiles.whole)] * (tiles.whole > 0)
        if others:
            few = local.select(self._take(q, inside, others), first_q)
            few = _pad_tiles(few, tiles.sizes[tiles.whole : tiles.video], repeats=False)
            queries.append((Part(few, len(few)), tiles.whole, tiles.video))
        lists, lengths = self._list_keys(scores, kept, queries)
        of_tiles = try_tile_attention(
            [part for part, *_ in queries],
            self._part_keys(k, first_k, repeats=True),
            self._part_keys(v, first_v, repeats=False),
            lists,
            lengths,
            jnp.concatenate([self._dense_counts, jnp.asarray(tiles.sizes[: tiles.video], jnp.int32)]),
            heads=local.heads,
            width=local.width,
            interpret=local.interpret,
        )
        # The segments that aren't video attend to all keys.
        attend_to_all = functools.partial(
            attention_part,
            self._take(q, tiles.video_rows, dense),
            k,
            v,
            heads=local.heads,
            width=local.width,
            kv_len=local.kv_len,
            platform=local.platform,
            first_heads=local.first_heads,
        )

        def join(results: list[jax.Array], to_all: jax.Array) -> jax.Array:
            out = results[0] if tiles.whole else jnp.zeros((len(q), local.heads * local.width), q.dtype)
            if others:
                own = _cut_tiles(results[-1], tiles.sizes[tiles.whole : tiles.video])
                out = self._overwrite(out, inside, own)
            # Rows behind all tiles weren't computed, and nothing may read what lies there.
            padding = len(q) - tiles.rows if self._has_all else 0
            return self._overwrite(out, tiles.video_rows, jnp.pad(to_all, ((0, padding), (0, 0))))

        to_all, right = attend_to_all()
        return Attempt(
            join(of_tiles.result, to_all),
            of_tiles.right & right,
            lambda: join(of_tiles.again(), attend_to_all(softmax="online")[0]),
        )

    @property
    def _has_all(self) -> bool:
        """Whether this device has all queries."""
        return isinstance(self.local.first_query, int) and self.local.first_query == 0

    @property
    def _dense_counts(self) -> jax.Array:
        """The number of real rows of each 64 rows that aren't video, int32."""
        starts = np.arange(self.tiles.video_rows, self.tiles.rows, ROWS)
        return jnp.clip(self.local.kv_len - starts, 0, ROWS).astype(jnp.int32)

    def _list_keys(
        self, scores: jax.Array, kept: int, queries: Sequence[tuple[Part, int | jax.Array, int]]
    ) -> tuple[jax.Array, jax.Array]:
        """Return the lists of `tile_attention` and their lengths.

        Keys are those that aren't video, 64 rows at a time, and the video's tiles.

        Args:
            scores: [N, T, T].
            kept: How many of the video's tiles a tile attends to.
            queries: Parts of the queries, the first tile of each, and the tile before which it ends.
        """
        video, dense = self.tiles.video, self._dense_counts
        starts, sizes = (jnp.asarray(x[:video], jnp.int32) for x in (self.tiles.starts, self.tiles.sizes))
        # A tile of which this device has no row isn't computed.
        here = (starts < self.local.first_query + len(self.local.q)) & (starts + sizes > self.local.first_query)
        choices, used = list[jax.Array](), list[jax.Array]()
        for part, first, last in queries:
            count = -(-part.rows // STEP) * STEP // ROWS
            room = jnp.pad(scores[:, :last, :video], ((0, 0), (0, count), (0, 0)))
            choices.append(jax.lax.dynamic_slice_in_dim(room, first, count, axis=1))
            used.append(jax.lax.dynamic_slice_in_dim(jnp.pad(here[:last], (0, count)), first, count))
        choice = jnp.concatenate(choices, axis=1).swapaxes(1, 2)
        shared = jnp.where(dense > 0, jnp.inf, -jnp.inf)
        shared = jnp.broadcast_to(shared[:, None], (self.local.heads, len(dense), choice.shape[2]))
        most, chosen = kept + len(dense), kept + jnp.sum(dense > 0)
        choose = functools.partial(pair_lists, interpret=self.local.interpret)
        lists, lengths = choose(jnp.concatenate([shared, choice], axis=1), most, chosen)
        return lists, jnp.where(jnp.concatenate(used).reshape(-1, 2).any(axis=1), lengths, 0)

    def _part_keys(self, x: jax.Array, first: int, *, repeats: bool) -> list[Part]:
        """Return the parts of K or V that `tile_attention` reads; padding repeats a tile's first row, or is zero."""
        tiles, inside = self.tiles, self.tiles.whole * ROWS
        dense = self.local.select(x[tiles.video_rows : tiles.rows], first)
        dense = jnp.pad(dense, ((0, -len(dense) % ROWS), (0, 0))).reshape(-1, ROWS, dense.shape[1])
        real = jnp.arange(ROWS)[:, None] < self._dense_counts[:, None, None]
        dense = jnp.where(real, dense, jnp.where(real[:, :1], dense[:, :1], 0) if repeats else 0)
        parts = [Part(dense.reshape(-1, dense.shape[2]), dense.shape[0] * ROWS)]
        if inside:
            parts.append(Part(x, inside, first))
        if tiles.video_rows > inside:
            others = _pad_tiles(
                self.local.select(x[inside : tiles.video_rows], first),
                tiles.sizes[tiles.whole : tiles.video],
                repeats=repeats,
            )
            parts.append(Part(others, len(others)))
        return parts

    # ---- Ranges of the sequence's rows, of which a device may have a part.

    def _take(self, x: jax.Array, first: int, rows: int) -> jax.Array:
        """Return a range of the rows of all queries; those of other devices are zero."""
        if self._has_all:
            return x[first : first + rows]
        count, start, offset = self._find(first, rows)
        room = jnp.zeros((rows + 2 * count, x.shape[1]), x.dtype)
        here = jax.lax.dynamic_slice_in_dim(x, start, count)
        return jax.lax.dynamic_update_slice_in_dim(room, here, offset + count, axis=0)[count : count + rows]

    def _overwrite(self, x: jax.Array, first: int, new: jax.Array) -> jax.Array:
        """Replace a range of the rows of all queries, as far as this device has them."""
        if self._has_all:
            return jax.lax.dynamic_update_slice_in_dim(x, new, first, axis=0)
        count, start, offset = self._find(first, len(new))
        row = offset + jnp.arange(count)
        values = jax.lax.dynamic_slice_in_dim(jnp.pad(new, ((count, count), (0, 0))), offset + count, count)
        old = jax.lax.dynamic_slice_in_dim(x, start, count)
        values = jnp.where(((row >= 0) & (row < len(new)))[:, None], values, old)
        return jax.lax.dynamic_update_slice_in_dim(x, values, start, axis=0)

    def _find(self, first: int, rows: int) -> tuple[int, jax.Array, jax.Array]:
        """Return how many of this device's rows may be in a range, the first of them, and its index in the range."""
        count = min(rows, len(self.local.q))
        start = jnp.clip(first - self.local.first_query, 0, len(self.local.q) - count)
        return count, start, jnp.clip(self.local.first_query + start - first, -count, rows)


def _pad_tiles(x: jax.Array, sizes: np.ndarray, *, repeats: bool) -> jax.Array:
    """Return 64 rows for each tile, given its number of rows: its own, and copies of the first or zeros."""
    parts = []
    for count, size, start in _list_sizes(sizes):
        own = x[start : start + count * size].reshape(count, size, -1)
        shape = count, ROWS - size, own.shape[2]
        padding = jnp.broadcast_to(own[:, :1], shape) if repeats else jnp.zeros(shape, x.dtype)
        parts.append(jnp.concatenate([own, padding], axis=1).reshape(count * ROWS, -1))
    return jnp.concatenate(parts)


def _cut_tiles(x: jax.Array, sizes: np.ndarray) -> jax.Array:
    """Return the tiles' own rows, given 64 for each."""
    parts, start = [], 0
    for count, size, _ in _list_sizes(sizes):
        padded = x[start : start + count * ROWS].reshape(count, ROWS, -1)
        parts.append(padded[:, :size].reshape(count * size, -1))
        start += count * ROWS
    return jnp.concatenate(parts)


def _list_sizes(sizes: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield how many neighbouring tiles have a size, the size, and where their rows begin."""
    start = 0
    for size, group in itertools.groupby(sizes.tolist()):
        count = len(list(group))
        yield count, size, start
        start += count * size
