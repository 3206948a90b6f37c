"""The tile program of the causal convolution: a tile's neighbourhood is normalised into VMEM, then multiplied.

Shapes: T frames, X columns, Y rows, C channels in, O channels out.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.vae.conv_shape import LANES

NORM_FLOOR = 1e-24  # The smallest sum of squares: torch's F.normalize divides by at least 1e-12.


def run_grid_step(*inputs, shape, norm, norm_after, residual, padding, norm_eps, precision):  # type: ignore[no-untyped-def]
    """Convolve one tile; the arguments are inputs of `causal_conv` in the order in which it adds them."""
    refs = iter(inputs)
    pieces = 3 if shape.centred else 2 if shape.past else 1
    tiles = [list(itertools.islice(refs, 1 + 2 * shape.halo)) for _ in range(pieces)]
    edge_refs = list(itertools.islice(refs, 2 * shape.halo * (pieces if shape.centred else 1)))
    w_ref, b_ref = next(refs), next(refs)
    gamma = next(refs)[0] if norm else None
    gamma_after = next(refs)[0] if norm_after else None
    residual_ref = next(refs) if residual else None
    kept_ref, o_ref, seen_ref = refs
    slab, step = shape.tile(pl.program_id(0), pl.program_id(1))
    # The last slab may have fewer frames; its last is repeated.
    frames_left = None if shape.all_frames % shape.frames == 0 else shape.all_frames - slab * shape.frames
    norm_in = None if gamma is None else functools.partial(normalise, gamma=gamma, eps=norm_eps)

    def fill() -> None:
        frame = 0
        if shape.centred:
            for piece, source in enumerate(tiles):
                frame = _fill(
                    source, edge_refs[piece::pieces], 0, seen_ref, frame, frames_left, norm_in, step, padding, shape
                )
            return
        for source in reversed(tiles):  # The past comes first.
            frame = _fill(source, edge_refs, frame, seen_ref, frame, frames_left, norm_in, step, padding, shape)

    if shape.o_block == shape.o:
        fill()
    else:
        pl.when(pl.program_id(2) == 0)(fill)
    first_column = step * shape.block + jax.lax.broadcasted_iota(jnp.int32, (shape.part, shape.y, 1), 0)
    kept_rows = jax.lax.broadcasted_iota(jnp.int32, (shape.part, shape.y, 1), 1) < kept_ref[1]
    parts = shape.block // shape.part

    def products(index, _):  # type: ignore[no-untyped-def]
        group, part = index // parts, index % parts * shape.part
        taps = [
            seen_ref[group * shape.group * shape.stride + frame, pl.ds(part + column, shape.part)].reshape(
                shape.part * shape.y, -1
            )
            for frame in range(shape.kt + shape.group - 1)
            for column in range(shape.kx)
        ]
        joined = jnp.concatenate(taps, axis=1) if len(taps) > 1 else taps[0]
        total = jnp.dot(joined, w_ref[...], precision=precision, preferred_element_type=jnp.float32)
        valid = kept_rows & (first_column + part < kept_ref[0])
        for i in range(shape.group):
            y = total[:, i * LANES : i * LANES + shape.o] if shape.group > 1 else total
            y = (y + b_ref[...]).reshape(shape.part, shape.y, -1)
            frame = group * shape.group + i
            if residual_ref is not None:
                y = y + residual_ref[frame, pl.ds(part, shape.part)].astype(jnp.float32)
            if gamma_after is not None:
                y = normalise(y, gamma_after, norm_eps)
            o_ref[frame, pl.ds(part, shape.part)] = jnp.where(valid, y, 0).astype(o_ref.dtype)

    def wanted_products(index, _):  # type: ignore[no-untyped-def]
        pl.when(index // parts * shape.group < frames_left)(lambda: products(index, None))

    # The number of iterations is a constant, so that tools that count the kernel's bundles can see it.
    each = products if frames_left is None else wanted_products
    jax.lax.fori_loop(0, shape.out_frames // shape.group * parts, each, None)


def _fill(source, edge_refs, edge_frame, seen_ref, frame, frames_left, norm, step, padding, shape):  # type: ignore[no-untyped-def]
    """Put a source's tile and the columns beside it into the scratch, from frame `frame` on, and return the next.

    The source's first frame is frame `edge_frame` of the edges. If it has more than `frames_left` frames, the last
    of these is repeated.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, (shape.y, 1), 0)

    def put(frame, column, x):  # type: ignore[no-untyped-def]
        x = norm(x) if norm is not None else x.astype(jnp.float32)
        if shape.lanes != shape.c:
            x = jnp.concatenate([x, jnp.zeros((shape.y, shape.lanes - shape.c), x.dtype)], axis=1)
        for tap in range(shape.ky):
            shift = tap - shape.before[1]
            seen = x
            if shift:
                beyond = row == (0 if shift < 0 else shape.y - 1)
                outside = {"zeros": 0.0, "edge": x}.get(padding)
                if outside is None:
                    outside = pltpu.roll(x, shift % shape.y, 0)  # The row beyond the other edge.
                seen = jnp.where(beyond, outside, pltpu.roll(x, -shift % shape.y, 0))
            seen_ref[frame, column, :, tap * shape.lanes : (tap + 1) * shape.lanes] = seen.astype(seen_ref.dtype)

    tile, *sides = source
    count = tile.shape[0]
    lead = shape.before[0]

    def put_frame(i, _):  # type: ignore[no-untyped-def]
        at = frame + i
        if frames_left is not None and count > 1:
            i = jnp.minimum(i, frames_left - 1)
        edge = edge_frame + i
        if shape.halo and lead:
            put(at, 0, jnp.where(step == 0, edge_refs[0][edge, 0], sides[0][i, 0]))
        if shape.halo and lead < shape.kx - 1:
            put(at, shape.block + lead, jnp.where(step == shape.steps - 1, edge_refs[1][edge, 0], sides[1][i, 0]))
        jax.lax.fori_loop(0, shape.block, lambda j, _: put(at, lead + j, tile[i, j]), None)

    jax.lax.fori_loop(0, count, put_frame, None)
    return frame + count


def normalise(x: jax.Array, gamma: jax.Array, eps: float = 0.0) -> jax.Array:
    """Divide x by its root mean square over the last axis, multiply it by gamma [C] and apply SiLU, in float32."""
    x = x.astype(jnp.float32)
    squares = (x * x).sum(-1, keepdims=True)
    squares = squares + eps * x.shape[-1] if eps else jnp.maximum(squares, NORM_FLOOR)
    inverse = jax.lax.rsqrt(squares)
    scaled = x * (inverse * math.sqrt(x.shape[-1])) * gamma.astype(jnp.float32)
    return scaled / (1 + jnp.exp(-scaled))
