"""Softmax attention of every token of a video to a window around it, which is moved inwards at the borders.

All queries of a box see parts of the same keys, those of the box and its surroundings. A box has 4 x 4 columns of 16
rows, because rows are in sublanes: its keys are then whole registers, in two tiles of 16 rows that begin 8 rows before
the box. Which of them a query sees is a mask, the product of one for each axis; away from the borders it is the same
for all boxes.

Everything is transposed as in `flash_kernel`: S^T = K Q^T [keys, queries] and O^T = V^T P^T. A matrix unit of 256 x 256
takes as long for heads of 64 channels as for 128, so each head's Q has zeros in the lanes of its neighbour. The first
frames of a box's keys are seen by the first half of its queries only, and the last frames by the other half. So the
first frame shares a product with the last but one, and the second with the last: 12 products in place of 14 for
windows of 11 frames, except at the ends of the video.

Softmax isn't shifted: the caller gives a bound of all logits, which norms and their weights imply. Where float32
doesn't span it, the result is computed again with each query's largest logit, which takes a second product.

Letters: T frames, X columns and Y rows of a strip of the picture, N heads, D head width, R columns on either side.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import MIB
from wan_tpu_kernels.flash_attention import repeat_if
from wan_tpu_kernels.flash_kernel import SUBLANES, Ref, dot
from wan_tpu_kernels.tiles import vmem_bytes

FRAMES, COLUMNS, ROWS = 4, 4, 16  # Of a box of queries.
QUERIES = FRAMES * COLUMNS * ROWS
KEY_ROWS, BEFORE = 2 * ROWS, 8  # Rows of its keys, of which so many are before its own.
WIDTH, GROUP = 64, 4  # Channels of a head, and heads that are computed together.
LANES = WIDTH * GROUP
PAIR = 2 * WIDTH  # Lanes of two heads, which a product reads together: those of a register.
HALF = QUERIES // 2  # Queries of the first frames of a box, or of the last ones.
ENDS = FRAMES // 2  # Frames of keys that only the first, or only the last, half of the queries see.
AHEAD = 2  # How many units ahead of their weights logits are computed.
# The largest logit, as a power of two, without a shift. Weights are then between 2^-96 and 2^96, and a sum of less than
# 2^20 of them, also times values of up to 2^10, is within float32's and bfloat16's range.
LARGEST = 96.0
BESIDE = 6 * MIB  # VMEM for logits and the compiler's own use.
BOX = (4, 8, 8)  # Frames, columns and rows of the reference's boxes.

Window = Sequence[int]  # Its frames, columns and rows.


def window_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array | int,
    largest: jax.Array | float,
    *,
    heads: int,
    window: Window,
    width: int,
    interpret: Any = False,
) -> jax.Array:
    """Compute sum_j 2^(q.k_j) v_j / sum_j 2^(q.k_j) over the tokens of each query's window.

    Args:
        q: [T, X, Y, N * D], a strip of the picture's columns.
        k, v: [T, R + X + R, Y, N * D], with R columns on either side, `count_side_columns` or more, which are finite
            also beyond the picture's borders. They may have `count_key_rows(Y)` rows, which begin with 8 and end with 8
            or more that are no keys, and finite.
        first: Which column of the picture q's first one is; columns beyond the picture have no result.
        largest: No |q.k_j| is larger.
        heads: N.
        window: Frames, columns and rows of a window. The picture has at least as many.
        width: The picture's columns.
        interpret: As for `pallas_call`.

    Returns:
        An array of the shape of q.
    """
    if not _suits(q, k, heads, window, width):
        return window_attention_reference(q, k, v, first, largest, heads=heads, window=window, width=width)
    frames, columns, rows, _ = q.shape
    call = _Call(
        (window[0], window[1], window[2]),
        (frames, width, rows),
        columns,
        k.shape[1],
        interpret=bool(interpret),
        item=q.dtype.itemsize,
    )
    arguments = q, call.pad(k), call.pad(v), jnp.asarray(first, jnp.int32).reshape(1)
    online = dataclasses.replace(call, online=True)
    out = call.run(*arguments, interpret)
    return repeat_if(jnp.asarray(largest) > LARGEST, out, lambda: online.run(*arguments, interpret))


def count_key_rows(rows: int) -> int:
    """Return how many rows keys and values have that the kernel reads as they are; of `rows`, the first is the 9th."""
    return BEFORE + -(-rows // ROWS) * ROWS + KEY_ROWS - ROWS - BEFORE


def count_side_columns(columns: int, picture: int, window: int) -> int:
    """Return R, an even number, for strips of so many columns of a picture and for windows of so many.

    Windows of most strips reach half a window beyond them. Those of the picture's first strip end before that, if a
    whole window fits in a strip. The last strip may have few of the picture's columns: its windows begin earlier.
    """
    if columns < window:
        return window - 1
    last = picture % columns or columns
    beyond = -(-columns // COLUMNS) * COLUMNS - columns  # The kernel's boxes may end beyond the strip.
    needed = max(window // 2, window - last, -(-(beyond + window - 1) // 2))
    return needed + needed % 2


def window_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array | int,
    largest: jax.Array | float,
    *,
    heads: int,
    window: Window,
    width: int,
) -> jax.Array:
    """Compute the same as `window_attention` in plain jnp, box by box, with float32 logits."""
    shape, picture, reach = q.shape[:3], (q.shape[0], width, q.shape[2]), (k.shape[1] - q.shape[1]) // 2
    if k.shape[2] != shape[2]:
        k, v = (x[:, :, BEFORE : BEFORE + shape[2]] for x in (k, v))
    q, k, v = (x.reshape(*x.shape[:3], heads, -1) for x in (q, k, v))
    box = [min(size, part) for size, part in zip(shape, BOX, strict=True)]
    counts = [-(-size // part) for size, part in zip(shape, box, strict=True)]
    missing = [n * part - size for n, part, size in zip(counts, box, shape, strict=True)]
    padded = jnp.pad(q, [(0, n) for n in missing] + [(0, 0)] * 2)
    beyond = [(0, part - 1 + n * (axis == 1)) for axis, (part, n) in enumerate(zip(box, missing, strict=True))]
    keys, values = (jnp.pad(x, [*beyond, (0, 0), (0, 0)]) for x in (k, v))
    sizes = [part + size - 1 for part, size in zip(box, window, strict=True)]

    def run(place: jax.Array) -> jax.Array:
        starts = [place[axis] * box[axis] for axis in range(3)]
        block = lax.dynamic_slice(padded, (*starts, 0, 0), (*box, *q.shape[3:])).reshape(-1, *q.shape[3:])
        offsets, inside = [], []
        for axis, origin in enumerate((0, first, 0)):
            queries = starts[axis] + origin + jnp.arange(box[axis])
            begins = jnp.clip(queries - window[axis] // 2, 0, picture[axis] - window[axis])  # Of each query's window.
            seen = begins[0] + jnp.arange(sizes[axis])
            inside.append((seen >= begins[:, None]) & (seen < begins[:, None] + window[axis]))
            offsets.append(begins[0] - origin + (reach if axis == 1 else 0))
        near, taken = (
            lax.dynamic_slice(x, (*offsets, 0, 0), (*sizes, *q.shape[3:])).reshape(-1, *q.shape[3:])
            for x in (keys, values)
        )
        time, across, down = inside
        mask = time[:, None, None, :, None, None] & across[:, None, None, :, None] & down[:, None, None, :]
        logits = math.log(2) * jnp.einsum("qnd,knd->nqk", block, near, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(jnp.where(mask.reshape(len(block), -1), logits, -jnp.inf), axis=-1)
        out = jnp.einsum("nqk,knd->qnd", shares.astype(v.dtype), taken, preferred_element_type=jnp.float32)
        return out.astype(v.dtype)

    places = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), axis=-1).reshape(-1, 3)
    boxes = lax.map(run, jnp.asarray(places)).reshape(*counts, *box, *q.shape[3:])
    out = boxes.transpose(0, 3, 1, 4, 2, 5, 6, 7).reshape(*padded.shape[:3], -1)
    return out[: shape[0], : shape[1], : shape[2]]


def _suits(q: jax.Array, k: jax.Array, heads: int, window: Window, width: int) -> bool:
    """Return whether the kernel can compute it: heads of 64 channels in fours, and windows that fit a box's keys."""
    fits = window[2] // 2 <= BEFORE and window[2] - window[2] // 2 <= KEY_ROWS - ROWS - BEFORE + 1
    fits = fits and -(-q.shape[1] // COLUMNS) * COLUMNS + window[1] - 1 <= k.shape[1]
    return fits and width >= COLUMNS + window[1] - 1 and q.shape[3] == heads * WIDTH and heads % GROUP == 0


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static settings of a call.

    Attributes:
        window: A window's frames, columns and rows.
        picture: The picture's.
        columns: X.
        held: Columns of the keys, R + X + R.
        interpret: Whether the kernel is interpreted.
        item: Bytes of a number.
        online: Whether softmax is shifted by each query's largest logit.
    """

    window: tuple[int, int, int]
    picture: tuple[int, int, int]
    columns: int
    held: int
    interpret: bool
    item: int
    online: bool = False

    @property
    def reach(self) -> int:
        """R."""
        return (self.held - self.columns) // 2

    @property
    def key_frames(self) -> int:
        """Frames of a box's keys."""
        return FRAMES + self.window[0] - 1

    @property
    def key_columns(self) -> int:
        """Columns of a box's keys."""
        return COLUMNS + self.window[1] - 1

    @property
    def chunk(self) -> int:
        """The columns of a part of the strip: the keys of one, and of the next, fit in VMEM."""
        limit, whole = vmem_bytes(interpret=self.interpret), -(-self.columns // COLUMNS)
        sizes = (-(-whole // parts) * COLUMNS for parts in range(1, whole + 1))
        return next((size for size in sizes if self._needed(size) <= limit), COLUMNS)

    @property
    def slab(self) -> tuple[int, int, int, int]:
        """The shape of a part's keys."""
        return self.key_frames, self.chunk + self.window[1] - 1, KEY_ROWS, LANES

    @property
    def masked(self) -> int:
        """Rows of the mask: a box's keys."""
        return self.key_frames * self.key_columns * KEY_ROWS

    def _needed(self, chunk: int) -> int:
        """Return the bytes of VMEM that the kernel asks for."""
        slab = self.key_frames * (chunk + self.window[1] - 1) * KEY_ROWS * LANES
        queries = FRAMES * chunk * ROWS * LANES
        own = self.masked * QUERIES + GROUP * QUERIES * 3 * PAIR
        return (4 * slab + 4 * queries + own) * self.item + GROUP * (WIDTH + SUBLANES) * QUERIES * 4 + BESIDE

    def pad(self, x: jax.Array) -> jax.Array:
        """Return keys or values with the rows that the grid reads, and with at least as many frames."""
        missing, rows = max(0, self.key_frames - len(x)), self.picture[2]
        if x.shape[2] == rows:
            x = jnp.pad(x, ((0, 0), (0, 0), (BEFORE, count_key_rows(rows) - rows - BEFORE), (0, 0)))
        return jnp.pad(x, ((0, missing), (0, 0), (0, 0), (0, 0))) if missing else x

    def run(self, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, interpret: Any) -> jax.Array:
        """Run the kernel; keys and values are those of `pad`."""
        frames, columns, rows, channels = q.shape
        blocks = (FRAMES, self.chunk, ROWS, LANES)
        grid = channels // LANES, pl.cdiv(rows, ROWS), pl.cdiv(columns, self.chunk), pl.cdiv(frames, FRAMES)
        queries = pl.BlockSpec(blocks, lambda g, b, j, i, _: (i, j, b, g))
        hbm, lengths = pl.BlockSpec(memory_space=pl.ANY), (self.key_frames, self.key_columns)
        scores = math.prod(grid) * self.chunk // COLUMNS * QUERIES * self.masked * GROUP
        return pl.pallas_call(
            functools.partial(_kernel, call=self),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[queries, hbm, hbm],
                out_specs=queries,
                scratch_shapes=[
                    *[pltpu.VMEM((2, *self.slab), k.dtype) for _ in range(2)],
                    pltpu.SemaphoreType.DMA((2,)),
                    *[pltpu.VMEM((GROUP, QUERIES, lanes), q.dtype) for lanes in (PAIR, 2 * PAIR)],
                    pltpu.VMEM((GROUP, WIDTH + SUBLANES, QUERIES), jnp.float32),
                    pltpu.VMEM((GROUP, SUBLANES, QUERIES), jnp.float32),
                    pltpu.VMEM((self.masked, QUERIES), q.dtype),
                    *[pltpu.VMEM((-(-n // SUBLANES) * SUBLANES, QUERIES), jnp.float32) for n in lengths],
                    pltpu.SMEM((1,), jnp.int32),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",) * 4, vmem_limit_bytes=self._needed(self.chunk)
            ),
            cost_estimate=pl.CostEstimate(
                flops=4 * scores * WIDTH,
                transcendentals=scores,
                bytes_accessed=2 * (q.size + math.prod(grid) * math.prod(self.slab)) * self.item,
            ),
            interpret=interpret,
            name="window_attention" + ("_online" if self.online else ""),
        )(first, q, k, v)

    # ---- Where the keys of a box begin.

    def first_frame(self, box: Any) -> Any:
        """Return the first frame of the keys of the box with that number."""
        most = max(0, self.picture[0] - self.key_frames)
        return jnp.clip(box * FRAMES - self.window[0] // 2, 0, most)

    def first_column(self, column: Any, first: Any) -> Any:
        """Return the first column of the keys of a box that begins at that column of the strip."""
        begin = jnp.clip(first + column - self.window[1] // 2, 0, self.picture[1] - self.key_columns)
        return jnp.clip(begin - first + self.reach, 0, self.held - self.key_columns)

    def first_held(self, part: Any, first: Any) -> Any:
        """Return the first column of the keys of a part of the columns."""
        return jnp.minimum(self.first_column(part * self.chunk, first), self.held - self.slab[1])

    def first_tile(self, box: Any) -> Any:
        """Return the number of the first of two tiles of rows."""
        return jnp.minimum(box, (self.picture[2] - self.window[2] + BEFORE) // ROWS)


def _kernel(
    first_ref: Ref,
    q_ref: Ref,
    k_hbm: Ref,
    v_hbm: Ref,
    o_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    semaphore: Ref,
    whole_ref: Ref,
    split_ref: Ref,
    acc_ref: Ref,
    shift_ref: Ref,
    mask_ref: Ref,
    time_ref: Ref,
    across_ref: Ref,
    usual_ref: Ref,
    *,
    call: _Call,
) -> None:
    """Run one grid step (group of heads, box of rows, part of the columns, box of frames): some boxes of columns."""
    sizes = [pl.num_programs(axis) for axis in range(4)]
    group, box_y, part, box_t = (pl.program_id(axis) for axis in range(4))
    step = ((group * sizes[1] + box_y) * sizes[2] + part) * sizes[3] + box_t
    first, lane = first_ref[0], lax.broadcasted_iota(jnp.int32, (1, QUERIES), 1)

    def copies(step: Any) -> list[Any]:
        """Return the copies of a grid step's keys and values."""
        rest, i = lax.div(step, sizes[3]), lax.rem(step, sizes[3])
        rest, j = lax.div(rest, sizes[2]), lax.rem(rest, sizes[2])
        g, b = lax.div(rest, sizes[1]), lax.rem(rest, sizes[1])
        source = (
            pl.ds(call.first_frame(i), call.slab[0]),
            pl.ds(call.first_held(j, first), call.slab[1]),
            pl.ds(pl.multiple_of(call.first_tile(b) * ROWS, ROWS), KEY_ROWS),
            pl.ds(pl.multiple_of(g * LANES, LANES), LANES),
        )
        buffer = lax.rem(step, 2)
        pairs = (k_hbm, k_ref), (v_hbm, v_ref)
        return [pltpu.make_async_copy(x.at[source], to.at[buffer], semaphore.at[buffer]) for x, to in pairs]

    @pl.when(step == 0)
    def _() -> None:
        usual_ref[0] = 0
        for copy in copies(step):
            copy.start()

    for copy in copies(step):
        copy.wait()

    @pl.when(step + 1 < math.prod(sizes))
    def _() -> None:
        for copy in copies(step + 1):
            copy.start()

    buffer, start = lax.rem(step, 2), call.first_held(part, first)
    begin_t, begin_y = call.first_frame(box_t), call.first_tile(box_y) * ROWS - BEFORE

    def run_box(number: jax.Array, nothing: None) -> None:
        column = part * call.chunk + number * COLUMNS
        begin = call.first_column(column, first)
        places = box_t * FRAMES, first + column, box_y * ROWS
        box_sizes = FRAMES, COLUMNS, ROWS
        inner = [_is_inner(*of_axis) for of_axis in zip(places, call.window, call.picture, box_sizes, strict=True)]
        # Keys of a box that ends beyond the strip may begin earlier, at the last ones that are held.
        usual = functools.reduce(jnp.logical_and, inner, begin == column - call.window[1] // 2 + call.reach)

        @pl.when(jnp.logical_not(usual) | (usual_ref[0] == 0))
        def _() -> None:
            begins = begin_t, first - call.reach + begin, begin_y
            _write_mask(mask_ref, time_ref, across_ref, lane, places, begins, call)

        usual_ref[0] = usual.astype(jnp.int32)
        columns = pl.ds(pl.multiple_of(number * COLUMNS, COLUMNS), COLUMNS)
        _write_queries(q_ref[:, columns, :, :].reshape(QUERIES, LANES), whole_ref, split_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        near = pl.ds(begin - start, call.key_columns)
        box = _Box(k_ref.at[buffer], v_ref.at[buffer], near, whole_ref, split_ref, acc_ref, shift_ref, mask_ref, call)
        moved = jnp.logical_not(inner[0])
        if call.online:
            box.find_shifts()
        box.add(box.frames)
        pl.when(moved)(lambda: box.add(box.other_frames))
        # Columns beyond the picture see nothing, and their sums are zeros.
        totals = [jnp.maximum(acc_ref[head, WIDTH : WIDTH + 1], 1e-37) for head in range(GROUP)]
        out = jnp.concatenate([acc_ref[head, :WIDTH] / total for head, total in enumerate(totals)], axis=0)
        o_ref[:, columns, :, :] = out.T.astype(o_ref.dtype).reshape(FRAMES, COLUMNS, ROWS, LANES)

    lax.fori_loop(0, call.chunk // COLUMNS, run_box, None)


def _write_queries(q: jax.Array, whole_ref: Ref, split_ref: Ref) -> None:
    """Write each head's queries [queries, 128 or 256] with zeros in the other lanes.

    In `split_ref`, the first half of the queries has the first half of the lanes, and the second half the others.
    """
    for head in range(GROUP):
        pair = head // 2
        own = q[:, pair * PAIR : (pair + 1) * PAIR]
        is_own = lax.div(lax.broadcasted_iota(jnp.int32, own.shape, 1), WIDTH) == head % 2
        own = jnp.where(is_own, own, jnp.zeros_like(own))
        zeros = jnp.zeros((HALF, PAIR), own.dtype)
        whole_ref[head] = own
        split_ref[head, :HALF, :] = jnp.concatenate([own[:HALF], zeros], axis=1)
        split_ref[head, HALF:, :] = jnp.concatenate([zeros, own[HALF:]], axis=1)


@dataclasses.dataclass(frozen=True)
class _Box:
    """A box of queries and its keys.

    Attributes:
        k_ref, v_ref: Keys and values [frames, columns, 32, 256] of a part of the columns.
        near: Which of the columns are the box's.
        whole_ref, split_ref: From `_write_queries`.
        acc_ref: [4, 64 + 8, queries] float32: O^T of each head, and below it the weights' sum.
        shift_ref: [4, 8, queries] float32: each query's largest logit, the same row 8 times, if softmax is shifted.
        mask_ref: [keys, queries], from `_write_mask`.
        call: The static settings.
    """

    k_ref: Ref
    v_ref: Ref
    near: Any
    whole_ref: Ref
    split_ref: Ref
    acc_ref: Ref
    shift_ref: Ref
    mask_ref: Ref
    call: _Call

    @property
    def rows(self) -> int:
        """Keys of a frame."""
        return self.call.key_columns * KEY_ROWS

    @property
    def frames(self) -> list[tuple[int, ...]]:
        """The frames of each product: of two, the first half of the queries sees the first one, the others the second.

        Where windows aren't moved inwards, these are all that is seen.
        """
        last = self.call.key_frames
        return [*((n,) for n in range(ENDS, last - ENDS)), *((n, last - ENDS + n) for n in range(ENDS))]

    @property
    def other_frames(self) -> list[tuple[int, ...]]:
        """What else is seen at the video's ends."""
        return [(second, first) for first, second in self.frames[-ENDS:]]

    def add(self, frames: Sequence[tuple[int, ...]]) -> None:
        """Add the keys of some frames, head by head."""
        units = list(itertools.product(frames, range(GROUP)))
        logits: list[jax.Array] = []
        values: list[jax.Array] = []
        for number, (of_unit, head) in enumerate(units):
            for later in units[number + len(logits) : number + AHEAD + 1]:
                logits.append(self._find_logits(*later))
            if head == 0:
                values = [self._read(self.v_ref, frame).T for frame in of_unit]
            p = self._weigh(logits.pop(0), of_unit, head)
            for part, value in enumerate(values):
                # A row of ones for the weights' sum, and more that fill a register.
                ones = jnp.ones((SUBLANES, self.rows), value.dtype)
                own = jnp.concatenate([value[head * WIDTH : (head + 1) * WIDTH], ones], axis=0)
                seeing = slice(part * HALF, (part + 1) * HALF) if len(values) > 1 else slice(None)
                self.acc_ref[head, :, seeing] += dot(own, p[:, seeing], contract=(1, 0))

    def find_shifts(self) -> None:
        """Find each query's largest logit."""
        self.shift_ref[...] = jnp.full_like(self.shift_ref, jnp.finfo(jnp.float32).min)
        for frames, head in itertools.product([*self.frames, *self.other_frames], range(GROUP)):
            seen = jnp.where(self._sees(frames), self._find_logits(frames, head), -jnp.inf)
            self.shift_ref[head] = jnp.maximum(self.shift_ref[head], jnp.max(seen, axis=0, keepdims=True))

    def _weigh(self, logits: jax.Array, frames: Sequence[int], head: int) -> jax.Array:
        """Return the weights [keys, queries], zero where a query doesn't see a key."""
        dtype = self.mask_ref.dtype
        if not self.call.online:
            return jnp.exp2(logits).astype(dtype) * self._read_mask(frames)
        seen = jnp.where(self._sees(frames), logits - self.shift_ref[head, :1, :], -jnp.inf)
        return jnp.exp2(seen).astype(dtype)

    def _sees(self, frames: Sequence[int]) -> jax.Array:
        return self._read_mask(frames).astype(jnp.float32) > 0

    def _read(self, ref: Ref, frame: int, lanes: slice = slice(None)) -> jax.Array:
        return ref[frame, self.near, :, lanes].reshape(self.rows, -1)

    def _find_logits(self, frames: Sequence[int], head: int) -> jax.Array:
        pair = slice(head // 2 * PAIR, (head // 2 + 1) * PAIR)
        keys = [self._read(self.k_ref, frame, pair) for frame in frames]
        queries = self.whole_ref if len(frames) == 1 else self.split_ref
        return dot(jnp.concatenate(keys, axis=1), queries[head], contract=(1, 1))

    def _read_mask(self, frames: Sequence[int]) -> jax.Array:
        rows = [slice(frame * self.rows, (frame + 1) * self.rows) for frame in frames]
        if len(rows) == 1:
            return self.mask_ref[rows[0], :]
        return jnp.concatenate([self.mask_ref[rows[0], :HALF], self.mask_ref[rows[1], HALF:]], axis=1)


def _is_inner(place: Any, size: int, whole: int, box: int) -> Any:
    """Return whether no window of a box that begins at `place` is moved inwards along an axis."""
    return (place >= size // 2) & (place + box - 1 - size // 2 <= whole - size)


def _sees(begin: Any, keys: int, place: jax.Array, size: int, whole: int) -> jax.Array:
    """Return which of some keys each query sees along an axis, float32 [keys, queries].

    Args:
        begin, keys: The first key, and how many there are.
        place: Where each query is, [1, queries].
        size, whole: The window's and the picture's size.
    """
    window = jnp.clip(place - size // 2, 0, whole - size)
    key = begin + lax.broadcasted_iota(jnp.int32, (keys, place.shape[1]), 0)
    return ((key >= window) & (key < window + size)).astype(jnp.float32)


def _write_mask(
    mask_ref: Ref,
    time_ref: Ref,
    across_ref: Ref,
    lane: jax.Array,
    places: Sequence[Any],
    begins: Sequence[Any],
    call: _Call,
) -> None:
    """Write which keys the queries of a box see, 1 or 0.

    Args:
        lane: The number of each query, [1, queries].
        places: The picture's frame, column and row at which the box begins.
        begins: The same of its keys.
    """
    offsets = lax.div(lane, COLUMNS * ROWS), lax.rem(lax.div(lane, ROWS), COLUMNS), lax.rem(lane, ROWS)
    counts = time_ref.shape[0], across_ref.shape[0], KEY_ROWS
    time, across, down = (
        _sees(begin, count, place + offset, size, whole)
        for begin, count, place, offset, size, whole in zip(
            begins, counts, places, offsets, call.window, call.picture, strict=True
        )
    )
    time_ref[...], across_ref[...] = time, across

    def write(frame: jax.Array, nothing: None) -> None:
        in_time = time_ref[pl.ds(frame, 1), :]
        for column in range(call.key_columns):
            start = pl.multiple_of((frame * call.key_columns + column) * KEY_ROWS, KEY_ROWS)
            seen = down * (in_time * across_ref[column : column + 1, :])
            mask_ref[pl.ds(start, KEY_ROWS), :] = seen.astype(mask_ref.dtype)

    lax.fori_loop(0, call.key_frames, write, None)
