"""Softmax attention of tiles of 64 queries, each to its own list of tiles of 64 keys.

A matrix unit takes as long for 64 queries as for 128. So two neighbouring tiles of queries are computed at once, for
the union of their lists, and each leaves out the keys of the other: its shift of softmax is infinite for them, which
costs one addition for each 64 keys. Two such pairs, A and B, are computed together (two_blocks.py), and two of these
after each other. Lists are as long as their data says.

K and V come in parts, which lie one behind the other in VMEM, so that a tile of keys is an address. The part that is
the sequence itself is read in place. Others hold what isn't whole tiles, each padded to 64 rows: K with copies of the
tile's first row, and V with zeros. The first row's weight is then counted 64 - n times less, n being the tile's rows.
Queries come in parts, too, and each part has its own result.

Softmax is shifted as in `flash_attention`: "optimistic" shifts by 32 above the largest logit of the first 256 keys, is
checked, and is repeated with "online", the running maximum, where it overflows.

Letters: N heads, D head width, T tiles of keys, P pairs of tiles of queries.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.attempt import Attempt
from wan_tpu_kernels.blocks import MIB
from wan_tpu_kernels.flash_kernel import SUBLANES, Ref
from wan_tpu_kernels.two_blocks import (
    AHEAD,
    BOTH,
    KEYS,
    QUERIES,
    TOGETHER,
    TwoBlocks,
    columns_of,
    gather_rows,
    list_scratch,
    plan_vmem,
)

ROWS = KEYS  # Rows of a tile, of queries as well.
PAIR = QUERIES  # Queries with one list: two tiles.
HALVES = 2  # Groups in a grid step, each of two pairs.
STEP = HALVES * BOTH
BLOCKS = STEP // PAIR  # Lists of a grid step.
UNROLLED = 8  # Chunks of each list that are unrolled; lists are as long as a multiple of it, and one chunk.
UNROLLED_ONLINE = 2  # The same of what is hardly ever run: it compiles in a fraction of the time.
BESIDE = 5 * MIB  # VMEM beside K and V. With it, 362 frames of MiniMax-H3 fit on v7x.
_MEMBERS = 2  # The low bits of an entry, which say which of both tiles of queries has it; the others are the tile.


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["rows", "first"])
@dataclasses.dataclass(frozen=True)
class Part:
    """The first rows of an array [at least rows, columns], and the column at which the first head begins, in heads."""

    array: jax.Array
    rows: int
    first: int = 0


def tile_attention(
    queries: Sequence[Part],
    keys: Sequence[Part],
    values: Sequence[Part],
    lists: jax.Array,
    lengths: jax.Array,
    sizes: jax.Array,
    *,
    heads: int,
    width: int,
    interpret: Any = False,
) -> list[jax.Array]:
    """Compute sum_j 2^(q.k_j) v_j / sum_j 2^(q.k_j) over the rows of the listed tiles.

    Args:
        queries: One or two parts; of the first, the last step may overhang. Their pairs of tiles are numbered in order,
            four in a step of 512 rows.
        keys, values: The same parts of K and V, each of whole tiles.
        lists: int32 [N, P, n]: entries as `pair_lists` makes them. The first one is of both tiles of a pair.
        lengths: int32 [N, P], the number of entries of each list; pairs with none have no result.
        sizes: int32 [T], how many rows of each tile of keys are real.
        heads: N.
        width: D, a multiple of 128.
        interpret: As for `pallas_call`.

    Returns:
        For each part of the queries [its array's rows, N * D], of which its `rows` are computed.

    Raises:
        ValueError: Shapes don't fit.
        NoRoom: K and V don't fit the chip's VMEM.
    """
    arrays = queries, keys, values, lists, lengths, sizes
    return try_tile_attention(*arrays, heads=heads, width=width, interpret=interpret).settle()


def try_tile_attention(
    queries: Sequence[Part],
    keys: Sequence[Part],
    values: Sequence[Part],
    lists: jax.Array,
    lengths: jax.Array,
    sizes: jax.Array,
    *,
    heads: int,
    width: int,
    interpret: Any = False,
) -> Attempt[list[jax.Array]]:
    """Compute the same as `tile_attention` by the fast way."""
    steps = [-(-part.rows // STEP) for part in queries]
    pairs = sum(steps) * BLOCKS
    _check(keys, values, lists, lengths, sizes, (heads, pairs))
    most = -(-lists.shape[2] // TOGETHER) - 1  # Chunks of the longest list behind its first.
    room = (1 + -(-most // UNROLLED) * UNROLLED + UNROLLED) * TOGETHER  # The last iteration computes one more's logits.
    lists = jnp.pad(lists, ((0, 0), (0, 0), (0, room - lists.shape[2])))
    lists = lists.reshape(heads, sum(steps), BLOCKS, -1)
    chunks = -(-jnp.max(lengths.reshape(heads, sum(steps), BLOCKS), axis=2) // TOGETHER)

    def run(online: bool) -> list[jax.Array]:
        unrolled = min(UNROLLED, UNROLLED_ONLINE) if online else UNROLLED
        rows = tuple(part.rows for part in keys)
        settings = _Settings(width, steps[0], rows, -(-most // unrolled), unrolled, online)
        return _run(queries, keys, values, lists, chunks, sizes, settings, heads, steps, interpret)

    *results, check = run(online=False)
    return Attempt(results, jnp.all(jnp.isfinite(check)), lambda: run(online=True)[:-1])


def tile_attention_reference(
    queries: Sequence[Part],
    keys: Sequence[Part],
    values: Sequence[Part],
    lists: jax.Array,
    lengths: jax.Array,
    sizes: jax.Array,
    *,
    heads: int,
    width: int,
) -> list[jax.Array]:
    """Compute the same as `tile_attention` in plain jnp, float32."""

    def join(parts: Sequence[Part], multiple: int) -> jax.Array:
        arrays = [part.array[: part.rows, part.first * width : (part.first + heads) * width] for part in parts]
        arrays = [jnp.pad(x, ((0, -len(x) % multiple), (0, 0))).astype(jnp.float32) for x in arrays]
        return jnp.concatenate(arrays).reshape(-1, heads, width)

    entry = jnp.arange(lists.shape[2]) < lengths[..., None]
    listed = entry[..., None] & (lists[..., None] >> _MEMBERS == jnp.arange(len(sizes)))  # [N, P, n, T]
    members = jnp.stack([lists >> which & 1 for which in range(2)], axis=2)  # [N, P, 2, n]
    chosen = jnp.any(listed[:, :, None] & (members[..., None] > 0), axis=3).reshape(heads, -1, len(sizes))
    real = (jnp.arange(ROWS) < sizes[:, None]).reshape(-1)
    mask = jnp.repeat(jnp.repeat(chosen, ROWS, axis=1), ROWS, axis=2) & real
    q, k, v = join(queries, STEP), join(keys, ROWS), join(values, ROWS)
    logits = jnp.log(2.0) * jnp.einsum("qnd,knd->nqk", q, k, precision="highest")
    weights = jnp.where(mask.any(axis=2, keepdims=True), jax.nn.softmax(jnp.where(mask, logits, -jnp.inf)), 0)
    out = jnp.einsum("nqk,knd->qnd", weights, v, precision="highest").reshape(len(q), -1)
    results, start = [], 0
    for part in queries:
        results.append(out[start : start + len(part.array)].astype(part.array.dtype))
        start += -(-part.rows // STEP) * STEP
    return results


def _check(
    keys: Sequence[Part],
    values: Sequence[Part],
    lists: jax.Array,
    lengths: jax.Array,
    sizes: jax.Array,
    expected: tuple[int, int],
) -> None:
    rows, of_values = ([part.rows for part in parts] for parts in (keys, values))
    if rows != of_values or any(count % ROWS for count in rows):
        raise ValueError(f"keys and values must have the same rows, in tiles of {ROWS}, got {rows} and {of_values}")
    if lists.shape[:2] != expected or lengths.shape != expected:
        raise ValueError(f"lists and lengths must be of {expected}, got {lists.shape} and {lengths.shape}")
    if sizes.shape != (sum(rows) // ROWS,):
        raise ValueError(f"sizes must be of {sum(rows) // ROWS} tiles, got {sizes.shape}")


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The static settings of the kernel.

    Attributes:
        width: D.
        first_steps: Grid steps of the first part of the queries.
        parts: Rows of each part of the keys.
        groups: The most iterations over a list.
        unrolled: The chunks of an iteration.
        online: Whether softmax is "online".
    """

    width: int
    first_steps: int
    parts: tuple[int, ...]
    groups: int
    unrolled: int
    online: bool

    @property
    def starts(self) -> tuple[int, ...]:
        """The row in VMEM at which each part of the keys begins."""
        return tuple(sum(self.parts[:i]) for i in range(len(self.parts)))


def _run(
    queries: Sequence[Part],
    keys: Sequence[Part],
    values: Sequence[Part],
    lists: jax.Array,
    chunks: jax.Array,
    sizes: jax.Array,
    settings: _Settings,
    heads: int,
    steps: Sequence[int],
    interpret: Any,
) -> list[jax.Array]:
    """Run the kernel over all grid steps; return each part's results, and a check, NaN where a row isn't finite."""
    width, rows, dtype = settings.width, sum(settings.parts), keys[0].array.dtype
    buffers, vmem_bytes = plan_vmem(rows, width, dtype, BESIDE)

    def block(index: int, column: int) -> pl.BlockSpec:
        """Return a part's block of rows; while another part is computed, it stays where it is."""
        first, count = (0, steps[0])[index], steps[index]
        return pl.BlockSpec((STEP, width), lambda n, i: (jnp.clip(i - first, 0, count - 1), column + n))

    # Of two tiles that share half of what they keep, the list has three quarters of the longest one's length.
    scores = heads * sum(steps) * STEP * (1 + settings.groups * settings.unrolled) * TOGETHER * ROWS * 3 // 4
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    arrays = [jnp.pad(part.array, ((0, max(0, STEP - len(part.array))), (0, 0))) for part in queries]
    outputs = [jax.ShapeDtypeStruct((len(array), heads * width), array.dtype) for array in arrays]
    *results, check = pl.pallas_call(
        functools.partial(
            _kernel,
            settings=settings,
            counts=(len(queries), len(keys)),
            firsts=[part.first for part in (*keys, *values)],
            buffers=buffers,
        ),
        grid=(heads, sum(steps)),
        in_specs=[
            pl.BlockSpec((None, None, 1, 1), lambda n, i: (n, i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((None, None, *lists.shape[2:]), lambda n, i: (n, i, 0, 0), memory_space=pltpu.SMEM),
            *(block(index, part.first) for index, part in enumerate(queries)),
            *[hbm] * (2 * len(keys)),
        ],
        out_specs=[
            *(block(index, 0) for index in range(len(queries))),
            pl.BlockSpec((None, 1, STEP), lambda n, i: (n, 0, i)),
        ],
        out_shape=[*outputs, jax.ShapeDtypeStruct((heads, 1, sum(steps) * STEP), jnp.float32)],
        scratch_shapes=[
            *[pltpu.VMEM((buffers, rows, width), dtype) for _ in range(2)],
            pltpu.SemaphoreType.DMA((buffers,)),
            *list_scratch(HALVES, width, dtype),
            pltpu.VMEM((AHEAD, TOGETHER * ROWS, BOTH), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * width,
            transcendentals=scores,
            bytes_accessed=2 * (rows + sum(steps) * STEP) * heads * width * dtype.itemsize + 4 * lists.size,
        ),
        interpret=interpret,
        name="tile_attention" + ("_online" if settings.online else ""),
    )(
        chunks[..., None, None],
        (1 + sizes - ROWS).astype(jnp.float32),
        lists,
        *arrays,
        *(part.array for part in (*keys, *values)),
    )
    return [*(result[: len(part.array)] for result, part in zip(results, queries, strict=True)), check]


def _kernel(
    chunks_ref: Ref,
    times_ref: Ref,
    lists_ref: Ref,
    *refs: Ref,
    settings: _Settings,
    counts: tuple[int, int],
    firsts: Sequence[int],
    buffers: int,
) -> None:
    """Run one grid step (n, i): eight tiles of queries of one head."""
    queries, keys = counts
    q_refs, rest = refs[:queries], refs[queries:]
    hbm_refs, rest = rest[: 2 * keys], rest[2 * keys :]
    o_refs, check_ref, (k_ref, v_ref, semaphore, *scratch, logits_ref) = (
        rest[:queries],
        rest[queries],
        rest[queries + 1 :],
    )
    head, step = pl.program_id(0), pl.program_id(1)

    def copies(head: Any) -> list[Any]:
        """Return the copies of a head's K and V."""
        buffer, lists = head % buffers, []
        for number, (ref, first) in enumerate(zip(hbm_refs, firsts, strict=True)):
            start, rows = settings.starts[number % keys], settings.parts[number % keys]
            columns = pl.ds(pl.multiple_of((first + head) * settings.width, settings.width), settings.width)
            target = (k_ref, v_ref)[number // keys].at[buffer, pl.ds(start, rows), :]
            source = ref.at[pl.ds(0, rows), columns]
            lists.append(pltpu.make_async_copy(source, target, semaphore.at[buffer]))
        return lists

    @pl.when(step == 0)
    def _() -> None:
        @pl.when((head == 0) | (buffers == 1))
        def _() -> None:
            for copy in copies(head):
                copy.start()

        for copy in copies(head):
            copy.wait()

        @pl.when((head + 1 < pl.num_programs(0)) & (buffers > 1))
        def _() -> None:
            for copy in copies(head + 1):
                copy.start()

    k_head, v_head = (ref.at[head % buffers] for ref in (k_ref, v_ref))
    halves = list[_Half]()
    for half in range(HALVES):
        both = TwoBlocks(settings.online, *(ref.at[half] for ref in scratch))
        halves.append(_Half(half, lists_ref, times_ref, k_head, v_head, both))
    chunks = chunks_ref[0, 0]

    for half, whole in enumerate(halves):
        rows = slice(half * BOTH, (half + 1) * BOTH)
        q = q_refs[0][rows, :]
        for other in q_refs[1:]:
            q = jnp.where(step < settings.first_steps, q, other[rows, :])
        whole.both.start(q)
    for whole in halves:
        whole.add(whole.logits(0), 0, first=True)
    for i, (whole, chunk) in enumerate(_order(halves, range(1, 1 + settings.unrolled))[:AHEAD]):
        logits_ref[i] = whole.logits(chunk)

    def body(group: jax.Array, nothing: None) -> None:
        # The loop is as long as the longest list may be, so that a plan knows the most that the kernel takes.
        start = 1 + group * settings.unrolled

        @pl.when(start < chunks)
        def _() -> None:
            _add(halves, [start + i for i in range(settings.unrolled)], logits_ref)

    lax.fori_loop(0, settings.groups, body, None)
    _store(halves, o_refs, check_ref, chunks > 0, step < settings.first_steps)


def _store(halves: Sequence["_Half"], o_refs: Sequence[Ref], check_ref: Ref, computed: Any, of_first: Any) -> None:
    """Write the results where they belong; zeros if there is none."""
    for half, whole in enumerate(halves):
        rows = slice(half * BOTH, (half + 1) * BOTH)
        out = jnp.where(computed, whole.both.result(), 0.0).T
        check_ref[:, rows] = jnp.where(computed, whole.both.check(), 0.0)
        for i, ref in enumerate(o_refs):

            @pl.when(of_first if i == 0 else ~of_first)
            def _(ref: Ref = ref, out: jax.Array = out, rows: slice = rows) -> None:
                ref[rows, :] = out.astype(ref.dtype)


def _add(halves: Sequence["_Half"], chunks: Sequence[Any], logits_ref: Ref) -> None:
    """Add the same chunks of all lists, and leave the first logits of as many following chunks in `logits_ref`."""
    units = _order(halves, chunks)
    logits = [logits_ref[i] for i in range(AHEAD)]
    for number, (whole, chunk) in enumerate(units):
        other, later = units[(number + AHEAD) % len(units)]
        if number + AHEAD < len(units):
            logits.append(other.logits(later))
        else:
            logits_ref[number + AHEAD - len(units)] = other.logits(later + len(chunks))
        whole.add(logits.pop(0), chunk)


def _order(halves: Sequence["_Half"], chunks: Sequence[Any]) -> list[tuple["_Half", Any]]:
    """Return what is computed one after the other."""
    return [(whole, chunk) for chunk in chunks for whole in halves]


@dataclasses.dataclass(frozen=True)
class _Half:
    """Two pairs of tiles, A and B, and their lists.

    Attributes:
        half: Which of the grid step's groups this is.
        lists_ref: [4, n], the lists of all groups.
        times_ref: [T] float32, how often each tile's first row counts.
        k_ref, v_ref: All of K and V of the head.
        both: The queries.
    """

    half: int
    lists_ref: Ref
    times_ref: Ref
    k_ref: Ref
    v_ref: Ref
    both: TwoBlocks

    def logits(self, chunk: Any) -> jax.Array:
        """Return S^T [256, 256] float32 in powers of two."""
        return self.both.logits([self._rows(self.k_ref, chunk, block) for block in range(2)])

    def add(self, s: jax.Array, chunk: Any, first: bool = False) -> None:
        """Add a chunk whose logits are S^T [256, 256]."""
        both = self.both
        left_out = [[self._left_out(chunk, block, i) for i in range(TOGETHER)] for block in range(2)]
        if first or both.online:
            largest = [self._largest(s, block, rows) for block, rows in enumerate(left_out)]
            both.move_shift(jnp.concatenate(largest, axis=1), first)
        is_first = lax.broadcasted_iota(jnp.int32, (SUBLANES, PAIR), 0) == 0
        for block in range(2):
            columns = columns_of(block)
            shift, weights, sums = both.shift_ref[:1, columns], [], []
            for i in range(TOGETHER):
                weight = jnp.exp2(s[i * ROWS : (i + 1) * ROWS, columns] - (shift + left_out[block][i]))
                weights.append(weight)
                # Padding is as the first row, and counted too often.
                times = jnp.where(is_first, self.times_ref[self._tile(chunk, block, i)], 1.0)
                sums += [weight[:SUBLANES] * times, weight[SUBLANES:]]
            total = jnp.concatenate(sums, axis=0).reshape(-1, SUBLANES, PAIR)
            both.sum_ref[:, columns] += jnp.sum(total, axis=0)
            both.add(block, jnp.concatenate(weights, axis=0), self._rows(self.v_ref, chunk, block))

    def _largest(self, s: jax.Array, block: int, left_out: Sequence[jax.Array]) -> jax.Array:
        """Return the largest logit of each query of A (0) or B (1), [1, 128]."""
        parts = [s[i * ROWS : (i + 1) * ROWS, columns_of(block)] - rows for i, rows in enumerate(left_out)]
        return jnp.max(jnp.concatenate(parts, axis=0), axis=0, keepdims=True)

    def _left_out(self, chunk: Any, block: int, i: int) -> jax.Array:
        """Return inf for queries whose tile doesn't have a tile of keys in its list, and 0 for others, [1, 128]."""
        # Vectors have slots to spare, scalars none.
        which = jnp.where(lax.broadcasted_iota(jnp.int32, (1, PAIR), 1) < ROWS, 1, 2)
        return jnp.where((self._entry(chunk, block, i) & which) > 0, 0.0, jnp.inf)

    def _rows(self, ref: Ref, chunk: Any, block: int) -> jax.Array:
        """Return the rows [256, D] of K or V that A (0) or B (1) attends to."""
        return gather_rows(ref, [self._tile(chunk, block, i) * ROWS for i in range(TOGETHER)])

    def _tile(self, chunk: Any, block: int, i: int) -> Any:
        return lax.shift_right_logical(self._entry(chunk, block, i), _MEMBERS)

    def _entry(self, chunk: Any, block: int, i: int) -> Any:
        return self.lists_ref[2 * self.half + block, chunk * TOGETHER + i]
