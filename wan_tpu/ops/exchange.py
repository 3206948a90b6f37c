"""Self-attention over tokens that are spread over devices, with transfers hidden behind computation.

These functions are called inside `jax.shard_map`. All-to-all over 'tp', or over all of `TokenLayout.head_axes`, turns
"some tokens of all heads" into "more tokens of some heads"; the parts of K and V on other axes are gathered (1/G of the
heads by then).

Values are sent while queries are computed, and queries while keys are computed. Then attention runs in three rounds.
The first has as few heads as fill a register: the other heads' keys arrive while it is computed. During the second
round, the results of the first are sent back, and during the third, which again has few heads, those of the second.
Left to itself, the compiler would send all this sequentially, before and after attention; barriers specify what must
have arrived when.

Keys and queries may swap places. If keys are gathered as well, the first round then hides the gathering of the other
keys and the exchange of the other queries: one transfer of each kind at the same time, not one after the other.

Shapes: L tokens, N heads, D head width, t tokens of one device, G head groups, K tokens that every device has.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from wan_tpu.ops.attention import attention_part
from wan_tpu.ops.collectives import SplitWeight, gather_rows
from wan_tpu.ops.local_heads import LocalHeads
from wan_tpu.ops.sparse_linear import SparseLinear, sparse_linear_attention
from wan_tpu.ops.tiles import Tiles
from wan_tpu.ops.video_sparse import VideoSparse, video_sparse_attention
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.mesh import AXES, axis_size
from wan_tpu.switches import is_synchronous, uses_kernel
from wan_tpu_kernels.attempt import Attempt
from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.flash_attention import repeat_if
from wan_tpu_kernels.flash_operands import LowPrecision

TILE_ROWS = 16  # Rows of bfloat16 in a tile of a TPU's registers.

T = TypeVar("T")


class _RoundResult(NamedTuple):
    """A round's result for spread tokens, for replicated ones, and for the tiles of each group's tokens."""

    tokens: jax.Array
    replicated: jax.Array | None = None
    tiles: jax.Array | None = None


def head_groups(mesh: Mesh, heads: int, axes: tuple[str, ...] = ("tp",)) -> int:
    """Return the number of groups that heads are split into over `axes` in self-attention: all of 'tp' by default."""
    return math.gcd(heads, axis_size(mesh, axes))


def key_parts(mesh: Mesh, heads: int, width: int, axes: tuple[str, ...] = ("tp",)) -> tuple[int, ...]:
    """Return the columns of each part of a device's keys, which are sent one part at a time.

    The first part has only as many as fill a register, because nothing hides its transfer. If nothing is sent, a single
    part has all columns.
    """
    columns, unit = heads // head_groups(mesh, heads, axes) * width, max(LANES, width)
    if axis_size(mesh, axes) == 1 or columns < 2 * unit or columns % unit:
        return (columns,)
    return unit, columns - unit


@dataclass(frozen=True)
class Projections:
    """Functions that compute queries, keys and values of rows [t, C], which may be `Rounded`.

    Attributes:
        query, key, value: Return [G, t, N*D/G], queries times `query_scale`: heads in groups, one for each device that
            splits them ([t, N*D] if there is one).
        last: What is computed last, "key" or "query". That function returns its result in one part or two, as in
            `key_parts`: each has a part of every group's heads. If queries are last, keys may be in parts, too.
    """

    query: Callable[[Any], Any]
    key: Callable[[Any], Any]
    value: Callable[[Any], jax.Array]
    last: Literal["key", "query"] = "key"


class ReplicatedTokens(NamedTuple):
    """Tokens that every device of a branch has, each device with its own heads: [K, N*D/G] each.

    Attributes:
        q, k, v: Their queries, keys and values.
        after: How many of the spread tokens come before them; spread tokens after them are padding.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    after: int


class AttentionOutput(NamedTuple):
    """The result of attention.

    Attributes:
        tokens: The result for this device's tokens, [G, t, columns] for each round, a part of every group's heads.
        replicated: The result for the replicated tokens, for this device's heads, [K, N*D/G]; None if there are none.
        gathered: The weights that were gathered.
        tiles: The coarse result of video sparse attention, [G, W, columns] for each round, for the tiles of this
            device's rows (`Tiles.list_windows`); otherwise none.
    """

    tokens: tuple[jax.Array, ...]
    replicated: jax.Array | None
    gathered: Params
    tiles: tuple[jax.Array, ...] = ()


def exchanged_attention(
    rows: Any,
    projections: Projections,
    *,
    heads: int,
    kv_len: int | jax.Array,
    token_axes: tuple[str, ...],
    head_axes: tuple[str, ...] = ("tp",),
    platform: str,
    to_gather: Sequence[Mapping[str, Any]] = (),
    replicated: ReplicatedTokens | None = None,
    sparse: SparseLinear | VideoSparse | None = None,
    qk: LowPrecision | None = None,
    pv: LowPrecision | None = None,
) -> AttentionOutput:
    """Attend with the queries, keys and values of this device's rows [t, C].

    Args:
        rows: [t, C].
        projections: Compute queries, keys and values of the rows.
        heads: N.
        kv_len: Number of real tokens on all devices and in `replicated`; padding follows them.
        token_axes: Mesh axes that tokens are spread over, slowest first, `head_axes` last (`TokenLayout`).
        head_axes: Mesh axes that split heads during attention.
        platform: "tpu", "gpu" or "cpu".
        to_gather: Weights of later layers, one mapping per round: their gathering continues while that round is
            computed, and for a `SplitWeight` it also begins with the round. There are as many rounds if there are
            enough heads, and at least three.
        replicated: Tokens that every device has.
        sparse: Attends to some keys only; no tokens are replicated. With a linear part, kv_len is a Python number.
        qk: An 8-bit type of logits; sparse attention ignores it.
        pv: The same type, if weights and values are multiplied in it, too.
    """
    assert token_axes[-len(head_axes) :] == head_axes
    spread_axes = tuple(axis for axis in token_axes[: -len(head_axes)] if jax.lax.axis_size(axis) > 1)
    tokens = _project_and_send(
        rows, projections, heads, kv_len, spread_axes, head_axes, platform, replicated, len(to_gather)
    )
    before = jax.lax.axis_index(spread_axes) * len(tokens.q[0]) if spread_axes else 0
    sizes = _size(head_axes), _size(token_axes)
    tokens = dataclasses.replace(
        tokens, qk=qk, pv=pv, sparse=sparse, first_query=before, spread_axes=spread_axes, sizes=sizes
    )
    if is_synchronous():  # Everything arrives before attention begins, and each round's result before the next round.
        q, k, v = _barrier((tokens.q, tokens.k, tokens.v))
        tokens = dataclasses.replace(tokens, q=q, k=k, v=v)
    layers = [{name: w.layer for name, w in weights.items() if isinstance(w, SplitWeight)} for weights in to_gather]
    layers += [{}] * (len(tokens.rounds) + 1 - len(layers))
    first_q, first_k, v, layers[0] = _barrier((tokens.q[0], tokens.k[0], tokens.v, layers[0]))
    tokens = dataclasses.replace(tokens, q=[first_q, *tokens.q[1:]], k=[first_k, *tokens.k[1:]], v=v)
    results: list[_RoundResult] = []
    checks, repeats, gathered = [], list[Callable[[], _RoundResult]](), dict[str, jax.Array]()
    for number in range(len(tokens.rounds)):
        attended, right, again = tokens.attend(number)
        repeats.append(again)
        weights = _gather_split(to_gather[number], layers[number]) if number < len(to_gather) else {}
        later = tokens.q[1:], tokens.k[1:]
        attended, right, weights, (queries, keys), results, layers[number + 1] = _barrier(
            (attended, right, weights, later, results, layers[number + 1])
        )
        tokens = dataclasses.replace(tokens, q=[tokens.q[0], *queries], k=[tokens.k[0], *keys])
        results.append(_send_back(attended, head_axes))
        if is_synchronous():
            results, q = _barrier((results, tokens.q))
            tokens = dataclasses.replace(tokens, q=q)
        checks.append(right)
        gathered |= weights
    for number in range(len(tokens.rounds), len(to_gather)):
        gathered |= _gather_split(to_gather[number], layers[number])
    is_right_at_once = pv is not None and sparse is None  # Attention is then "online".
    if is_right_at_once or not uses_kernel("attention" if sparse is None else sparse.kernel, platform):
        return _join_rounds(results, gathered)
    # Either all devices repeat attention or none does, because it exchanges data between devices.
    wrong = jax.lax.psum((~jnp.stack(checks).all()).astype(jnp.int32), AXES) > 0

    def repeat() -> tuple[_RoundResult, ...]:
        return tuple(_send_back(again(), head_axes) for again in repeats)

    return _join_rounds(repeat_if(wrong, tuple(results), repeat), gathered)


def _gather_split(weights: Mapping[str, Any], layers: Mapping[str, jax.Array]) -> Params:
    return {name: w.gather(layers[name]) if isinstance(w, SplitWeight) else w for name, w in weights.items()}


def _join_rounds(results: Sequence[_RoundResult], gathered: Params) -> AttentionOutput:
    replicated = [result.replicated for result in results if result.replicated is not None]
    joined = jnp.concatenate(replicated, axis=1) if replicated else None
    tiles = tuple(result.tiles for result in results if result.tiles is not None)
    return AttentionOutput(tuple(result.tokens for result in results), joined, gathered, tiles)


@dataclass(frozen=True)
class _HeadTokens:
    """All tokens of a device's heads.

    Attributes:
        v: [L, N*D/G].
        q, k: The same in one part or in two: the heads of the first round, and those of the later ones.
        replicated: Queries of the replicated tokens, [K, N*D/G].
        width: D.
        kv_len, platform, sparse, qk, pv: As for `exchanged_attention`.
        spread_axes: The axes of `token_axes` that don't split heads.
        middle: How many rounds there are between the first and the last, if there are enough heads.
        first_query: The index of q's first token among all tokens.
        sizes: The number of groups that split heads, and of devices that tokens are spread over.
    """

    q: list[jax.Array]
    k: list[jax.Array]
    v: jax.Array
    replicated: jax.Array | None
    width: int
    kv_len: int | jax.Array
    platform: str
    middle: int = 1
    sparse: SparseLinear | VideoSparse | None = None
    spread_axes: tuple[str, ...] = ()
    first_query: int | jax.Array = 0
    qk: LowPrecision | None = None
    pv: LowPrecision | None = None
    sizes: tuple[int, int] = (1, 1)

    @property
    def rounds(self) -> list[int]:
        """Number of heads in each round."""
        first, *rest = (part.shape[1] // self.width for part in max(self.q, self.k, key=len))
        if not rest:
            return [first]
        ends = [(rest[0] - first) * n // self.middle for n in range(self.middle + 1)]
        return [first, *(end - start for start, end in itertools.pairwise(ends) if end > start), first]

    def attend(self, number: int) -> Attempt[_RoundResult]:
        """Try a round: its result, [L, columns], and that for the replicated tokens."""
        first = sum(self.rounds[:number])

        def find(parts: list[jax.Array]) -> tuple[jax.Array, int]:
            """Return the part that holds the round's heads, and the index of the first of them in it."""
            return (parts[1], first - self.rounds[0]) if number and len(parts) > 1 else (parts[0], first)

        (queries, first_query), (part, first_key) = find(self.q), find(self.k)
        if self.sparse is not None:
            assert self.replicated is None
            local = LocalHeads(
                queries,
                part,
                self.v,
                heads=self.rounds[number],
                width=self.width,
                kv_len=self.kv_len,
                platform=self.platform,
                first_heads=(first_query, first_key, first),
                first_query=self.first_query,
            )
            if not isinstance(self.sparse, VideoSparse):
                return sparse_linear_attention(local, self.sparse).then(_RoundResult)
            attempt, coarse = video_sparse_attention(local, self.sparse, self.spread_axes)
            tiles = self._share_tiles(coarse, self.sparse.tiles)
            return attempt.then(lambda attended: _RoundResult(attended, tiles=tiles))

        def attend_with(softmax: Literal["optimistic", "online"]) -> tuple[_RoundResult, jax.Array]:
            def attend(q: jax.Array, first_head: int) -> tuple[jax.Array, jax.Array]:
                return attention_part(
                    q,
                    part,
                    self.v,
                    heads=self.rounds[number],
                    first_heads=(first_head, first_key, first),
                    width=self.width,
                    kv_len=self.kv_len,
                    platform=self.platform,
                    softmax=softmax,
                    qk=self.qk,
                    pv=self.pv,
                )

            attended, right = attend(queries, first_query)
            if self.replicated is None:
                return _RoundResult(attended), right
            # The replicated tokens attend separately: appending these few queries and cutting them off again would move
            # all queries.
            other, other_right = attend(self.replicated, first)
            return _RoundResult(attended, other), right & other_right

        return Attempt(*attend_with("optimistic"), lambda: attend_with("online")[0])

    def _share_tiles(self, coarse: jax.Array, tiles: Tiles) -> jax.Array:
        """Return the tiles' results [T, columns] as each group needs them, [G, W, columns]; without G if it is one."""
        groups, devices = self.sizes
        rows = len(self.q[0]) // groups
        firsts, most = tiles.list_windows(rows, devices)
        here = jax.lax.dynamic_slice_in_dim(jnp.asarray(firsts), self.first_query // rows, groups)
        padded = jnp.pad(coarse, ((0, most), (0, 0)))
        shares = [jax.lax.dynamic_slice_in_dim(padded, here[group], most) for group in range(groups)]
        return jnp.stack(shares) if groups > 1 else shares[0]


def _project_and_send(
    rows: Any,
    projections: Projections,
    heads: int,
    kv_len: int | jax.Array,
    spread_axes: tuple[str, ...],
    head_axes: tuple[str, ...],
    platform: str,
    replicated: ReplicatedTokens | None,
    rounds: int,
) -> _HeadTokens:
    """Compute values, queries and keys of rows in this order, each sent while the next are computed.

    Over `spread_axes`, nothing is exchanged: values and keys are gathered.
    """

    def send(x: jax.Array) -> jax.Array:
        return _exchange(x, head_axes).reshape(-1, x.shape[2]) if x.ndim == 3 else x

    def gather(x: jax.Array) -> jax.Array:
        return gather_rows(x, spread_axes, platform)

    def project(name: Literal["key", "query"]) -> tuple[jax.Array, ...]:
        parts = getattr(projections, name)(rows)
        return parts if isinstance(parts, tuple) else (parts,)

    values, rows = _barrier((projections.value(rows), rows))
    v, parts, rows = _barrier((send(values), project("query" if projections.last == "key" else "key"), rows))
    v, earlier, parts = _barrier((gather(v), [send(part) for part in parts], project(projections.last)))
    later = [send(part) for part in parts]
    q, k = (earlier, later) if projections.last == "key" else (later, earlier)
    k = [gather(part) for part in k]
    width = sum(part.shape[1] for part in q) * _size(head_axes) // heads
    if replicated is not None:
        starts = [sum(part.shape[1] for part in k[:number]) for number in range(len(k))]
        k = [
            _insert_rows(part, replicated.k[:, start : start + part.shape[1]], replicated.after)
            for part, start in zip(k, starts, strict=True)
        ]
        v = _insert_rows(v, replicated.v, replicated.after)
    middle = max(1, rounds - 2)
    return _HeadTokens(q, k, v, None if replicated is None else replicated.q, width, kv_len, platform, middle)


def _insert_rows(rows: jax.Array, inserted: jax.Array, after: int) -> jax.Array:
    """Insert other rows after the first `after` rows, writing each row once; XLA's own concatenation takes longer.

    Whole tiles are written, because libtpu 0.0.50.1 aborts on a write that starts inside a tile.
    """
    start = after - after % TILE_ROWS
    inserted = jnp.concatenate([rows[start:after], inserted]) if start < after else inserted
    room = jax.lax.empty((max(len(rows), start + len(inserted)), rows.shape[1]), rows.dtype)
    for part, row in ((rows, 0), (inserted, start)):
        room = jax.lax.dynamic_update_slice(room, part, (row, 0))
    return room


def _send_back(result: _RoundResult, axes: tuple[str, ...]) -> _RoundResult:
    """Turn [L, columns] of this device's heads into [G, t, columns] of its tokens; replicated tokens stay."""
    groups, (tokens, replicated, tiles) = _size(axes), result
    if groups == 1:
        return result
    tokens = _exchange(tokens.reshape(groups, -1, tokens.shape[1]), axes)
    return _RoundResult(tokens, replicated, None if tiles is None else _exchange(tiles, axes))


def _exchange(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Turn [G, ...] for each destination into [G, ...] from each source."""
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def _barrier(values: T) -> T:
    """Return the values, none of which is used before all are available."""
    return jax.lax.optimization_barrier(values)
