"""Attention of windows, and what precedes and follows it in a block, interpreted without a TPU, against plain jnp."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import INTERPRET, as_program
from wan_tpu_kernels.windows import norm_swiglu as after
from wan_tpu_kernels.windows.attention import (
    BEFORE,
    LARGEST,
    count_key_rows,
    count_side_columns,
    window_attention,
    window_attention_reference,
)
from wan_tpu_kernels.windows.norm_qkv import norm_qkv, norm_qkv_reference

RNG = np.random.default_rng(0)


def draw(*shape, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(scale * RNG.standard_normal(shape), dtype)


def in_float64(q, k, v, first, window, width, heads):
    """Return the result in float64, for all rows of a column of a frame together."""
    frames, columns, rows, channels = q.shape
    reach, out = (k.shape[1] - columns) // 2, np.zeros(q.shape)
    q, k, v = (np.asarray(x, np.float64).reshape(*x.shape[:3], heads, -1) for x in (q, k, v))

    def begin(place, axis, whole):
        return np.clip(place - window[axis] // 2, 0, whole - window[axis])

    starts, row = begin(np.arange(rows), 2, rows)[:, None], np.arange(rows)
    seen = np.tile((row >= starts) & (row < starts + window[2]), window[0] * window[1])
    for t, x in itertools.product(range(frames), range(min(columns, width - first))):
        near = begin(t, 0, frames), begin(first + x, 1, width) + reach - first
        near = tuple(slice(start, start + size) for start, size in zip(near, window, strict=False))
        keys, values = (part[near].reshape(-1, *part.shape[3:]).swapaxes(0, 1) for part in (k, v))
        logits = np.where(seen, q[t, x].swapaxes(0, 1) @ keys.swapaxes(1, 2), -np.inf)
        weights = np.exp2(logits - logits.max(2, keepdims=True))
        out[t, x] = (weights @ values / weights.sum(2, keepdims=True)).swapaxes(0, 1).reshape(rows, channels)
    return out


@pytest.mark.parametrize(
    ("shape", "first", "width", "window", "dtype", "tolerance", "padded"),
    [
        # Fewer frames than a box's keys; the strip is the picture's end, with two columns beyond it.
        ((5, 6, 17), 10, 14, (3, 5, 11), jnp.bfloat16, 2e-2, True),
        # A box within the picture, one at its border, and a column of another beyond it.
        pytest.param((6, 9, 16), 9, 18, (3, 5, 5), jnp.float32, 1e-5, True, marks=pytest.mark.thorough),
        # Boxes that share a mask, and one with another: it ends beyond a strip that ends within the picture.
        ((9, 9, 34), 9, 36, (3, 5, 5), jnp.float32, 1e-5, False),
        pytest.param((12, 9, 33), 0, 14, (11, 11, 11), jnp.float32, 1e-5, False, marks=pytest.mark.thorough),
    ],
)
def test_attention_sees_the_window_and_nothing_else(shape, first, width, window, dtype, tolerance, padded):
    """Also with a logit beyond float32's powers of two, for which all are computed with their maximum."""
    heads, channels = 4, 256
    reach = count_side_columns(shape[1], width, window[1])
    q = draw(*shape, channels, dtype=dtype, scale=0.4)
    k, v = (draw(shape[0], shape[1] + 2 * reach, shape[2], channels, dtype=dtype) for _ in range(2))
    rows = (BEFORE, count_key_rows(shape[2]) - shape[2] - BEFORE) if padded else (0, 0)
    keys = [jnp.pad(x, ((0, 0), (0, 0), rows, (0, 0))) for x in (k, v)]
    own = min(shape[1], width - first)
    options = {"heads": heads, "window": window, "width": width}
    functions = as_program(window_attention_reference), as_program(window_attention, interpret=INTERPRET)
    for queries, largest in ((q, 1.0), (q.at[0, 0, 0].set(50 * k[1, reach, 2]), 2 * LARGEST)):
        expected = in_float64(queries, k, v, first, window, width, heads)
        assert np.abs(expected).max() > 0.5
        for function in functions:
            result = function(queries, *keys, first, np.asarray(largest, np.float32), **options)
            result = np.asarray(result, np.float64)[:, :own]
            most = tolerance if largest == 1 else max(tolerance, 1e-4)  # Its logits are in the thousands.
            assert np.abs(result - expected[:, :own]).max() <= most


@pytest.mark.parametrize(
    ("has_context", "dtype", "tolerance"), [(True, jnp.bfloat16, 3e-2), (False, jnp.float32, 2e-5)]
)
def test_queries_keys_and_values_are_normed_and_rotated(has_context, dtype, tolerance):
    frames, columns, rows, channels, reach = 2, 6, 24, 256, 4
    x = draw(frames, columns, rows, channels, dtype=dtype)
    context = draw(frames, columns, rows, 128, dtype=dtype) if has_context else None
    sizes = {"context": 128, "q": channels, "k": channels, "v": channels}
    linears = {
        name: (draw(channels, size, dtype=dtype, scale=size**-0.5), draw(channels, dtype=dtype))
        for name, size in sizes.items()
        if has_context or name != "context"
    }
    vectors = {name: draw(64 if name in "qk" else channels) for name in ("scale", "shift", "q", "k")}
    tables = [(draw(size, 64), draw(size, 64)) for size in (frames, columns, rows)]
    arguments, options = (x, context, linears, vectors, tables), {"reach": reach, "eps": 1e-6}
    ours = as_program(norm_qkv)(*arguments, **options, interpret=INTERPRET)
    plain = as_program(norm_qkv_reference)(*arguments, **options)
    for number, (result, expected) in enumerate(zip(ours, plain, strict=True)):
        if number >= 2:
            assert result.shape[2] == count_key_rows(rows) and result.shape[1] == columns + 2 * reach
            result, expected = (part[:, reach:-reach] for part in (result, expected))
            assert not np.asarray(result[:, :, :BEFORE], np.float32).any()
            assert not np.asarray(result[:, :, BEFORE + rows :], np.float32).any()
            result = result[:, :, BEFORE : BEFORE + rows]
        difference = np.abs(np.asarray(result, np.float32) - np.asarray(expected, np.float32)).max()
        assert difference <= tolerance * np.abs(np.asarray(expected, np.float32)).max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 3e-2)])
def test_what_follows_attention(dtype, tolerance, monkeypatch):
    """With a last block of few rows."""
    monkeypatch.setattr(after, "ROWS", 64)
    monkeypatch.setattr(after, "ROWS_AT_ONCE", 32)
    rows, channels, hidden = 150, 128, 512
    attended, x = draw(rows, channels, dtype=dtype), draw(rows, channels, dtype=dtype)
    sizes = {"out": (channels, channels), "gate": (hidden, channels), "up": (hidden, channels)}
    sizes["down"] = channels, hidden
    weights = {name: draw(*size, dtype=dtype, scale=channels**-0.5) for name, size in sizes.items()}
    vectors = {name: draw(channels, scale=channels**-0.5) for name in ("bias", "scale", "shift")}
    arguments = attended, x, weights, vectors | {"bias": vectors["bias"].astype(dtype)}
    ours = as_program(after.norm_swiglu)(*arguments, eps=1e-6, interpret=INTERPRET)
    plain = as_program(after.norm_swiglu_reference)(*arguments, eps=1e-6)
    difference = np.abs(np.asarray(ours, np.float32) - np.asarray(plain, np.float32)).max()
    assert difference <= tolerance * np.abs(np.asarray(plain, np.float32)).max()


def test_strips_hold_what_their_windows_reach():
    for window, columns, picture in itertools.product((3, 5, 7, 11), range(1, 30), range(11, 90)):
        reach, column = count_side_columns(columns, picture, window), np.arange(picture)
        first = column // columns * columns
        begin = np.clip(column - window // 2, 0, picture - window)
        assert (first - reach <= begin).all() and (begin + window <= first + columns + reach).all()


def test_weights_that_leave_no_room_in_vmem_are_left_to_xla():
    def count_kernels(dtype):
        linears = dict.fromkeys("qkv", (jnp.zeros((2560, 2560), dtype), jnp.zeros(2560, dtype)))
        vectors = {name: jnp.ones(64 if name in "qk" else 2560) for name in ("scale", "shift", "q", "k")}
        tables = [(jnp.zeros((size, 64)),) * 2 for size in (1, 4, 8)]
        run = functools.partial(norm_qkv, reach=4, eps=1e-6, interpret=INTERPRET)
        arguments = jnp.zeros((1, 4, 8, 2560), dtype), None, linears, vectors, tables
        return str(jax.make_jaxpr(run)(*arguments)).count("pallas_call")

    assert [count_kernels(dtype) for dtype in (jnp.bfloat16, jnp.float32)] == [1, 0]  # 37.5 and 75 MiB of 54.
