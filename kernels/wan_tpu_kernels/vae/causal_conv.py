"""A causal 3D convolution for TPU, with its halo and the operations before and after it, in one pass over HBM.

A video VAE is little more than such convolutions with elementwise operations between them. XLA's own convolutions take
10 s and more each to compile, and the matrix units wait for the operations between them. Here a tile's neighbourhood is
normalised once into VMEM, laid out so that all taps are the inputs of one matrix product, and everything that follows
the product is applied before it is written (docs/kernels.md has the cycles).

Some VAEs aren't causal: their windows reach as far forwards as backwards. Then all frames of a video are one call, and
a tile has some of them and the frame on either side.

Shapes: T frames, X columns, Y rows, C channels in, O channels out, P past frames, kt kx ky taps of the kernel. Columns
come before rows: columns are divided among devices, rows lie in a tile's sublanes, channels in its lanes.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.tiles import vmem_bytes
from wan_tpu_kernels.vae.conv_kernel import normalise, run_grid_step
from wan_tpu_kernels.vae.conv_shape import conv_matrix, conv_shape

Edges = tuple[jax.Array | None, jax.Array | None]
# The values beyond a picture, by numpy's names: zeros, the last pixel repeated, or the pixels before the last,
# mirrored.
Padding = Literal["zeros", "edge", "reflect"]


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    past: jax.Array | None = None,
    edges: Edges = (None, None),
    norm: jax.Array | None = None,
    norm_after: jax.Array | None = None,
    residual: jax.Array | None = None,
    before: tuple[int, int] = (0, 0),
    stride: int = 1,
    padding: Padding = "zeros",
    centred: bool = False,
    norm_eps: float = 0.0,
    columns: jax.Array | int | None = None,
    rows: jax.Array | int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Convolve frames that follow `past` frames.

    Args:
        x: [T, X, Y, C], zero outside of the picture; Y is a multiple of 16.
        weight: [kt, kx, ky, C, O].
        bias: [O].
        past: [at least P, X, Y, C], of which the last P = kt - stride frames are used. Without it, kt must be 1, unless
            the windows are centred.
        edges: The column before the first and the one after the last, [P + T, 1, Y, C] each (with centred windows
            [T, 1, Y, C]); zeros by default.
        norm: [C]. x, past and edges are divided by their root mean square over the channels, multiplied by this and
            passed through SiLU.
        norm_after: [O]. The same operation applied to the result.
        residual: [T', X, Y, O], added to the result, before `norm_after`.
        before: Columns and rows of a window before its pixel; after it are kx - 1 - before and ky - 1 - before.
        stride: Stride of the windows in time.
        padding: The values before the first and after the last of the Y rows.
        centred: Whether a window of three frames has its own frame in the middle. The first and the last frame are
            repeated beyond the video, and there are no past frames.
        norm_eps: Added to the mean square of both norms.
        columns, rows: Size of the picture; values beyond it are returned as zero.
        interpret: As for `pallas_call`.

    Returns:
        [T', X, Y, O] in the dtype of x.
    """
    vmem = vmem_bytes(interpret=interpret)
    shape = conv_shape(x, weight, past, before, stride, vmem, centred=centred, interpret=interpret)
    if norm_after is not None and shape.o_block < shape.o:
        out = causal_conv(
            x, weight, bias, past=past, edges=edges, norm=norm, residual=residual, before=before, stride=stride,
            padding=padding, centred=centred, norm_eps=norm_eps, columns=columns, rows=rows, interpret=interpret,
        )  # fmt: skip
        return normalise(out, norm_after, norm_eps).astype(x.dtype)  # Zeros beyond the picture stay zeros.
    arrays, specs = [], []

    def add_input(array: jax.Array, block: tuple[int | None, ...], index: Any) -> None:
        arrays.append(array)
        specs.append(pl.BlockSpec(block, index))

    def add_tile(array: jax.Array, frames: int, frame: Any) -> None:
        """Add as inputs a tile of columns of some frames, and the columns before and after it.

        Args:
            array: [T, X, Y, C].
            frames: How many frames.
            frame: frame(slab) is the index of a slab's first frame, divided by `frames`.
        """
        size, last = shape.block, shape.x - 1
        rest = (shape.y, array.shape[3])

        def tile(j: Any, i: Any, o: Any) -> tuple[Any, ...]:
            slab, step = shape.tile(j, i)
            return frame(slab), step, 0, 0

        add_input(array, (frames, size, *rest), tile)
        for offset in (-1, size) if shape.halo else ():

            def side(j: Any, i: Any, o: Any, offset: int = offset) -> tuple[Any, ...]:
                slab, step = shape.tile(j, i)
                return frame(slab), jnp.clip(step * size + offset, 0, last), 0, 0

            add_input(array, (frames, 1, *rest), side)

    # The frames of a tile: all, or those of a slab and the frame on either side of it.
    pieces: list[tuple[int, Any]] = [(shape.frames, lambda slab: x.shape[0] // shape.frames - 1)]
    if centred:
        count = shape.frames
        pieces = [
            (1, lambda slab: jnp.maximum(slab * count - 1, 0)),
            (count, lambda slab: slab),
            (1, lambda slab: jnp.minimum((slab + 1) * count, x.shape[0] - 1)),
        ]
    for frames, frame in pieces:
        add_tile(x, frames, frame)
    if past is not None and shape.past:
        assert past.shape[0] % shape.past == 0
        add_tile(past, shape.past, lambda slab: past.shape[0] // shape.past - 1)
    if shape.halo:
        nothing = jnp.zeros(((0 if centred else shape.past) + x.shape[0], 1, shape.y, shape.c), x.dtype)
        for edge in edges:
            edge = nothing if edge is None else edge
            if centred:
                for frames, frame in pieces:
                    index = lambda j, i, o, frame=frame: (frame(shape.tile(j, i)[0]), 0, 0, 0)  # noqa: E731
                    add_input(edge, (frames, *edge.shape[1:]), index)
            else:
                add_input(edge, edge.shape, lambda j, i, o: (0, 0, 0, 0))
    add_input(conv_matrix(weight, shape), (shape.inputs, shape.outputs), lambda j, i, o: (0, o))
    add_input(_row(bias), (1, shape.o_block), lambda j, i, o: (0, o))
    for vector in (norm, norm_after):
        if vector is not None:
            add_input(_row(vector), (1, len(vector)), lambda j, i, o: (0, 0))
    result = (shape.out_frames, shape.block, shape.y, shape.o_block)

    def result_tile(j: Any, i: Any, o: Any) -> tuple[Any, ...]:
        slab, step = shape.tile(j, i)
        return slab, step, 0, o

    if residual is not None:
        add_input(residual, result, result_tile)
    specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    valid = (shape.x if columns is None else columns, shape.y if rows is None else rows)
    arrays.append(jnp.stack([jnp.asarray(count, jnp.int32) for count in valid]))
    seen = (shape.past + shape.frames, shape.block + shape.kx - 1, shape.y, shape.ky * shape.lanes)
    out_frames = x.shape[0] if centred else shape.out_frames
    return pl.pallas_call(
        functools.partial(
            run_grid_step,
            shape=shape,
            norm=norm is not None,
            norm_after=norm_after is not None,
            residual=residual is not None,
            padding=padding,
            norm_eps=norm_eps,
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        ),
        out_shape=jax.ShapeDtypeStruct((out_frames, shape.x, shape.y, shape.o), x.dtype),
        grid=(shape.cores, shape.slabs * shape.steps // shape.cores, shape.o // shape.o_block),
        in_specs=specs,
        out_specs=pl.BlockSpec(result, result_tile),
        scratch_shapes=[pltpu.VMEM(seen, x.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes(interpret=interpret)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * out_frames * shape.x * shape.y * weight.size,
            transcendentals=0 if norm is None else x.size,
            bytes_accessed=x.dtype.itemsize
            * (x.size + weight.size + out_frames * shape.x * shape.y * shape.o * (1 + (residual is not None))),
        ),
        name="causal_conv" + ("" if norm is None else "_norm") + ("" if residual is None else "_residual"),
        interpret=interpret,
    )(*arrays)


def causal_conv_reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    past: jax.Array | None = None,
    edges: Edges = (None, None),
    norm: jax.Array | None = None,
    norm_after: jax.Array | None = None,
    residual: jax.Array | None = None,
    before: tuple[int, int] = (0, 0),
    stride: int = 1,
    padding: Padding = "zeros",
    centred: bool = False,
    norm_eps: float = 0.0,
    columns: jax.Array | int | None = None,
    rows: jax.Array | int | None = None,
) -> jax.Array:
    """Compute the same as `causal_conv`, in plain jnp, for any Y.

    It is one 2D convolution whose input channels include the taps in time: XLA runs it 2 to 4 times as fast on CPU as
    its own 3D convolution (32 channels, 4 frames of 320x320: 186 GFLOP/s against 45; torch 160).
    """
    taps, kx, ky, _, outputs = weight.shape
    if centred:
        x = _repeat_ends(x)
        left, right = (None if edge is None else _repeat_ends(edge) for edge in edges)
        edges = left, right
    frames = x if past is None or taps == stride else jnp.concatenate([past[stride - taps :], x])
    if kx > 1:
        nothing = jnp.zeros_like(frames[:, :1])
        sides = [nothing if edge is None else edge for edge in edges]
        frames = jnp.concatenate([sides[0]] * before[0] + [frames] + [sides[1]] * (kx - 1 - before[0]), axis=1)
    if norm is not None:
        frames = normalise(frames, norm, norm_eps).astype(x.dtype)
    out_frames = (frames.shape[0] - taps) // stride + 1
    seen = [frames[tap : tap + (out_frames - 1) * stride + 1 : stride] for tap in range(taps)]
    stacked = jnp.concatenate(seen, axis=-1) if taps > 1 else seen[0]
    kernel = weight.transpose(1, 2, 0, 3, 4).reshape(kx, ky, -1, outputs)
    if kx == ky == 1:
        y = jnp.einsum("txyc,co->txyo", stacked, kernel[0, 0], preferred_element_type=jnp.float32)
    else:
        pads = ((0, 0), (before[1], ky - 1 - before[1]))
        if padding != "zeros":
            stacked, pads = jnp.pad(stacked, ((0, 0), *pads, (0, 0)), mode=padding), ((0, 0), (0, 0))
        y = jax.lax.conv_general_dilated(
            stacked,
            kernel,
            (1, 1),
            pads,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            preferred_element_type=jnp.float32,
        )
    y = y + bias.astype(jnp.float32)
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    if norm_after is not None:
        y = normalise(y, norm_after, norm_eps)
    return zero_outside(y, columns, rows).astype(x.dtype)


def _repeat_ends(frames: jax.Array) -> jax.Array:
    return jnp.concatenate([frames[:1], frames, frames[-1:]])


def _row(vector: jax.Array) -> jax.Array:
    return vector.reshape(1, -1).astype(jnp.float32)


def zero_outside(x: jax.Array, columns: jax.Array | int | None, rows: jax.Array | int | None) -> jax.Array:
    """Return x [T, X, Y, C] with zeros beyond the picture's columns and rows."""
    if columns is not None:
        x = jnp.where(jnp.arange(x.shape[1])[:, None, None] < columns, x, 0)
    if rows is not None and not (isinstance(rows, int) and rows >= x.shape[2]):
        x = jnp.where(jnp.arange(x.shape[2])[:, None] < rows, x, 0)
    return x
