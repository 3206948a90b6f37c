"""Self-attention over tokens that are spread over devices, with what is sent behind what is computed.

To be called inside `jax.shard_map`. All-to-all over 'tp', or all of `TokenLayout.head_axes`, turns "some tokens of all
heads" into "more tokens of some heads"; what other axes hold of K and V is gathered (1/G of the heads by then).

Values are sent while queries are made, and queries while keys are. Then attention runs in three rounds. The first has
as few heads as fill a register: the others' keys come while it is computed. In the second the first one's results are
sent back, and in the third, of few heads again, the second one's. Left to itself the compiler would send all this one
after the other, before and after attention: barriers say what has to be there when.

Shapes: L tokens, N heads, D head width, t tokens of one device, G head groups.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from wan_tpu.ops.attention import attention_part
from wan_tpu.ops.sparse_linear import SparseLinear, sparse_linear_attention
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.mesh import AXES, axis_size
from wan_tpu.switches import is_synchronous, uses_kernel
from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.flash_attention import LowPrecision, repeat_if

TILE_ROWS = 16  # of bfloat16 in a TPU's registers

T = TypeVar("T")
_Back = tuple[jax.Array, jax.Array | None]


def head_groups(mesh: Mesh, heads: int, axes: tuple[str, ...] = ("tp",)) -> int:
    """Return into how many groups heads are split over axes in self-attention: all of 'tp' (see `make_mesh`)."""
    return math.gcd(heads, axis_size(mesh, axes))


def key_parts(mesh: Mesh, heads: int, width: int, axes: tuple[str, ...] = ("tp",)) -> tuple[int, ...]:
    """Return the columns of a device's keys that are sent at once, for heads of that width, split over axes.

    First as few as fill a register, since nothing hides how they come; all where nothing is sent.
    """
    columns, unit = heads // head_groups(mesh, heads, axes) * width, max(LANES, width)
    if axis_size(mesh, axes) == 1 or columns < 2 * unit or columns % unit:
        return (columns,)
    return unit, columns - unit


@dataclass(frozen=True)
class Projections:
    """What makes queries, keys and values of rows [t, C], which may be `wan_tpu_kernels.low_precision.Rounded`.

    query, value  -> [G, t, N*D/G], queries times `query_scale`: heads in groups, one for each device that splits them
                  ([t, N*D] where that is one)
    key           -> the same in one part or two, as `key_parts` has it: of every group a part of its heads
    """

    query: Callable[[Any], jax.Array]
    key: Callable[[Any], tuple[jax.Array, ...]]
    value: Callable[[Any], jax.Array]


class ReplicatedTokens(NamedTuple):
    """Tokens that every device of a branch has, of which a device takes its own heads alone: [K, N*D/G] each.

    after  how many tokens of those that are spread come before them; what lies behind in the spread ones is padding
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    after: int


class AttentionOutput(NamedTuple):
    """What attention gives.

    tokens   this device's, [G, t, columns] by rounds, of every group a part of its heads
    others   the other tokens' of this device's heads, [K, N*D/G]; None where there are none
    beside   the weights that were gathered
    """

    tokens: tuple[jax.Array, ...]
    others: jax.Array | None
    beside: Params


def exchanged_attention(
    rows: Any,
    make: Projections,
    *,
    heads: int,
    kv_len: int | jax.Array,
    token_axes: tuple[str, ...],
    head_axes: tuple[str, ...] = ("tp",),
    platform: str,
    beside: Sequence[Params] = (),
    others: ReplicatedTokens | None = None,
    sparse: SparseLinear | None = None,
    qk: LowPrecision | None = None,
) -> AttentionOutput:
    """Attend with what `make` makes of this device's rows [t, C].

    token_axes  mesh axes the tokens lie on, slowest first, `head_axes` last (`TokenLayout`)
    kv_len      tokens that count, of all devices together and the others; padding lies behind them
    beside      weights of what follows, by rounds: whatever gathers them goes on while a round is computed
    sparse      not to all keys; kv_len is a number then, and there are no others
    qk          8-bit logits; kv_len is a number then
    """
    assert token_axes[-len(head_axes) :] == head_axes
    given = _sent(rows, make, heads, kv_len, token_axes[: -len(head_axes)], head_axes, platform, others)
    apart = token_axes[: -len(head_axes)]
    before = jax.lax.axis_index(apart) * len(given.q) if apart else 0
    given = dataclasses.replace(given, qk=qk, sparse=sparse, first_query=before)
    if is_synchronous():  # All has come before attention begins, and each round's result is there before the next.
        q, k, v = _barrier((given.q, given.k, given.v))
        given = dataclasses.replace(given, q=q, k=k, v=v)
    found: list[_Back] = []
    right, gathered = [], dict[str, jax.Array]()
    for number in range(len(given.rounds)):
        mixed, fine = given.attend(number, "optimistic")
        weights = beside[number] if number < len(beside) else {}
        mixed, fine, weights, later, found = _barrier((mixed, fine, weights, given.k[1:], found))
        given = dataclasses.replace(given, k=[given.k[0], *later])
        found.append(_back(*mixed, head_axes))
        if is_synchronous():
            found, q = _barrier((found, given.q))
            given = dataclasses.replace(given, q=q)
        right.append(fine)
        gathered |= weights
    for weights in beside[len(given.rounds) :]:
        gathered |= weights
    # Sparse attention repeats what is wrong by itself: nothing is exchanged in it.
    if not uses_kernel("attention", platform) or sparse is not None:
        return _joined(found, gathered)
    # All devices repeat it or none does: there are exchanges in it.
    wrong = jax.lax.psum((~jnp.stack(right).all()).astype(jnp.int32), AXES) > 0

    def again() -> tuple[_Back, ...]:
        return tuple(_back(*given.attend(number, "online")[0], head_axes) for number in range(len(given.rounds)))

    return _joined(repeat_if(wrong, tuple(found), again), gathered)


def _joined(found: Sequence[_Back], gathered: Params) -> AttentionOutput:
    rest = [other for _, other in found if other is not None]
    return AttentionOutput(tuple(own for own, _ in found), jnp.concatenate(rest, axis=1) if rest else None, gathered)


@dataclass(frozen=True)
class _Given:
    """All tokens of a device's heads: q, v [L, N*D/G]; k in parts; others: queries [K, N*D/G]; rounds' heads."""

    q: jax.Array
    k: list[jax.Array]
    v: jax.Array
    others: jax.Array | None
    width: int
    kv_len: int | jax.Array
    platform: str
    sparse: SparseLinear | None = None
    first_query: int | jax.Array = 0  # of all tokens, the one that is the first of q
    qk: LowPrecision | None = None

    @property
    def rounds(self) -> list[int]:
        few, *rest = (part.shape[1] // self.width for part in self.k)
        return [few, *(n for n in (rest[0] - few, few) if n)] if rest else [few]

    def attend(self, number: int, softmax: Literal["optimistic", "online"]) -> tuple[_Back, jax.Array]:
        """Return a round's result, [L, columns] and the others', and whether it is right."""
        first = sum(self.rounds[:number])
        part, first_key = (self.k[1], first - self.rounds[0]) if number else (self.k[0], 0)
        if self.sparse is not None:
            assert self.others is None and isinstance(self.kv_len, int)
            mixed = sparse_linear_attention(
                self.q,
                part,
                self.v,
                self.sparse,
                heads=self.rounds[number],
                first_heads=(first, first_key, first),
                kv_len=self.kv_len,
                first_query=self.first_query,
                platform=self.platform,
            )
            return (mixed, None), jnp.asarray(True)

        def attended(q: jax.Array) -> tuple[jax.Array, jax.Array]:
            return attention_part(
                q,
                part,
                self.v,
                heads=self.rounds[number],
                first_heads=(first, first_key, first),
                width=self.width,
                kv_len=self.kv_len,
                platform=self.platform,
                softmax=softmax,
                qk=self.qk,
            )

        mixed, right = attended(self.q)
        if self.others is None:
            return (mixed, None), right
        # By themselves: few, but to append them to the queries and to cut them off again moves all of these.
        other, fine = attended(self.others)
        return (mixed, other), right & fine


def _sent(
    rows: Any,
    make: Projections,
    heads: int,
    kv_len: int | jax.Array,
    apart: tuple[str, ...],
    head_axes: tuple[str, ...],
    platform: str,
    others: ReplicatedTokens | None,
) -> _Given:
    """Make values, queries and keys of rows in this order, each sent while the next are made; apart: not exchanged."""

    def sent(x: jax.Array, *, gathered: bool) -> jax.Array:
        x = _exchange(x, head_axes).reshape(-1, x.shape[2]) if x.ndim == 3 else x
        return jax.lax.all_gather(x, apart, axis=0, tiled=True) if gathered and apart else x

    own, rows = _barrier((make.value(rows), rows))
    v = sent(own, gathered=True)
    v, own, rows = _barrier((v, make.query(rows), rows))
    q = sent(own, gathered=False)
    q, parts = _barrier((q, make.key(rows)))
    k = [sent(part, gathered=True) for part in parts]
    width = q.shape[1] * _size(head_axes) // heads
    if others is not None:
        starts = [sum(part.shape[1] for part in k[:number]) for number in range(len(k))]
        k = [
            _followed(part, others.k[:, start : start + part.shape[1]], others.after)
            for part, start in zip(k, starts, strict=True)
        ]
        v = _followed(v, others.v, others.after)
    return _Given(q, k, v, None if others is None else others.q, width, kv_len, platform)


def _followed(rows: jax.Array, others: jax.Array, after: int) -> jax.Array:
    """Return rows with others after the first `after`, each written once: XLA's own way to join them takes longer.

    Whole tiles are written: amid one, libtpu 0.0.50.1 breaks off.
    """
    start = after - after % TILE_ROWS
    others = jnp.concatenate([rows[start:after], others]) if start < after else others
    room = jax.lax.empty((max(len(rows), start + len(others)), rows.shape[1]), rows.dtype)
    for part, at in ((rows, 0), (others, start)):
        room = jax.lax.dynamic_update_slice(room, part, (at, 0))
    return room


def _back(mixed: jax.Array, other: jax.Array | None, axes: tuple[str, ...]) -> _Back:
    """[L, columns] of this device's heads -> [G, t, columns] of its tokens; the others' stay."""
    groups = _size(axes)
    return mixed if groups == 1 else _exchange(mixed.reshape(groups, -1, mixed.shape[1]), axes), other


def _exchange(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[G, ...] for each destination -> [G, ...] from each source."""
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def _barrier(values: T) -> T:
    """Return values of which none is used before all are there."""
    return jax.lax.optimization_barrier(values)
