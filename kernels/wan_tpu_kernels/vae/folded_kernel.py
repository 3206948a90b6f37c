"""The tile program of the convolution with folded rows.

A tile's neighbourhood is laid out in VMEM so that what a product reads is whole registers, then multiplied.
Shapes: T frames, X columns, Y folded rows, L lanes of a folded row of the result.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.vae.conv_kernel import NORM_FLOOR
from wan_tpu_kernels.vae.folded_shape import LANES, Register


def run_folded_step(*inputs, shape, residual, norm, raw, masks, precision):  # type: ignore[no-untyped-def]
    """Convolve one tile; the arguments are inputs of `folded_conv` in the order in which it adds them."""
    refs = iter(inputs)
    sources = [list(itertools.islice(refs, 1 + 2 * shape.halo)) for _ in range(2 if shape.past else 1)]
    edge_refs = list(itertools.islice(refs, 2 * shape.halo))
    w_ref, b_ref = next(refs), next(refs)
    gamma_ref = next(refs) if norm else None
    residual_ref = next(refs) if residual else None
    size_ref = next(refs)
    o_ref = next(refs)
    raw_ref = next(refs) if raw else None
    seen_ref = next(refs)
    step = pl.program_id(0) * (shape.steps // shape.cores) + pl.program_id(1)
    frame = 0
    for source in reversed(sources):  # The past comes first.
        frame = _fill(source, edge_refs, seen_ref, frame, step, shape)
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    parts = shape.block // shape.part

    def products(index, _):  # type: ignore[no-untyped-def]
        frame, part = index // parts, index % parts * shape.part
        here = pl.ds(part, shape.part)
        for side in range(shape.sides):
            blocks = _multiply(seen_ref, w_ref, side, frame, part, lane, shape, precision)
            blocks = [block + b_ref[:, _block(k)] for k, block in enumerate(blocks)]
            place = (frame, here, side) if shape.doubles else (frame, here)
            sizes = [min(LANES, shape.out_lanes - k * LANES) for k in range(len(blocks))]
            if residual_ref is not None:
                for k, size in enumerate(sizes):
                    added = residual_ref[(*place, slice(None), slice(k * LANES, k * LANES + size))]
                    blocks[k] = blocks[k] + added.reshape(-1, size).astype(jnp.float32)
            mask = [None] * len(blocks)
            if masks:
                mask = _picture_mask(size_ref, (step * shape.block + part) * shape.sides + side, lane, shape)

            def store(ref, blocks, mask=mask, place=place, sizes=sizes):  # type: ignore[no-untyped-def]
                for k, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
                    values = block if mask[k] is None else jnp.where(mask[k], block, 0)
                    values = values[:, :size].astype(ref.dtype).reshape(shape.part, shape.y, size)
                    ref[(*place, slice(None), slice(k * LANES, k * LANES + size))] = values

            if raw_ref is not None:
                store(raw_ref, blocks)
            if gamma_ref is not None:
                blocks = _normalise_rows(blocks, gamma_ref, lane, shape)
            store(o_ref, blocks)

    jax.lax.fori_loop(0, shape.out_frames // shape.group * parts, products, None)


def _block(k: int) -> slice:
    return slice(k * LANES, (k + 1) * LANES)


def _multiply(seen_ref, w_ref, side, frame, part, lane, shape, precision):  # type: ignore[no-untyped-def]
    """Return the sums of a part's outputs, one [part Y, 128] for each register of the result."""
    blocks: list[Any] = [None] * shape.out_blocks
    for product in shape.products:
        if product.side != side:
            continue
        outputs = slice(product.first, product.first + product.width)
        taps, weights = [], []
        for time, column in itertools.product(range(shape.kt + shape.group - 1), product.columns):
            for register in product.registers:
                here = _block(shape.registers.index(register))
                taps.append(seen_ref[frame + time, pl.ds(part + column, shape.part), :, here])
                for block, start, stop in register:
                    first = (block - shape.low) * LANES
                    lanes = slice(first + start, first + stop)
                    weights.append(w_ref[side, time, column - product.columns[0], lanes, outputs])
        total = jnp.dot(
            jnp.concatenate([tap.reshape(-1, LANES) for tap in taps], axis=1),
            jnp.concatenate(weights),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        for k in range(product.width // LANES):
            at = product.first // LANES + k
            values = total[:, _block(k)]
            # The product before this one has some of the register's lanes, and computed a part of the others.
            blocks[at] = values if k or product.start == product.first else _join(blocks[at], values, product, lane)
    return blocks


def _join(before, after, product, lane):  # type: ignore[no-untyped-def]
    return jnp.where(lane < product.start - product.first, before, after)


def _picture_mask(size_ref, first_column, lane, shape):  # type: ignore[no-untyped-def]
    """Return for each register of the result which of its values are the picture's, [part Y, 128]."""
    index = jax.lax.broadcasted_iota(jnp.int32, (shape.part, shape.y, 1), 0)
    inside = (first_column + index * shape.sides < size_ref[0]).reshape(-1, 1)
    folded = jax.lax.broadcasted_iota(jnp.int32, (shape.part, shape.y, 1), 1).reshape(-1, 1)
    rows_left = jnp.where(inside, size_ref[1] - folded * shape.out_fold, 0)
    # The row of each lane, of those that a folded row has.
    return [(lane + k * LANES) // shape.o % shape.out_fold < rows_left for k in range(shape.out_blocks)]


def _normalise_rows(blocks, gamma_ref, lane, shape):  # type: ignore[no-untyped-def]
    """Divide each picture row by its root mean square over the channels, multiply by gamma and apply SiLU."""
    o, rows = shape.o, shape.out_fold
    squares = [block * block for block in blocks]
    inverse = []
    for row in range(rows):
        parts = []
        for k in range(row * o // LANES, ((row + 1) * o - 1) // LANES + 1):
            start, stop = max(row * o - k * LANES, 0), min((row + 1) * o - k * LANES, LANES)
            part = squares[k]
            if (start, stop) != (0, LANES):
                part = jnp.where((lane >= start) & (lane < stop), part, 0.0)
            parts.append(part)
        total = sum(parts[1:], parts[0])
        # Half of gamma, because silu(2 h) = h tanh(h) + h.
        inverse.append(jax.lax.rsqrt(jnp.maximum(total.sum(-1, keepdims=True), NORM_FLOOR)) * (math.sqrt(o) / 2))
    out = []
    for k, block in enumerate(blocks):
        first, last = k * LANES // o, min(((k + 1) * LANES - 1) // o, rows - 1)
        scale = inverse[last]
        for row in range(last - 1, first - 1, -1):
            scale = jnp.where(lane < (row + 1) * o - k * LANES, inverse[row], scale)
        half = block * scale * gamma_ref[:, _block(k)]
        out.append(half * jnp.tanh(half) + half)
    return out


def _fill(source, edge_refs, seen_ref, frame, step, shape):  # type: ignore[no-untyped-def]
    """Put a source's tile and the columns beside it into the scratch, from frame `frame` on, and return the next."""
    tile, *sides = source
    lead = shape.before[0]

    def put_frame(i, _):  # type: ignore[no-untyped-def]
        at = frame + i
        if shape.halo and lead:
            put(at, 0, jnp.where(step == 0, edge_refs[0][at, 0], sides[0][i, 0]))
        if shape.halo and lead < shape.kx - 1:
            put(at, shape.block + lead, jnp.where(step == shape.steps - 1, edge_refs[1][at, 0], sides[1][i, 0]))
        jax.lax.fori_loop(0, shape.block, lambda j, _: put(at, lead + j, tile[i, j]), None)

    def put(frame, column, x):  # type: ignore[no-untyped-def]
        for index, values in enumerate(_lay_out(x, shape.registers, shape.blocks)):
            seen_ref[frame, column, :, _block(index)] = values

    jax.lax.fori_loop(0, tile.shape[0], put_frame, None)
    return frame + tile.shape[0]


def _lay_out(x: jax.Array, registers: tuple[Register, ...], blocks: int) -> list[jax.Array]:
    """Return the registers of a column x [Y, L], [Y, 128] each; rows beyond it are zero."""
    rows = x.shape[0]
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    shifted: dict[int, jax.Array] = {}

    def values(block: int) -> jax.Array:
        if 0 <= block < blocks:
            return x[:, _block(block)]
        if block not in shifted:
            by, beyond = (1, 0) if block < 0 else (rows - 1, rows - 1)
            rolled = pltpu.roll(x[:, _block(block % blocks)].astype(jnp.float32), by, 0)
            shifted[block] = jnp.where(row == beyond, 0.0, rolled).astype(x.dtype)
        return shifted[block]

    out = []
    for (block, _, cut), *rest in registers:
        first = values(block)
        out.append(jnp.where(lane < cut, first, values(rest[0][0])) if rest else first)
    return out
