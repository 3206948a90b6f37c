"""Group normalisation of video frames in two passes over HBM: moments, then scale, shift and SiLU.

Statistics are over a chunk of frames and the whole picture, which several devices may share, so the devices' moments
are merged before anything is normalised. Scale and shift may differ from pixel to pixel: they are then passed at the
size of the latents and enlarged in VMEM as needed; at the size of the frames they would be twice the frames' bytes.

Shapes: T frames, X columns, Y rows, C channels; T' X' Y' the same of the latents.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.tiles import pass_over, vmem_bytes
from wan_tpu_kernels.vae.causal_conv import zero_outside

TILE_VALUES = 2**21  # Values of a grid step: 4 MB of bfloat16, whose transfer takes ten times as long as its start.
VALUES_AT_ONCE = 2**15  # Values of one iteration of the inner loops: half of the vector registers.
SUBLANES = 8

Moments = tuple[jax.Array, jax.Array, jax.Array]


def channel_moments(
    x: jax.Array, *, columns: jax.Array | int | None = None, rows: int | None = None, interpret: bool = False
) -> Moments:
    """Return each channel's number of values, their mean, and the sum of their squared differences from it.

    Args:
        x: [T, X, Y, C], zero outside of the picture; Y is a multiple of 16.
        columns, rows: Size of the picture; values beyond it are ignored.
        interpret: As for `pallas_call`.

    Returns:
        float32 [1], [C] and [C]; all zero if the picture has no column here.
    """
    frames, width, height, channels = x.shape
    block = _columns_of_tile(x, 1)
    steps = width // block
    columns = jnp.asarray(width if columns is None else columns, jnp.int32)
    rows = height if rows is None else rows
    parts = pl.pallas_call(
        functools.partial(_moments_kernel, rows=rows),
        out_shape=jax.ShapeDtypeStruct((frames, steps, 2, channels), jnp.float32),
        grid=(frames, steps),
        in_specs=[
            pl.BlockSpec((None, block, height, channels), lambda t, i: (t, i, 0, 0)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
        ],
        out_specs=pl.BlockSpec((None, None, 2, channels), lambda t, i: (t, i, 0, 0)),
        compiler_params=_params(interpret),
        cost_estimate=pass_over(x),
        name="channel_moments",
        interpret=interpret,
    )(x, columns.reshape(1))
    counts = jnp.clip(columns - jnp.arange(steps) * block, 0, block).astype(jnp.float32) * rows
    each = jnp.broadcast_to(counts, (frames, steps)).reshape(-1, 1)
    return merge_moments(each, parts[:, :, 0].reshape(-1, channels), parts[:, :, 1].reshape(-1, channels))


def channel_moments_reference(
    x: jax.Array, *, columns: jax.Array | int | None = None, rows: int | None = None
) -> Moments:
    """Compute the same as `channel_moments`, in plain jnp, for any Y."""
    wide = x.astype(jnp.float32)
    count = jnp.asarray(x.shape[1] if columns is None else columns, jnp.float32) * x.shape[0]
    count = count * (x.shape[2] if rows is None else rows)
    mean = zero_outside(wide, columns, rows).sum((0, 1, 2)) / jnp.maximum(count, 1)
    centred = zero_outside(wide - mean, columns, rows)
    return count.reshape(1), mean, (centred * centred).sum((0, 1, 2))


def merge_moments(counts: jax.Array, means: jax.Array, squares: jax.Array) -> Moments:
    """Return the moments of the union of parts [N, ...], without cancellation (Chan et al. 1979)."""
    total = counts.sum(0)
    mean = (counts * means).sum(0) / jnp.maximum(total, 1)
    return total, mean, (squares + counts * (means - mean) ** 2).sum(0)


def norm_silu(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    around: jax.Array | None = None,
    *,
    columns: jax.Array | int | None = None,
    rows: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute silu(x * scale + shift), or silu((x * scale + shift) * s + b) with s and b of each pixel.

    Args:
        x: [T, X, Y, C]; Y is a multiple of 16.
        scale, shift: [C].
        around: [T', X', Y', 2 C], s and b of each latent pixel; a pixel uses those of the nearest latent pixel. If the
            number of frames is odd and above one, the first latent frame is for the first frame only.
        columns, rows: Size of the picture; values beyond it are returned as zero.
        interpret: As for `pallas_call`.

    Returns:
        [T, X, Y, C] in the dtype of x.
    """
    frames, width, height, channels = x.shape
    factor = 1 if around is None else height // around.shape[2]
    block = _columns_of_tile(x, factor)
    tile = pl.BlockSpec((None, block, height, channels), lambda t, i: (t, i, 0, 0))
    vector = pl.BlockSpec((1, channels), lambda t, i: (0, 0))
    specs, arrays, scratch = [tile, vector, vector], [x, _row(scale), _row(shift)], []
    if around is not None:
        latent = latent_frame(frames, around.shape[0])
        size = (None, block // factor, *around.shape[2:])
        specs.append(pl.BlockSpec(size, lambda t, i: (latent(t), i, 0, 0)))
        arrays.append(around)
        scratch.append(pltpu.VMEM((height, 2 * channels), around.dtype))
    specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    arrays.append(jnp.asarray(width if columns is None else columns, jnp.int32).reshape(1))
    return pl.pallas_call(
        functools.partial(_norm_kernel, rows=height if rows is None else rows, factor=factor),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(frames, width // block),
        in_specs=specs,
        out_specs=tile,
        scratch_shapes=scratch,
        compiler_params=_params(interpret),
        cost_estimate=pass_over(x),
        name="norm_silu" if around is None else "norm_silu_around",
        interpret=interpret,
    )(*arrays)


def norm_silu_reference(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    around: jax.Array | None = None,
    *,
    columns: jax.Array | int | None = None,
    rows: int | None = None,
) -> jax.Array:
    """Compute the same as `norm_silu`, in plain jnp, for any Y."""
    frames, _, height, channels = x.shape
    y = x.astype(jnp.float32) * scale.astype(jnp.float32) + shift.astype(jnp.float32)
    if around is not None:
        latent, factor = latent_frame(frames, around.shape[0]), height // around.shape[2]
        upsampled = around[jnp.asarray([latent(frame) for frame in range(frames)])]
        upsampled = upsampled.repeat(factor, axis=1).repeat(factor, axis=2).astype(jnp.float32)
        y = y * upsampled[..., :channels] + upsampled[..., channels:]
    return zero_outside(jax.nn.silu(y), columns, rows).astype(x.dtype)


def latent_frame(frames: int, latents: int) -> Callable[[jax.Array | int], jax.Array | int]:
    """Return a function from frames to latent frames; if `frames` is odd and above one, the first has its own."""
    if frames == 1 or frames % 2 == 0:
        return lambda frame: frame // (frames // latents)
    each = (frames - 1) // (latents - 1)
    return lambda frame: (frame + each - 1) // each


def _columns_of_tile(x: jax.Array, factor: int) -> int:
    """Return the columns of a grid step: they divide the strip and belong to whole columns of the latents."""
    _, width, height, channels = x.shape
    sizes = [n for n in range(factor, width + 1, factor) if width % n == 0]
    return max((n for n in sizes if n * height * channels <= TILE_VALUES), default=factor)


def _params(interpret: bool) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem_bytes(interpret=interpret)
    )


def _row(vector: jax.Array) -> jax.Array:
    return vector.reshape(1, -1).astype(jnp.float32)


def _rows_at_once(height: int, channels: int) -> int:
    """Return how many rows of a column are computed at a time: as many as registers hold."""
    most = max(SUBLANES, VALUES_AT_ONCE // channels // SUBLANES * SUBLANES)
    return next((n for n in range(most, 0, -SUBLANES) if height % n == 0), height)


def _is_inside(start: jax.Array, count: int, column: jax.Array, columns: jax.Array, rows: int) -> jax.Array:
    """Return whether each of `count` rows of a column is the picture's, [count, 1]."""
    row = start + jax.lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    return (row < rows) & (column < columns)


def _moments_kernel(x_ref, columns_ref, o_ref, *, rows):  # type: ignore[no-untyped-def]
    """Sum differences from a value near the mean, and their squares, in one pass; a distant value would lose bits."""
    block, height, channels = x_ref.shape
    size = _rows_at_once(height, channels)
    pieces, first = height // size, pl.program_id(1) * block
    near = x_ref[0, : min(size, rows), :].astype(jnp.float32).mean(0, keepdims=True)

    def add(index, sums):  # type: ignore[no-untyped-def]
        column, start = index // pieces, pl.multiple_of(index % pieces * size, size)
        away = x_ref[column, pl.ds(start, size), :].astype(jnp.float32) - near
        away = jnp.where(_is_inside(start, size, first + column, columns_ref[0], rows), away, 0.0)
        rows_of_sums = away.reshape(-1, SUBLANES, channels)
        return sums[0] + rows_of_sums.sum(0), sums[1] + (rows_of_sums * rows_of_sums).sum(0)

    nothing = jnp.zeros((SUBLANES, channels), jnp.float32)
    total, squares = jax.lax.fori_loop(0, block * pieces, add, (nothing, nothing))
    total, squares = total.sum(0, keepdims=True), squares.sum(0, keepdims=True)
    valid = jnp.clip(columns_ref[0] - first, 0, block) * rows
    count = jnp.maximum(valid, 1).astype(jnp.float32)
    o_ref[0:1, :] = jnp.where(valid > 0, near + total / count, 0.0)
    o_ref[1:2, :] = squares - total * total / count


def _norm_kernel(x_ref, scale_ref, shift_ref, *refs, rows, factor):  # type: ignore[no-untyped-def]
    around_ref, columns_ref, o_ref, wide_ref = refs if len(refs) == 4 else (None, *refs, None)
    block, height, channels = x_ref.shape
    first, size = pl.program_id(1) * block, _rows_at_once(height, channels)
    pieces = height // size

    def add_latent_column(index, _):  # type: ignore[no-untyped-def]
        """Compute the columns of one column of the latents."""
        if around_ref is not None:
            _repeat_rows(around_ref[index], wide_ref, factor)
        jax.lax.fori_loop(0, factor * pieces, functools.partial(add_piece, index * factor), None)

    def add_piece(before, index, _):  # type: ignore[no-untyped-def]
        column, start = before + index // pieces, pl.multiple_of(index % pieces * size, size)
        here = pl.ds(start, size)
        y = x_ref[column, here, :].astype(jnp.float32) * scale_ref[...] + shift_ref[...]
        if wide_ref is not None:
            wide = wide_ref[here, :].astype(jnp.float32)
            y = y * wide[:, :channels] + wide[:, channels:]
        y = y / (1 + jnp.exp(-y))
        inside = _is_inside(start, size, first + column, columns_ref[0], rows)
        o_ref[column, here, :] = jnp.where(inside, y, 0.0).astype(o_ref.dtype)

    jax.lax.fori_loop(0, block // factor, add_latent_column, None)


def _repeat_rows(x: jax.Array, wide_ref, factor: int) -> None:  # type: ignore[no-untyped-def]
    """Repeat each row of x by a product with a matrix of ones and zeros, which is exact."""
    if factor == 1:
        wide_ref[...] = x
        return
    row, source = (jax.lax.broadcasted_iota(jnp.int32, (wide_ref.shape[0], x.shape[0]), axis) for axis in (0, 1))
    ones = jnp.where(row // factor == source, 1.0, 0.0).astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide = jnp.dot(ones, x, precision=precision, preferred_element_type=jnp.float32)
    wide_ref[...] = wide.astype(wide_ref.dtype)
