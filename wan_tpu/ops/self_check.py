"""Compare every kernel with its plain reference, on one device, with shapes whose last blocks are ragged.

On a TPU this shows whether the chip computes what the tests have seen in an interpreter.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu_kernels.catalogue import KERNELS
from wan_tpu_kernels.low_precision import Rounded
from wan_tpu_kernels.two_blocks import KEYS, QUERIES
from wan_tpu_kernels.vsa.tile_attention import PAIR, ROWS, STEP, Part
from wan_tpu_kernels.windows.attention import BEFORE

WIDTH = 128  # Width of a head: the lanes of a register.
# Tolerances. Both round inputs and results to bfloat16, whose last place is 2^-8 of a value, and sum in another order.
BFLOAT16 = 2.0**-6
FLOAT32 = 1e-5


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """A call of a kernel and of its reference.

    Attributes:
        kernel: A key of `KERNELS`.
        arrays: Arrays that both are called with.
        options: Options that both are called with.
        tolerance: The largest allowed difference, relative to the reference's largest value.
        only_kernel: Options of the kernel alone.
        compared: Returns the part of a result that is compared.
    """

    name: str
    kernel: str
    arrays: tuple[Any, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = BFLOAT16
    only_kernel: dict[str, Any] = dataclasses.field(default_factory=dict)
    compared: Callable[[Any], Any] = lambda result: result


@dataclasses.dataclass(frozen=True)
class KernelResult:
    """The difference of a kernel's result from its reference's.

    Attributes:
        name, kernel: The case's name and kernel.
        off: The largest difference, relative to the reference's largest value; NaN if there is a NaN.
        tolerance: The largest difference that roundings explain.
        seconds: The time that both took, including compilation.
    """

    name: str
    kernel: str
    off: float
    tolerance: float
    seconds: float
    shapes: list[list[int]]

    @property
    def is_right(self) -> bool:
        """Whether roundings explain the difference."""
        return self.off <= self.tolerance


def check_kernels(*, interpret: bool) -> Iterator[KernelResult]:
    """Compare every kernel with its reference.

    Args:
        interpret: Whether to interpret the kernels, at small sizes, on machines without a TPU.
    """
    for case in _cases(1 if interpret else 8):
        yield _compare(case, interpret=interpret)


def _compare(case: KernelCase, *, interpret: bool) -> KernelResult:
    kernel, reference, _ = KERNELS[case.kernel]

    def run(function: Callable[..., Any], **only: Any) -> list[jax.Array]:
        program = jax.jit(lambda *arrays: case.compared(function(*arrays, **case.options, **only)))
        return jax.tree.leaves(jax.block_until_ready(program(*case.arrays)))

    start = time.perf_counter()
    with jax.default_matmul_precision("highest"):
        results, expected = run(kernel, **case.only_kernel, interpret=interpret), run(reference)
    off = max(_difference(ours, plain) for ours, plain in zip(results, expected, strict=True))
    shapes = [list(array.shape) for array in jax.tree.leaves(case.arrays)]
    return KernelResult(case.name, case.kernel, off, case.tolerance, time.perf_counter() - start, shapes)


def _difference(result: jax.Array, expected: jax.Array) -> float:
    ours, plain = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    if ours.shape != plain.shape:
        return math.inf
    return float(np.abs(ours - plain).max() / max(np.abs(plain).max(), 1e-30))


def _cases(scale: int) -> Iterator[KernelCase]:
    draw = _Draw()
    rows = 300 * scale + 5
    yield from _attention_cases(draw, rows, 700 * scale + 3)
    x, weight, bias = draw(rows, 512), draw(640, 512) * jnp.bfloat16(0.05), draw(640)
    yield KernelCase("linear", "linear", (x, weight, bias), {"activation": "gelu_tanh"})
    residual = {"residual": draw(rows, 640), "gate": draw(1, 640, dtype=jnp.float32)}
    yield KernelCase("linear, added to a residual", "linear", (x, weight, bias), residual)
    stacked = draw(3, 640, 512) * jnp.bfloat16(0.05)
    second = {"layer": jnp.asarray(1, jnp.int32)}
    yield KernelCase("linear, one of stacked layers", "linear", (x, stacked, bias), second)
    both = draw(1280, 512) * jnp.bfloat16(0.05)
    yield KernelCase("linear, SwiGLU without a bias", "linear", (x, both, None), {"activation": "swiglu"})
    eps, vector = {"eps": 1e-6}, functools.partial(draw, dtype=jnp.float32)
    yield KernelCase("layer norm", "layer_norm", (x, vector(1, 512), vector(1, 512)), eps)
    segments = eps | {"first_rows": jnp.asarray([30, rows // 2], jnp.int32)}
    yield KernelCase("layer norm of three segments", "layer_norm", (x, vector(3, 512), vector(3, 512)), segments)
    shifted = x, vector(1, 512), vector(1, 512)
    yield KernelCase("RMS norm with a shift", "layer_norm", shifted, eps | {"centred": False})
    tables = vector(rows, WIDTH), vector(rows, WIDTH)
    yield KernelCase("RMS norm and rotation", "rms_norm_rope", (x, vector(512), tables), eps)
    own_tables = vector(rows, 512), vector(rows, 512)
    for width in (WIDTH, WIDTH // 2):
        name, options = f"RMS norm and rotation by head, {width} wide", eps | {"head": width}
        yield KernelCase(name, "rms_norm_rope", (x, vector(512), own_tables), options)
    yield KernelCase("norm of heads", "head_norm_rope", (x, vector(WIDTH), vector(WIDTH), tables), eps)
    # A value halfway between two 8-bit numbers may be rounded to either.
    yield KernelCase(
        "rounding to 8 bits", "round_rows", (x,), {"dtype": jnp.int8}, tolerance=1 / 127, compared=_restore
    )
    yield from _window_cases(draw, scale)
    yield from _vae_cases(draw, scale)


def _window_cases(draw: "_Draw", scale: int) -> Iterator[KernelCase]:
    """Cases of windows of 3 x 5 x 5, on a strip that begins at the picture's fourth column and ends within it.

    The attention's strip has boxes that share a mask, and ends within a box.
    """
    frames, columns, strip, rows, channels, reach = 9, 10 * scale, 8 * scale + 1, 40, 256, 4
    x, vector = draw(frames, columns, rows, channels), functools.partial(draw, dtype=jnp.float32)

    def matrix(outputs: int, inputs: int) -> jax.Array:
        return draw(outputs, inputs) * jnp.bfloat16(inputs**-0.5)

    sides = (draw(frames, strip + 2 * reach, rows, channels) for _ in range(2))
    options = {"heads": 4, "window": (3, 5, 5), "width": columns + 8}
    arrays = x[:, :strip] * jnp.bfloat16(0.1), *sides, jnp.asarray(3, jnp.int32), jnp.asarray(1.0)
    yield KernelCase("attention of windows", "window_attention", arrays, options)
    linears = {name: (matrix(channels, channels), draw(channels)) for name in ("context", "q", "k", "v")}
    vectors = {name: vector(64 if name in "qk" else channels) for name in ("scale", "shift", "q", "k")}
    tables = [(vector(size, 64), vector(size, 64)) for size in (frames, columns, rows)]
    context = draw(frames, columns, rows, channels)
    yield KernelCase(
        "norm, projections and rotation",
        "norm_qkv",
        (x, context, linears, vectors, tables),
        {"reach": reach, "eps": 1e-6},
        compared=lambda results: [results[0], results[1], *(_cut_sides(side, reach, rows) for side in results[2:])],
    )
    flat, sizes = x.reshape(-1, channels), {"out": (channels, channels), "gate": (1024, channels)}
    sizes |= {"up": (1024, channels), "down": (channels, 1024)}
    weights = {name: matrix(*size) for name, size in sizes.items()}
    vectors = {"bias": draw(channels), "scale": vector(channels), "shift": vector(channels)}
    operands = draw(*flat.shape), flat, weights, vectors
    yield KernelCase("projection, norm and SwiGLU", "norm_swiglu", operands, {"eps": 1e-6})


def _cut_sides(x: jax.Array, reach: int, rows: int) -> jax.Array:
    """Return the strip's own columns and rows of keys or values."""
    first = 0 if x.shape[2] == rows else BEFORE
    return x[:, reach:-reach, first : first + rows]


def _attention_cases(draw: "_Draw", queries: int, keys: int) -> Iterator[KernelCase]:
    q, k, v = draw(queries, 2 * WIDTH), draw(keys, 2 * WIDTH), draw(keys, 2 * WIDTH)
    heads = {"heads": 2}
    yield KernelCase("attention", "attention", (q, k, v), heads)
    yield KernelCase("attention, padded keys", "attention", (q, k, v), heads | {"kv_len": keys - 90})
    # The last key outweighs all others, so the fast method overflows, which must be noticed.
    late = k.at[-1].set(64 * q.mean(axis=0) / jnp.abs(q.mean(axis=0)).max())
    yield KernelCase("attention, an overflow", "attention", (q, late, v), heads)
    # The tolerance is the cost of rounding to 8 bits.
    for products, options in (("logits", {"qk": "int8"}), ("both products", {"qk": "int8", "pv": "int8"})):
        name = f"attention, {products} in 8 bits"
        yield KernelCase(name, "attention", (q, k, v), heads, tolerance=0.05, only_kernel=options)
    lists = _draw_lists(queries, keys)
    yield KernelCase("sparse attention", "sparse_attention", (q[None], k[None], v[None], lists), heads)
    yield KernelCase("attention of tiles", "tile_attention", _draw_tiles(q, k, v), heads | {"width": WIDTH})


def _vae_cases(draw: "_Draw", scale: int) -> Iterator[KernelCase]:
    x = draw(2, 8 * scale, 32, 64)
    edge = draw(4, 1, 32, 64)
    options = {"past": draw(2, 8 * scale, 32, 64), "edges": (edge, edge), "norm": draw(64), "before": (1, 1)}
    weight = draw(3, 3, 3, 64, 64) * jnp.bfloat16(0.03)
    yield KernelCase("causal convolution", "causal_conv", (x, weight, draw(64)), options)
    around = {"centred": True, "norm": draw(64), "before": (1, 1)}
    yield KernelCase("convolution that looks ahead", "causal_conv", (x, weight, draw(64)), around)
    folded, side = draw(2, 8 * scale, 16, 4 * 64), draw(4, 1, 16, 4 * 64)
    options = {"fold": 4, "past": folded, "edges": (side, side), "norm_after": draw(64), "before": (1, 1)}
    yield KernelCase("convolution of folded rows", "folded_conv", (folded, weight, draw(64)), options)
    inside, vector = {"columns": 5, "rows": 27}, functools.partial(draw, dtype=jnp.float32)
    yield KernelCase("moments", "channel_moments", (x.astype(jnp.float32),), inside, tolerance=FLOAT32)
    yield KernelCase("norm and SiLU", "norm_silu", (x, vector(64), vector(64)), inside)


def _restore(rows: Rounded) -> jax.Array:
    """Return the values that rows in 8 bits represent: where scales differ, so do the bits."""
    return rows.values.astype(jnp.float32) * rows.scales[:, :1]


def _draw_lists(queries: int, keys: int) -> jax.Array:
    """Draw the blocks of keys that each block of queries attends to, for two heads: [1, 2, blocks, 5]."""
    blocks, rng = -(-keys // KEYS), np.random.default_rng(1)
    lists = [np.sort(rng.permutation(blocks)[:5]) for _ in range(2 * -(-queries // QUERIES))]
    return jnp.asarray(np.stack(lists).reshape(1, 2, -1, 5), jnp.int32)


def _draw_tiles(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, ...]:
    """Draw lists of tiles of keys for two heads; the last tile has few real rows, and padding as it must be."""
    tiles, pairs, few, rng = len(k) // ROWS, -(-len(q) // STEP) * STEP // PAIR, 5, np.random.default_rng(1)
    rows, last = tiles * ROWS, (tiles - 1) * ROWS
    k = k[:rows].at[last + few :].set(k[last])
    v = v[:rows].at[last + few :].set(0)
    drawn = [np.sort(rng.permutation(tiles - 1)[:few] + 1) * 4 + rng.integers(1, 4, few) for _ in range(2 * pairs)]
    both = np.full((2 * pairs, 1), 3)  # The first tile, for both tiles of queries.
    lists = jnp.asarray(np.concatenate([both, drawn], axis=1).reshape(2, pairs, -1), jnp.int32)
    sizes = jnp.asarray([ROWS] * (tiles - 1) + [few], jnp.int32)
    lengths = jnp.full((2, pairs), lists.shape[2], jnp.int32)
    return [Part(q, len(q))], [Part(k, rows)], [Part(v, rows)], lists, lengths, sizes


class _Draw:
    """Draws arrays from the normal distribution, the same ones in every run."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(self._rng.standard_normal(shape, np.float32), dtype)
