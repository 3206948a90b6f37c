"""A linear layer for TPU whose bias, activation, gate and residual are applied while the tile is still in VMEM.

XLA schedules the matmuls of a 14B transformer at 50 to 60 % of the MXU's rate and writes float32 between a layer and
its activation. With all inputs of a tile in one piece the products accumulate inside the MXU, which reaches 92 to 97 %
(docs/kernels.md).

Shapes: L rows (tokens), I inputs, O outputs, G column groups.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.linear_tiles import COLUMNS_8, MXU_COLUMNS, Layer, choose_tile
from wan_tpu_kernels.low_precision import LANES, Rounded
from wan_tpu_kernels.modulation import modulation_row, number_patterns, read_modulation, row_patterns
from wan_tpu_kernels.tiles import vmem_bytes

# Functions of one product. "swiglu" is a function of two: half of the weight's rows give values, half their gates.
ACTIVATIONS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda y: y,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
SWIGLU = "swiglu"


def linear(
    x: jax.Array | tuple[jax.Array, ...] | Rounded,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    scales: jax.Array | None = None,
    layer: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    gate: jax.Array | None = None,
    first_rows: jax.Array | int = 0,
    groups: int = 1,
    dtype: Any = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute y = activation(x weight^T + bias), or with a residual, residual + gate * y.

    "swiglu" takes a weight [2 O, I] (and bias, scales [2 O]) whose first half gives values and whose second half gives
    their gates, as in diffusers' FeedForward: y = values * silu(gates).

    Everything after the products is computed in float32, except that an activation with an 8-bit weight is computed in
    the dtype of the result.

    Args:
        x: [L, I], or laid out as in columns.py: an array for each part of every group's columns. `Rounded` with
            `scales`.
        weight: [O, I], or with `layer` the weights of several layers, [D, O, I].
        bias: [O], or None.
        scales: [O] float32, the factors of the rows of an 8-bit weight.
        layer: int32 [], which of the weights is read. Slicing them beforehand would make a copy, because XLA doesn't
            fuse a slice with a kernel.
        activation: None, "gelu_tanh" or "swiglu".
        residual: [L, O], or with more rows, which are then part of the result; the result overwrites the residual.
        gate: [M, O], only with a residual; ones by default. It has one row for each segment of the rows of x.
        first_rows: Ends (exclusive) of the first M - 1 segments of rows, [M - 1], or a number for two segments.
        groups: With more than one, the result is [groups, L, O/groups].
        dtype: The result's; by default that of x, or with `scales` that of the bias or the residual, or bfloat16.
        interpret: As for `pallas_call`.

    Returns:
        [L, O] in `dtype`, or with all rows of the residual.
    """
    halves = 2 if activation == SWIGLU else 1
    inputs, outputs = weight.shape[-1], weight.shape[-2] // halves
    assert isinstance(x, Rounded) == (scales is not None)
    rounded = x if isinstance(x, Rounded) else None
    parts = (x.values,) if isinstance(x, Rounded) else x if isinstance(x, tuple) else (x,)
    joined, (rows, _), in_dtype = parts[0].ndim == 3, parts[0].shape[-2:], parts[0].dtype
    dtype = _result_dtype(in_dtype, scales, dtype, bias, residual)
    sizes = Layer(
        rows, outputs, inputs, groups, in_dtype.itemsize, dtype.itemsize, joined, halves, residual is not None
    )
    block_rows, block_outputs, block_inputs = choose_tile(sizes, interpret=interpret)
    steps, group = inputs // block_inputs, outputs // groups
    per_group = pl.cdiv(group, block_outputs)
    several = groups > 1 and block_outputs > group
    grid = (pl.cdiv(rows, block_rows), outputs // block_outputs if several else per_group * groups, steps)
    if groups == 1:
        out_spec = pl.BlockSpec((block_rows, block_outputs), lambda i, j, k, *_: (i, j))
    elif several:
        out_spec = pl.BlockSpec((block_outputs // group, block_rows, group), lambda i, j, k, *_: (j, i, 0))
    else:
        out_spec = pl.BlockSpec(
            (None, block_rows, block_outputs), lambda i, j, k, *_: (j // per_group, i, j % per_group)
        )

    def inputs_at(j: int, k: int) -> Any:
        """Return the part of the inputs of a step: back and forth, so that the rows at a turn stay in VMEM."""
        return jnp.where(j % 2 == 0, k, steps - 1 - k) if steps > 1 else 0

    columns = pl.BlockSpec((halves, block_outputs), lambda i, j, k, *_: (0, j))
    apart = groups > 1 and group % LANES > 0
    if apart:  # A tile is a whole group: its columns can't be addressed in one array of all.
        columns = pl.BlockSpec((None, halves, group), lambda i, j, k, *_: (j, 0, 0))

    def lay_out(values: jax.Array) -> jax.Array:
        """Return values of all outputs as `columns` reads them."""
        values = values.astype(jnp.float32).reshape(halves, outputs)
        return values.reshape(halves, groups, group).swapaxes(0, 1) if apart else values

    if joined:
        x_specs = [
            pl.BlockSpec((len(part), block_rows, part.shape[2]), lambda i, j, k, *_: (0, i, 0)) for part in parts
        ]
    else:
        x_specs = [pl.BlockSpec((block_rows, block_inputs), lambda i, j, k, *_: (i, inputs_at(j, k)))]
    weight_spec = pl.BlockSpec(
        (None, halves, block_outputs, block_inputs),
        lambda i, j, k, *layers: (layers[0][0] if layers else 0, 0, j, inputs_at(j, k)),
    )
    specs = [*x_specs, weight_spec]
    arrays = [*parts, weight.reshape(-1, halves, outputs, inputs)]
    if bias is not None:
        specs.append(columns)
        arrays.append(lay_out(bias))
    if rounded is not None and scales is not None:
        specs += [pl.BlockSpec((block_rows, LANES), lambda i, j, k, *_: (i, 0)), columns]
        arrays += [rounded.scales, lay_out(scales)]
    if residual is not None:
        assert groups == 1
        gate = jnp.ones((1, outputs)) if gate is None else gate
        patterns = row_patterns(gate, first_rows)
        specs += [
            pl.BlockSpec((block_rows, block_outputs), lambda i, j, k, *_: (i, j)),
            pl.BlockSpec((len(patterns), block_outputs), lambda i, j, k, *_: (0, j)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
        ]
        arrays += [residual, patterns, number_patterns(gate, first_rows, grid[0] * block_rows)]
    scratch = []
    if joined:
        scratch.append(pltpu.VMEM((block_rows, inputs), in_dtype))
    if steps > 1:
        scratch.append(pltpu.VMEM((halves, block_rows, block_outputs), _sum_type(in_dtype)))
    suffixes = ["8_bits"] if rounded is not None else []
    suffixes += [activation] if activation is not None else []
    suffixes += ["residual"] if residual is not None else []
    out_shape: tuple[int, ...] = (rows, outputs) if groups == 1 else (groups, rows, outputs // groups)
    aliases = {}
    if residual is not None and len(residual) > rows:
        out_shape, aliases = residual.shape, {len(arrays) - 3 + (layer is not None): 0}
    layers = [] if layer is None else [jnp.asarray(layer, jnp.int32).reshape(1)]
    return pl.pallas_call(
        functools.partial(
            _kernel,
            layers=len(layers),
            steps=steps,
            parts=len(parts) if joined else 0,
            activation=activation,
            biased=bias is not None,
            rounded=rounded is not None,
            fused_residual=residual is not None,
            rows=rows if aliases and rows % block_rows else None,
            precision=jax.lax.Precision.HIGHEST if in_dtype == jnp.float32 else None,
        ),
        out_shape=jax.ShapeDtypeStruct(out_shape, dtype),
        input_output_aliases=aliases,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(layers), grid=grid, in_specs=specs, out_specs=out_spec, scratch_shapes=scratch
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(interpret=interpret),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * halves * outputs * inputs,
            transcendentals=0 if activation is None else rows * outputs,
            bytes_accessed=in_dtype.itemsize * (rows + halves * outputs) * inputs + dtype.itemsize * rows * outputs,
        ),
        name="_".join(["linear", *suffixes]),
        interpret=interpret,
    )(*layers, *arrays)


def linear_reference(
    x: jax.Array | tuple[jax.Array, ...] | Rounded,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    scales: jax.Array | None = None,
    layer: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    gate: jax.Array | None = None,
    first_rows: jax.Array | int = 0,
    groups: int = 1,
    dtype: Any = None,
) -> jax.Array:
    """Compute the same as `linear`, in plain jnp."""
    weight = weight if layer is None else weight[layer]
    if isinstance(x, Rounded):
        assert scales is not None
        values, wide = x.values.astype(jnp.float32), weight.astype(jnp.float32)  # float32 holds their products exactly
        product = jax.lax.dot_general(values, wide, (((1,), (1,)), ((), ()))) * x.scales[:, :1] * scales
        dtype = active = _result_dtype(x.values.dtype, scales, dtype, bias, residual)
    else:
        x = jnp.concatenate(x, axis=-1) if isinstance(x, tuple) else x
        x = x if x.ndim == 2 else x.transpose(1, 0, 2).reshape(x.shape[1], -1)
        product = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        dtype, active = _result_dtype(x.dtype, None, dtype), jnp.float32
    y = product if bias is None else product + bias.astype(jnp.float32)
    if activation == SWIGLU:
        values, gates = jnp.split(y, 2, axis=1)
        y = values * _silu(gates.astype(active)).astype(jnp.float32)
    elif activation is not None:
        y = ACTIVATIONS[activation](y.astype(active)).astype(jnp.float32)
    if residual is not None:
        y = y if gate is None else modulation_row(gate, 0, len(y), first_rows) * y
        y = residual[: len(y)].astype(jnp.float32) + y
    y = y.astype(dtype)
    if residual is not None and len(residual) > len(y):
        return jax.lax.dynamic_update_slice(residual, y, (0, 0))
    return y if groups == 1 else y.reshape(y.shape[0], groups, -1).transpose(1, 0, 2)


def _kernel(*refs, layers, steps, parts, activation, biased, rounded, fused_residual, rows, precision):  # type: ignore[no-untyped-def]
    refs = refs[layers:]  # Only the pipeline that fetches the tiles needs to know which layer is read.
    x_refs, (w_ref, *refs_left) = refs[: parts or 1], refs[parts or 1 :]
    bias_refs, refs_left = (refs_left[:1], refs_left[1:]) if biased else ([], refs_left)
    scale_refs, refs_left = (refs_left[:2], refs_left[2:]) if rounded else ([], refs_left)
    residual_refs, refs_left = (refs_left[:3], refs_left[3:]) if fused_residual else ([], refs_left)
    o_ref, *scratch = refs_left
    if parts:
        joined = scratch.pop(0)

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            start = 0
            for group in range(x_refs[0].shape[0]):
                for part in x_refs:
                    joined[:, start : start + part.shape[2]] = part[group]
                    start += part.shape[2]

        x_ref = joined
    else:
        (x_ref,) = x_refs

    step = pl.program_id(2)
    first_row = pl.program_id(0) * o_ref.shape[-2]

    def multiply(half: int, here: Any) -> jax.Array:
        total = jax.lax.dot_general(
            x_ref[...],
            w_ref[half, here, :],
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=_sum_type(w_ref.dtype),
        )
        if steps > 1:
            (sum_ref,) = scratch
            total = jnp.where(step == 0, total, sum_ref[half, :, here] + total)
            sum_ref[half, :, here] = total
        if rounded:
            row_scales, column_scales = scale_refs
            total = total.astype(jnp.float32) * (row_scales[:, :1] * column_scales[half : half + 1, here])
        return total + bias_refs[0][half : half + 1, here] if biased else total

    def columns(index: jax.Array) -> None:
        here = pl.ds(pl.multiple_of(index * chunk, chunk), chunk)
        active = o_ref.dtype if rounded else jnp.float32
        if activation == SWIGLU:
            gates = _silu(multiply(1, here).astype(active))  # The second product hides this one's activation.
            y = multiply(0, here) * gates
        else:
            y = multiply(0, here)
            y = y if activation is None else ACTIVATIONS[activation](y.astype(active))
        if fused_residual:
            residual_ref, patterns_ref, numbers_ref = residual_refs
            gate = read_modulation(patterns_ref, numbers_ref, first_row, y.shape[0], here)
            changed = residual_ref[:, here].astype(jnp.float32) + gate * y
            if rows is not None:  # The last block has rows that must not change.
                row = first_row + jax.lax.broadcasted_iota(jnp.int32, (y.shape[0], 1), 0)
                changed = jnp.where(row < rows, changed, residual_ref[:, here].astype(jnp.float32))
            y = changed
        store(index * chunk, y.astype(o_ref.dtype))

    def store(start: jax.Array, y: jax.Array) -> None:
        if o_ref.ndim == 2:
            o_ref[:, pl.ds(pl.multiple_of(start, chunk), chunk)] = y
            return
        width = o_ref.shape[2]  # Columns of a group, which may end in the middle of an iteration's columns.
        for lane in range(0, chunk, LANES):
            group, column = (start + lane) // width, (start + lane) % width
            o_ref[group, :, pl.ds(pl.multiple_of(column, LANES), LANES)] = y[:, lane : lane + LANES]

    outputs = w_ref.shape[1]
    chunk = next((n for n in ([COLUMNS_8] if rounded else []) + [MXU_COLUMNS] if outputs % n == 0), outputs)
    jax.lax.fori_loop(0, outputs // chunk, lambda index, _: columns(index), None)


def _silu(x: jax.Array) -> jax.Array:
    """Compute x / (1 + exp(-x)) with one transcendental instruction."""
    half = 0.5 * x
    return half + half * jnp.tanh(half)


def _result_dtype(inputs: Any, scales: jax.Array | None, dtype: Any, *arrays: jax.Array | None) -> Any:
    """Return a result's dtype: `dtype`, else that of inputs that aren't in 8 bits, else that of another array."""
    dtypes = [inputs] if scales is None else [array.dtype for array in arrays if array is not None]
    return jnp.dtype(next(candidate for candidate in (dtype, *dtypes, jnp.bfloat16) if candidate is not None))


def _sum_type(dtype: Any) -> Any:
    return jnp.int32 if dtype == jnp.int8 else jnp.float32
