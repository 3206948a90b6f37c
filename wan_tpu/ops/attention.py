"""Attention behind one function: the platform picks the implementation, shapes and mesh pick the exchange.

Arrays are token-major, [L, N*D]: as projections leave them, and as the TPU kernel reads them without a transpose.
Shapes: L tokens, N heads, D head width, t tokens of one device, G head groups.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kernels.blocks import LANES
from kernels.flash_attention import flash_attention, flash_attention_unchecked, repeated_if
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.mesh import AXES

# Query rows whose scores are formed at once on CPU: with 2,000 keys 256 rows of float32 scores are 2 MB, which
# stays in the cache of one core. Measured: 55 ms against 125 ms in one piece (2x4 heads, 2,000 tokens, D=128).
CPU_QUERY_BLOCK = 256
T = TypeVar("T")


def query_scale(head_width: int) -> float:
    """Return what queries are multiplied with while still float32, so that attention is softmax to the base of two."""
    return head_width**-0.5 * math.log2(math.e)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, heads: int, platform: str, kv_len: int | None = None
) -> jax.Array:
    """Return full attention, sum_j 2^(q.k_j) v_j / sum_j 2^(q.k_j), on one device.

    q [Lq, N*D], times `query_scale`; k, v [Lk, N*D] -> [Lq, N*D], in the dtype of q. Keys from `kv_len` on don't count.
    """
    scale = math.log(2)
    if platform == "tpu":
        return flash_attention(q, k, v, heads=heads, kv_len=kv_len, scale=scale)
    q, k, v = (x.reshape(x.shape[0], heads, -1) for x in (q, k[:kv_len], v[:kv_len]))
    mixed = _gpu(q, k, v, scale) if platform == "gpu" else _blockwise(q, k, v, scale)
    return mixed.reshape(mixed.shape[0], -1)


def head_groups(mesh: Mesh, heads: int) -> int:
    """Return into how many groups heads are split over 'tp' in self-attention: all of 'tp' (see `make_mesh`)."""
    return math.gcd(heads, mesh.shape["tp"])


def key_parts(mesh: Mesh, heads: int, width: int) -> tuple[int, ...]:
    """Return the columns of a device's keys that are sent at once, for heads of that width (see `exchanged_attention`).

    First as few as fill a register, since nothing hides how they come; all where nothing is sent.
    """
    columns, unit = heads // head_groups(mesh, heads) * width, max(LANES, width)
    if mesh.shape["tp"] == 1 or columns < 2 * unit or columns % unit:
        return (columns,)
    return unit, columns - unit


def exchanged_attention(
    rows: jax.Array,
    *,
    query: Callable[[jax.Array], jax.Array],
    key: Callable[[jax.Array], tuple[jax.Array, ...]],
    value: Callable[[jax.Array], jax.Array],
    heads: int,
    kv_len: int,
    token_axes: tuple[str, ...],
    platform: str,
    beside: Sequence[Params] = (),
) -> tuple[tuple[jax.Array, ...], Params]:
    """Attend over tokens that are spread over devices; to be called inside `jax.shard_map`.

    rows          what the projections are made of, [t, C]
    query, value  rows -> [G, t, N*D/G], queries times `query_scale`: this device's tokens, heads in groups, one for
                  each device on 'tp' ([t, N*D] where 'tp' has size 1)
    key           the same in one part or two, as `key_parts` has it: of every group a part of its heads
    token_axes    mesh axes the tokens lie on, slowest first, 'tp' last
    kv_len        tokens that count, of all devices together
    beside        weights of what follows, by rounds: whatever gathers them goes on while a round is computed
    Returns this device's tokens, of every group a part of its heads by rounds, and the weights.

    All-to-all over 'tp' turns "some tokens of all heads" into "more tokens of some heads"; what other axes hold of
    K and V is gathered (K and V are 1/G of the heads by then). Padding lies behind the last token. Values are sent
    while queries are made, queries while keys are, but for those of a round of few heads. While these are attended with
    the others come; in the second round the first one's results are sent back, and in the third, of few heads again,
    the second one's. Left to itself the compiler would send them one after the other, before
    and after all of this: barriers say what has to be there when.
    """
    *others, last = token_axes
    assert last == "tp"
    groups = jax.lax.axis_size("tp")

    def sent(x: jax.Array, *, gathered: bool) -> jax.Array:
        x = _exchange(x).reshape(-1, x.shape[2]) if x.ndim == 3 else x
        return jax.lax.all_gather(x, tuple(others), axis=0, tiled=True) if gathered and others else x

    own, rows = _barrier((value(rows), rows))
    v = sent(own, gathered=True)
    v, own, rows = _barrier((v, query(rows), rows))
    q = sent(own, gathered=False)
    q, parts = _barrier((q, key(rows)))
    k = [sent(part, gathered=True) for part in parts]
    head = q.shape[1] * groups // heads
    few, *rest = (part.shape[-1] // head for part in k)
    sizes = [few, *(n for n in (rest[0] - few, few) if n)] if rest else [few]

    def attend(number: int, softmax: Literal["optimistic", "online"]) -> tuple[jax.Array, jax.Array]:
        own, first = sizes[number], sum(sizes[:number])
        keys, first_key = (k[1], first - few) if number else (k[0], 0)
        if platform == "tpu":
            return flash_attention_unchecked(
                q,
                keys,
                v,
                heads=own,
                first_heads=(first, first_key, first),
                width=head,
                scale=math.log(2),
                kv_len=kv_len,
                softmax=softmax,
            )
        mine = (x[:, start * head : (start + own) * head] for x, start in ((q, first), (keys, first_key), (v, first)))
        return attention(*mine, heads=own, platform=platform, kv_len=kv_len), jnp.asarray(True)

    def back(mixed: jax.Array) -> jax.Array:
        return mixed if groups == 1 else _exchange(mixed.reshape(groups, -1, mixed.shape[1]))

    found: list[jax.Array] = []
    right, gathered = [], dict[str, jax.Array]()
    for number in range(len(sizes)):
        mixed, fine = attend(number, "optimistic")
        weights = beside[number] if number < len(beside) else {}
        mixed, fine, weights, k[1:], found = _barrier((mixed, fine, weights, k[1:], found))
        found.append(back(mixed))
        right.append(fine)
        gathered |= weights
    for weights in beside[len(sizes) :]:
        gathered |= weights
    if platform != "tpu":
        return tuple(found), gathered
    # All devices repeat it or none does: there are exchanges in it.
    wrong = jax.lax.psum((~jnp.stack(right).all()).astype(jnp.int32), AXES) > 0

    def again() -> tuple[jax.Array, ...]:
        return tuple(back(attend(number, "online")[0]) for number in range(len(sizes)))

    return repeated_if(wrong, tuple(found), again), gathered


def _exchange(x: jax.Array) -> jax.Array:
    """[G, ...] for each destination -> [G, ...] from each source."""
    return jax.lax.all_to_all(x, "tp", split_axis=0, concat_axis=0, tiled=True)


def _barrier(values: T) -> T:
    """Return values of which none is used before all are there."""
    return jax.lax.optimization_barrier(values)


def _gpu(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    fused = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn" if fused else "xla")


def _blockwise(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """Plain XLA, a block of query rows at a time; rows are padded to whole blocks, keys never are. [L, N, D]."""
    length, heads, width = q.shape
    keys, values = k.transpose(1, 2, 0), v.transpose(1, 0, 2)  # [N, D, Lk], [N, Lk, D]

    def rows(block: jax.Array) -> jax.Array:
        scores = jnp.einsum("nqd,ndk->nqk", block, keys, preferred_element_type=jnp.float32) * scale
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        mixed = jnp.einsum("nqk,nkd->nqd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return (mixed / total).astype(q.dtype)

    queries = q.transpose(1, 0, 2)
    if length <= 2 * CPU_QUERY_BLOCK:
        return rows(queries).transpose(1, 0, 2)
    count = -(-length // CPU_QUERY_BLOCK)
    padded = jnp.pad(queries, ((0, 0), (0, count * CPU_QUERY_BLOCK - length), (0, 0)))
    blocks = padded.reshape(heads, count, CPU_QUERY_BLOCK, width).transpose(1, 0, 2, 3)
    mixed = jax.lax.map(rows, blocks).transpose(1, 0, 2, 3)
    return mixed.reshape(heads, -1, width)[:, :length].transpose(1, 0, 2)
