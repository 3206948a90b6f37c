"""A causal 3D convolution for TPU on arrays whose rows are folded into lanes.

Where a VAE has few channels, a pixel leaves lanes of a register and columns of a matrix unit empty: 96 channels fill
three quarters of 128 lanes and of half of 256 columns. Folded, some rows of a column lie one after another in the lanes
of one row, without gaps, and a product computes the outputs of two or more of them. The input is normalised by the
convolution before it, because a tile reads frames and columns that others read, too. Nearest-neighbour doubling before
a convolution makes its result's folded rows twice as long; no pixel is moved (docs/kernels.md has the cycles).

Shapes: T frames, X columns, Y folded rows, g picture rows in a folded row, C channels in, O channels out, kt kx ky taps
of the kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.tiles import vmem_bytes
from wan_tpu_kernels.vae.causal_conv import Edges, causal_conv_reference, zero_outside
from wan_tpu_kernels.vae.conv_kernel import normalise
from wan_tpu_kernels.vae.folded_kernel import run_folded_step
from wan_tpu_kernels.vae.folded_shape import FoldedShape, folded_shape, folded_weights


def suits_chip() -> bool:
    """Return whether the chip of the current mesh has room for the tiles of folded rows.

    Their products fill matrix units of 256 columns. For units of 128 columns they need more VMEM than there is.
    """
    return bool(pltpu.get_tpu_info().mxu_column_size >= 256)


def folded_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    fold: int,
    past: jax.Array | None = None,
    edges: Edges = (None, None),
    residual: jax.Array | None = None,
    norm_after: jax.Array | None = None,
    keeps_raw: bool = False,
    before: tuple[int, int] = (0, 0),
    doubles: bool = False,
    joins: bool = False,
    columns: jax.Array | int | None = None,
    rows: jax.Array | int | None = None,
    interpret: bool = False,
) -> Any:
    """Convolve frames that follow `past` frames.

    Args:
        x: [T, X, Y, g C], zero outside of the picture; Y is a multiple of 16, and g C of 128.
        weight: [kt, kx, ky, C, O]; with `doubles` [1, 3, 3, C, 4 O], the upper left, lower left, upper right and lower
            right pixels that one becomes, of which each has taps in 2 x 2 of the 3 x 3 pixels around it.
        bias: [O].
        fold: g.
        past: [at least P, X, Y, g C], of which the last P = kt - 1 frames are used. Without it, kt must be 1.
        edges: The column before the first and the one after the last, [P + T, 1, Y, g C] each; zeros by default.
        residual: As the result, added to it before `norm_after`.
        norm_after: [O]. The result is divided by its root mean square over the channels, multiplied by this and passed
            through SiLU.
        keeps_raw: Whether to return the result before `norm_after`, too.
        before: Columns and rows of a window before its pixel.
        doubles: Whether columns and rows are doubled.
        joins: Whether all frames of the result lie in the lanes of one row, which suits few channels.
        columns, rows: Size of the picture before doubling; values beyond it are returned as zero.
        interpret: As for `pallas_call`.

    Returns:
        [T, X, Y, g O]; with `doubles` [T, 2 X, Y, 2 g O]; with `joins` [1, X, Y, T g O]. With `keeps_raw` two of these:
        normalised, and before.
    """
    results = 1 + keeps_raw + (residual is not None)
    shape = folded_shape(
        x, weight, past, fold, before, vmem_bytes(interpret=interpret),
        doubles=doubles, joins=joins, results=results, interpret=interpret,
    )  # fmt: skip
    arrays, specs = [], []

    def add_input(array: jax.Array, block: tuple[int | None, ...], index: Any) -> None:
        arrays.append(array)
        specs.append(pl.BlockSpec(block, index))

    def step_of(j: Any, i: Any) -> Any:
        return j * (shape.steps // shape.cores) + i

    def add_tile(array: jax.Array, frames: int) -> None:
        """Add as inputs a tile of columns of the last frames, and the columns before and after it."""
        assert array.shape[0] % frames == 0
        at, size, rest = array.shape[0] // frames - 1, shape.block, array.shape[2:]
        add_input(array, (frames, size, *rest), lambda j, i: (at, step_of(j, i), 0, 0))
        for offset in (-1, size) if shape.halo else ():

            def side(j: Any, i: Any, offset: int = offset) -> tuple[Any, ...]:
                return at, jnp.clip(step_of(j, i) * size + offset, 0, shape.x - 1), 0, 0

            add_input(array, (frames, 1, *rest), side)

    add_tile(x, shape.frames)
    if shape.past:
        add_tile(past, shape.past)  # type: ignore[arg-type]
    if shape.halo:
        nothing = jnp.zeros((shape.past + shape.frames, 1, *x.shape[2:]), x.dtype)
        for edge in edges:
            edge = nothing if edge is None else edge
            add_input(edge, edge.shape, lambda j, i: (0, 0, 0, 0))
    arrays.append(folded_weights(weight, shape))
    specs.append(pl.BlockSpec(shape.weights, lambda j, i: (0,) * 5, pipeline_mode=pl.Buffered(1)))  # Read once.
    for vector in (bias, norm_after):
        if vector is not None:
            lanes = jnp.tile(vector.astype(jnp.float32), shape.group * shape.out_fold)
            lanes = jnp.pad(lanes, (0, -len(lanes) % 128)).reshape(1, -1)
            add_input(lanes, lanes.shape, lambda j, i: (0, 0))
    sides = (shape.sides,) if doubles else ()
    frames = shape.out_frames // shape.group
    whole = (frames, shape.x, *sides, shape.y, shape.out_lanes)
    result = (frames, shape.block, *whole[2:])
    result_spec = pl.BlockSpec(result, lambda j, i: (0, step_of(j, i), *[0] * (len(whole) - 2)))
    if residual is not None:
        arrays.append(residual.reshape(whole))
        specs.append(result_spec)
    specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    valid = _valid(shape, columns, rows)
    arrays.append(jnp.stack([jnp.asarray(count, jnp.int32) for count in valid]))
    seen = (shape.past + shape.frames, shape.block + shape.kx - 1, shape.y, 128 * len(shape.registers))
    macs = shape.out_frames * shape.x * shape.y * fold * weight.size
    size = x.size + weight.size + results * shape.out_frames * shape.x * shape.y * shape.out_fold * shape.o
    out_shape = jax.ShapeDtypeStruct(whole, x.dtype)
    outputs = pl.pallas_call(
        functools.partial(
            run_folded_step,
            shape=shape,
            residual=residual is not None,
            norm=norm_after is not None,
            raw=keeps_raw,
            masks=not _is_whole(shape, *valid),
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        ),
        out_shape=[out_shape] * (1 + keeps_raw),
        grid=(shape.cores, shape.steps // shape.cores),
        in_specs=specs,
        out_specs=[result_spec] * (1 + keeps_raw),
        scratch_shapes=[pltpu.VMEM(seen, x.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes(interpret=interpret)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * macs,
            transcendentals=0 if norm_after is None else x.size,
            bytes_accessed=x.dtype.itemsize * size,
        ),
        name="folded_causal_conv" + ("" if norm_after is None else "_norm") + ("" if residual is None else "_residual"),
        interpret=interpret,
    )(*arrays)
    outputs = [out.reshape(frames, shape.sides * shape.x, shape.y, -1) for out in outputs]
    return tuple(outputs) if keeps_raw else outputs[0]


def _valid(shape: FoldedShape, columns: Any, rows: Any) -> tuple[Any, Any]:
    """Return the size of the picture of the result."""
    columns = shape.x if columns is None else columns
    rows = shape.y * shape.fold if rows is None else rows
    return columns * shape.sides, rows * shape.sides


def _is_whole(shape: FoldedShape, columns: Any, rows: Any) -> bool:
    """Return whether all values of the result are known to be the picture's."""
    whole = shape.x * shape.sides, shape.y * shape.out_fold
    return all(isinstance(count, int) and count >= size for count, size in zip((columns, rows), whole, strict=True))


def folded_conv_reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    fold: int,
    past: jax.Array | None = None,
    edges: Edges = (None, None),
    residual: jax.Array | None = None,
    norm_after: jax.Array | None = None,
    keeps_raw: bool = False,
    before: tuple[int, int] = (0, 0),
    doubles: bool = False,
    joins: bool = False,
    columns: jax.Array | int | None = None,
    rows: jax.Array | int | None = None,
) -> Any:
    """Compute the same as `folded_conv`, in plain jnp, for any Y, g and C."""
    unfold = functools.partial(unfold_rows, fold=fold)
    y = causal_conv_reference(
        unfold(x).astype(jnp.float32),
        weight.astype(jnp.float32),
        jnp.tile(bias, 4) if doubles else bias,
        past=None if past is None else unfold(past).astype(jnp.float32),
        edges=tuple(None if edge is None else unfold(edge).astype(jnp.float32) for edge in edges),  # type: ignore[arg-type]
        before=before,
    )
    factor = 1
    if doubles:
        y, fold, factor = enlarge(y), 2 * fold, 2
    if residual is not None:
        y = y + unfold_rows(residual, fold=fold).astype(jnp.float32)
    normed = y if norm_after is None else normalise(y, norm_after)
    inside = [None if size is None else factor * size for size in (columns, rows)]

    def finish(y: jax.Array) -> jax.Array:
        out = fold_rows(zero_outside(y, *inside).astype(x.dtype), fold=fold)
        if joins:
            out = out.transpose(1, 2, 0, 3).reshape(1, *out.shape[1:3], -1)
        return out

    return (finish(normed), finish(y)) if keeps_raw else finish(normed)


def enlarge(four: jax.Array) -> jax.Array:
    """Return pixels [T, 2 X, 2 Y, C] from squares [T, X, Y, 4 C]: upper left, lower left, upper and lower right."""
    frames, columns, rows, channels = four.shape
    squares = four.reshape(frames, columns, rows, 2, channels // 2).transpose(0, 1, 3, 2, 4)
    return squares.reshape(frames, 2 * columns, 2 * rows, channels // 4)


def fold_rows(x: jax.Array, *, fold: int) -> jax.Array:
    """Return [T, X, Y, g C] from pictures [T, X, g Y, C]."""
    return x.reshape(*x.shape[:2], x.shape[2] // fold, fold * x.shape[3])


def unfold_rows(x: jax.Array, *, fold: int) -> jax.Array:
    """Return pictures [T, X, g Y, C] from [T, X, Y, g C]."""
    return x.reshape(*x.shape[:2], x.shape[2] * fold, x.shape[3] // fold)
