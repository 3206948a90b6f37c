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
    """Return the result in float64, query by query."""
    frames, columns, rows, channels = q.shape
    reach, out = (k.shape[1] - columns) // 2, np.zeros(q.shape)
    split = (heads, channels // heads)
    for t, x, y in itertools.product(range(frames), range(columns), range(rows)):
        if first + x >= width:
            continue
        begin = [
            np.clip(place - size // 2, 0, whole - size)
            for place, size, whole in zip((t, first + x, y), window, (frames, width, rows), strict=True)
        ]
        begin[1] += reach - first
        near = tuple(slice(start, start + size) for start, size in zip(begin, window, strict=True))
        keys, values = (np.asarray(part[near], np.float64).reshape(-1, *split) for part in (k, v))
        logits = np.einsum("nd,knd->nk", np.asarray(q[t, x, y], np.float64).reshape(split), keys)
        weights = np.exp2(logits - logits.max(1, keepdims=True))
        out[t, x, y] = (np.einsum("nk,knd->nd", weights, values) / weights.sum(1, keepdims=True)).ravel()
    return out


@pytest.mark.parametrize(
    ("shape", "first", "width", "window", "dtype", "tolerance"),
    [
        # Three boxes of frames and two of rows; the strip begins and ends within the picture.
        pytest.param((9, 5, 20), 6, 20, (3, 5, 5), jnp.float32, 1e-5, marks=pytest.mark.thorough),
        # Fewer frames than a box's keys; the strip is the picture's end, with two columns beyond it.
        ((5, 6, 17), 10, 14, (5, 7, 11), jnp.bfloat16, 2e-2),
        # A box within the picture, one at its border, and a column of another beyond it.
        pytest.param((6, 9, 16), 9, 18, (3, 5, 5), jnp.float32, 1e-5, marks=pytest.mark.thorough),
        pytest.param((6, 12, 16), 12, 13, (3, 5, 5), jnp.float32, 1e-5, marks=pytest.mark.thorough),
        # Boxes that share a mask, and one with another: it ends beyond a strip that ends within the picture.
        ((9, 9, 34), 9, 36, (3, 5, 5), jnp.float32, 1e-5),
        pytest.param((12, 9, 33), 0, 14, (11, 11, 11), jnp.float32, 1e-5, marks=pytest.mark.thorough),
    ],
)
def test_attention_sees_the_window_and_nothing_else(shape, first, width, window, dtype, tolerance):
    heads, channels = 4, 256
    reach = count_side_columns(shape[1], width, window[1])
    q = draw(*shape, channels, dtype=dtype, scale=0.4)
    k, v = (draw(shape[0], shape[1] + 2 * reach, shape[2], channels, dtype=dtype) for _ in range(2))
    options = {"heads": heads, "window": window, "width": width}
    plain = as_program(window_attention_reference)(q, k, v, first, 1.0, **options)
    expected = in_float64(q, k, v, first, window, width, heads)
    own = min(shape[1], width - first)
    held = count_key_rows(shape[2])
    padded = [jnp.pad(x, ((0, 0), (0, 0), (BEFORE, held - shape[2] - BEFORE), (0, 0))) for x in (k, v)]
    for keys in ((k, v), padded):
        ours = as_program(window_attention)(q, *keys, first, 1.0, **options, interpret=INTERPRET)
        for result in (ours, plain):
            assert np.abs(np.asarray(result, np.float64)[:, :own] - expected[:, :own]).max() <= tolerance
    assert np.abs(expected).max() > 0.5


def test_logits_beyond_float32_are_computed_with_their_maximum():
    q, k, v = draw(4, 4, 16, 256), draw(4, 12, 16, 256), draw(4, 12, 16, 256)
    arguments = q.at[0, 0, 0].set(50.0 * k[1, 5, 2]), k, v, 0, 2 * LARGEST
    options = {"heads": 4, "window": (3, 5, 5), "width": 8}
    ours = as_program(window_attention)(*arguments, **options, interpret=INTERPRET)
    assert np.isfinite(ours).all()
    assert np.abs(ours - in_float64(*arguments[:3], 0, (3, 5, 5), 8, 4)).max() <= 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 3e-2)])
@pytest.mark.parametrize("has_context", [True, False])
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


@pytest.mark.parametrize("window", [3, 5, 7, 11])
def test_strips_hold_what_their_windows_reach(window):
    for columns, picture in itertools.product(range(1, 30), range(window, 90)):
        reach = count_side_columns(columns, picture, window)
        for column in range(picture):
            first = column // columns * columns
            begin = np.clip(column - window // 2, 0, picture - window)
            assert first - reach <= begin and begin + window <= first + columns + reach


def test_weights_that_leave_no_room_in_vmem_are_left_to_xla():
    def count_kernels(dtype):
        linears = dict.fromkeys("qkv", (jnp.zeros((2560, 2560), dtype), jnp.zeros(2560, dtype)))
        vectors = {name: jnp.ones(64 if name in "qk" else 2560) for name in ("scale", "shift", "q", "k")}
        tables = [(jnp.zeros((size, 64)),) * 2 for size in (1, 4, 8)]
        run = functools.partial(norm_qkv, reach=4, eps=1e-6, interpret=INTERPRET)
        arguments = jnp.zeros((1, 4, 8, 2560), dtype), None, linears, vectors, tables
        return str(jax.make_jaxpr(run)(*arguments)).count("pallas_call")

    assert [count_kernels(dtype) for dtype in (jnp.bfloat16, jnp.float32)] == [1, 0]  # 37.5 and 75 MiB of 54.
