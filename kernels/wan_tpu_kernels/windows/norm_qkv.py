"""What precedes window attention in a block, in one pass over HBM: norm, projections, norms of heads, rotation.

Keys and values are written where the attention reads them: with room for the columns of neighbouring strips, and with
rows shifted by eight, which costs nothing in float32, whose registers have eight rows.

Shapes: T frames, X columns and Y rows of a strip, C channels, I channels of the context, N heads, D head width, R
columns on either side.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import LANES, MIB
from wan_tpu_kernels.flash_kernel import dot
from wan_tpu_kernels.head_norm_rope import head_means, swap_halves
from wan_tpu_kernels.tiles import vmem_bytes
from wan_tpu_kernels.windows.attention import BEFORE, count_key_rows

Linear = tuple[jax.Array, jax.Array]  # A weight [O, I] and a bias [O].
Tables = Sequence[tuple[jax.Array, jax.Array]]

TOKENS = 1024  # The most tokens of a grid step: one or more columns.
BESIDE = 8 * MIB  # VMEM for what is computed of a column.


def norm_qkv(
    x: jax.Array,
    context: jax.Array | None,
    weights: Mapping[str, Linear],
    vectors: Mapping[str, jax.Array],
    tables: Tables,
    *,
    reach: int,
    eps: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute y = x + context W + b, and queries, keys and values of n = y / rms(y) * scale + shift.

    Queries and keys are divided by the root mean square of each head, multiplied by a weight and rotated: channels are
    paired (i, i + D/2). n and the results are rounded to the type of x; all else is computed in float32.

    Args:
        x: [T, X, Y, C].
        context: [T, X, Y, I], or None to leave y = x.
        weights: "context" [C, I] if there is one, and "q", "k" and "v" [C, C].
        vectors: "scale" and "shift" [C], and the heads' weights "q" and "k" [D], all float32.
        tables: For frames, columns and rows, cosines and sines [T, D], [X, D] and [Y, D] float32, as [cos, cos] and
            [-sin, sin]. A token's table is the sum of its three: each has zeros where the others have their angles.
        reach: R.
        eps: Added to mean squares.
        interpret: As for `pallas_call`.

    Returns:
        y and the queries, [T, X, Y, C], and keys and values as `windows.attention` takes them. Their R columns on
        either side are undefined.
    """
    (frames, columns, rows, channels), head = x.shape, len(vectors["q"])
    key_rows, limit = count_key_rows(rows), vmem_bytes(interpret=bool(interpret))
    inputs = [x] if context is None else [x, context]
    # Of a column: what is read, y, queries, keys and values, each of which is transferred while another is computed.
    column = rows * (sum(each.shape[3] for each in inputs) + len(inputs) * channels) + 2 * key_rows * channels
    room = limit - BESIDE - sum(w.size * w.dtype.itemsize for w, _ in weights.values())
    most = min(max(1, TOKENS // rows), room // (2 * column * x.dtype.itemsize))
    together = next((n for n in (10, 6, 4, 2, 5, 3, 1) if n <= most and _divides(n, columns, reach)), None)
    if LANES % head or channels % LANES or rows % 8 or reach == 0 or together is None:
        return norm_qkv_reference(x, context, weights, vectors, tables, reach=reach, eps=eps)

    def tokens(width: int, height: int = rows, before: int = 0) -> pl.BlockSpec:
        return pl.BlockSpec((None, together, height, width), lambda t, i: (t, i + before // together, 0, 0))

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda t, i: (0,) * array.ndim, pipeline_mode=pl.Buffered(1))

    wide = [jnp.tile(table, (1, LANES // head)) for pair in tables for table in pair]
    of_axes = [
        pl.BlockSpec((None, 1, LANES), lambda t, i: (t, 0, 0)),
        pl.BlockSpec((together, 1, LANES), lambda t, i: (i, 0, 0)),
        pl.BlockSpec((rows, LANES), lambda t, i: (0, 0)),
    ]
    arrays = [array if number >= 4 else array[:, None] for number, array in enumerate(wide)]
    table_specs = [spec for spec in of_axes for _ in range(2)]
    vectors = {
        name: jnp.tile(vector, LANES // head)[None] if name in "qk" else vector[None]
        for name, vector in vectors.items()
    }
    names = [*(("context",) if context is not None else ()), "q", "k", "v"]
    linears = [weights[name][0] for name in names] + [weights[name][1][None].astype(jnp.float32) for name in names]
    small = [*(vectors[name] for name in ("scale", "shift", "q", "k")), *linears]
    keys = jax.ShapeDtypeStruct((frames, columns + 2 * reach, key_rows, channels), x.dtype)
    same = jax.ShapeDtypeStruct(x.shape, x.dtype)
    size = x.size // channels
    y, *results = pl.pallas_call(
        functools.partial(_kernel, named=names, eps=eps, head=head),
        grid=(frames, columns // together),
        in_specs=[*(tokens(each.shape[3]) for each in inputs), *table_specs, *map(whole, small)],
        out_specs=[*[tokens(channels)] * len(inputs), *[tokens(channels, key_rows, reach)] * 2],
        out_shape=[*[same] * len(inputs), keys, keys],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=limit),
        cost_estimate=pl.CostEstimate(
            flops=2 * size * sum(weights[name][0].size for name in names),
            transcendentals=0,
            bytes_accessed=(3 + 2 * len(inputs)) * x.size * x.dtype.itemsize,
        ),
        interpret=interpret,
        name="norm_qkv",
    )(*inputs, *arrays, *small)
    return (x, y, *results) if context is None else (y, *results)


def _divides(number: int, *sizes: int) -> bool:
    return all(size % number == 0 for size in sizes)


def norm_qkv_reference(
    x: jax.Array,
    context: jax.Array | None,
    weights: Mapping[str, Linear],
    vectors: Mapping[str, jax.Array],
    tables: Tables,
    *,
    reach: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute the same as `norm_qkv` in plain jnp; keys and values have their own rows only."""
    head = len(vectors["q"])
    if context is not None:
        x = (x.astype(jnp.float32) + _project(context, weights["context"])).astype(x.dtype)
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps) * vectors["scale"] + vectors["shift"]
    normed = normed.astype(x.dtype)
    cos, sin = (
        of_time[:, None, None, None] + of_column[:, None, None] + of_row[:, None]
        for of_time, of_column, of_row in zip(*tables, strict=True)
    )
    results = []
    for name in "qkv":
        y = _project(normed, weights[name])
        if name != "v":
            heads = y.reshape(*y.shape[:3], -1, head)
            heads = heads * lax.rsqrt((heads * heads).mean(-1, keepdims=True) + eps) * vectors[name]
            y = (heads * cos + jnp.roll(heads, head // 2, axis=-1) * sin).reshape(y.shape)
        y = y.astype(x.dtype)
        results.append(y if name == "q" else jnp.pad(y, [(0, 0), (reach, reach), (0, 0), (0, 0)]))
    q, k, v = results
    return x, q, k, v


def _project(x: jax.Array, linear: Linear) -> jax.Array:
    weight, bias = linear
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)


def _kernel(*refs: Any, named: Sequence[str], eps: float, head: int) -> None:
    """Run one grid step (t, i): some columns of a frame."""
    inputs = 1 + ("context" in named)
    (x_ref, *context_ref), refs = refs[:inputs], refs[inputs:]
    tables, (scale_ref, shift_ref, *head_refs), refs = refs[:6], refs[6:10], refs[10:]
    weights = {name: (refs[i], refs[i + len(named)]) for i, name in enumerate(named)}
    (*y_ref, q_ref, k_ref, v_ref) = refs[2 * len(named) :]
    of_time, of_column, of_row = ((tables[i], tables[i + 1]) for i in (0, 2, 4))

    def run_column(column: jax.Array, nothing: None) -> None:
        wide = x_ref[column].astype(jnp.float32)
        if context_ref:
            wide = wide + _multiply(context_ref[0][column], weights["context"])
            y_ref[0][column] = wide.astype(x_ref.dtype)
        inverse = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
        normed = (wide * inverse * scale_ref[...] + shift_ref[...]).astype(x_ref.dtype)
        cos, sin = (of_time[i][...] + of_column[i][column] + of_row[i][...] for i in range(2))
        for name, vector_ref, ref in zip("qkv", (*head_refs, None), (q_ref, k_ref, v_ref), strict=True):
            y = _multiply(normed, weights[name])
            if vector_ref is not None:
                y = _norm_and_rotate(y, vector_ref[...], cos, sin, eps, head, rounded=x_ref.dtype == jnp.bfloat16)
            if name != "q":
                after = ref.shape[1] - BEFORE - y.shape[0]
                zeros = (jnp.zeros((count, y.shape[1]), y.dtype) for count in (BEFORE, after))
                y = jnp.concatenate([next(zeros), y, next(zeros)], axis=0)
            ref[column] = y.astype(ref.dtype)

    # Columns are independent of each other: those of an iteration fill each other's pauses.
    lax.fori_loop(0, x_ref.shape[0], run_column, None, unroll=2 - x_ref.shape[0] % 2)


def _multiply(x: jax.Array, linear: tuple[Any, Any]) -> jax.Array:
    weight_ref, bias_ref = linear
    return dot(x, weight_ref[...], contract=(1, 1)) + bias_ref[...]


def _norm_and_rotate(
    y: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array, eps: float, head: int, *, rounded: bool
) -> jax.Array:
    """Divide heads by their root mean square and rotate them; y is [rows, N * D], the other arrays have 128 lanes."""
    rows, parts = len(y), y.shape[1] // LANES
    x = jnp.concatenate([y[:, part * LANES : (part + 1) * LANES] for part in range(parts)], axis=0)
    x = x * lax.rsqrt(head_means(x * x, head, rounded=rounded) + eps) * weight
    cos, sin = (jnp.concatenate([table] * parts, axis=0) for table in (cos, sin))
    x = x * cos + swap_halves(x, head) * sin
    return jnp.concatenate([x[part * rows : (part + 1) * rows] for part in range(parts)], axis=1)
