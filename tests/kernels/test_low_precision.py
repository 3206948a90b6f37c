"""Linear layers and attention in 8 bits, in Pallas' interpreter, against numpy, at sizes that don't fill tiles."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.kernels.cases import INTERPRET, SMALL, as_program, assert_close, draw
from wan_tpu.ops.attention import attention_part
from wan_tpu_kernels import layer_norm as layer_norms
from wan_tpu_kernels import linear_tiles, low_precision
from wan_tpu_kernels.flash_attention import flash_attention, flash_attention_reference, flash_attention_unchecked
from wan_tpu_kernels.layer_norm import layer_norm, layer_norm_reference
from wan_tpu_kernels.linear import ACTIVATIONS, linear, linear_reference
from wan_tpu_kernels.low_precision import (
    Rounded,
    round_keys,
    round_keys_reference,
    round_queries,
    round_queries_reference,
    round_rows,
    round_rows_reference,
)

ROUND_ROWS = as_program(round_rows_reference), as_program(round_rows, interpret=INTERPRET)
NORMS = as_program(layer_norm_reference), as_program(layer_norm, interpret=INTERPRET)
LINEARS = as_program(linear_reference), as_program(linear, interpret=INTERPRET)
REFERENCE = as_program(flash_attention_reference)
UNCHECKED = as_program(flash_attention_unchecked, interpret=INTERPRET)

DTYPES = {"int8": 127, "float8_e4m3fn": 448}
BOTH = {"int8": 0.06, "float8_e4m3fn": 0.1}  # The largest error of a channel, relative to its spread, with `pv`.
TOLERANCE = 2**-7  # The result is bfloat16, and so is the activation's input.


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Make several tiles and ragged last ones at small sizes; a TPU uses its own tiles."""
    if not INTERPRET:
        return
    monkeypatch.setattr(linear_tiles, "ROWS", 64)
    monkeypatch.setattr(linear_tiles, "OUTPUTS_8", 512)
    monkeypatch.setattr(linear_tiles, "INPUTS_8", 256)
    for module in (layer_norms, low_precision):
        monkeypatch.setattr(module, "ROWS", 64)
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 32)


def round_with_numpy(x, dtype):
    """Round rows to the nearest numbers of a type: values, and scales [L, 1]."""
    x = np.asarray(x, np.float32)
    scales = np.abs(x).max(-1, keepdims=True) / np.float32(DTYPES[dtype])
    scaled = np.divide(x, scales, out=np.zeros_like(x), where=scales > 0)
    return np.rint(scaled) if dtype == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn), scales


def assert_rounded(rows, x, dtype):
    """Check that rounded rows have the right scales and the nearest values, or the next one of two equally near."""
    values, scales = round_with_numpy(x, dtype)
    assert rows.values.dtype == dtype and rows.scales.shape == (len(x), 128)
    np.testing.assert_allclose(rows.scales, np.broadcast_to(scales, rows.scales.shape), rtol=1e-6)
    got, expected = np.asarray(rows.values, np.float64), np.asarray(values, np.float64)
    assert np.abs(got).max() == DTYPES[dtype]
    step = 1 if dtype == "int8" else np.maximum(np.abs(expected) / 8, 2**-9)
    assert (np.abs(got - expected) <= step).all()
    assert (got != expected).mean() < 0.01


@pytest.mark.parametrize(("rows", "dtype"), [(100, "int8"), (5, "float8_e4m3fn")])
def test_rows_are_rounded_to_the_nearest(rows, dtype):
    x = draw(0, rows, 768, dtype=jnp.bfloat16) * np.exp(3 * draw(1, rows, 1)).astype(jnp.bfloat16)
    x[3] = 0
    grouped = x.reshape(rows, 2, 384).transpose(1, 0, 2)
    for function in ROUND_ROWS:
        for laid_out in (x, grouped, (grouped[..., :128], grouped[..., 128:])):
            rounded = function(laid_out, jnp.dtype(dtype))
            assert_rounded(rounded, x, dtype)
            assert not np.asarray(rounded.values[3], np.float32).any() and not np.asarray(rounded.scales[3]).any()


@pytest.mark.parametrize(("rows", "dtype"), [(50, "int8"), (5, "float8_e4m3fn")])
def test_layer_norm_returns_rounded_rows(rows, dtype):
    x, scale, shift = ((draw(0, rows, 256) * 3 + 1).astype(jnp.bfloat16), draw(1, 2, 256), draw(2, 2, 256))
    more = {"eps": 1e-6, "first_rows": 3}
    plain = NORMS[0](x.astype(jnp.float32), scale, shift, **more)
    for function in NORMS:
        assert_rounded(function(x, scale, shift, **more, rounded=jnp.dtype(dtype)), plain, dtype)


SIZES = {"ragged, in parts": (100, 768, 640), "tiny": (7, 144, 64)}


@pytest.mark.parametrize(
    ("size", "activation", "dtype"),
    [
        ("ragged, in parts", "gelu_tanh", "int8"),
        ("ragged, in parts", None, "float8_e4m3fn"),
        ("tiny", "gelu_tanh", "int8"),
    ],
)
def test_linear_multiplies_the_rounded_values(size, activation, dtype):
    rows, inputs, outputs = SIZES[size]
    (x, sizes), (weight, scales) = (round_with_numpy(draw(n, m, inputs), dtype) for n, m in ((0, rows), (1, outputs)))
    rounded = Rounded(x.astype(dtype), np.broadcast_to(sizes, (rows, 128)))
    bias, residual, gate = (
        draw(2, outputs, dtype=jnp.bfloat16),
        draw(3, rows, outputs, dtype=jnp.bfloat16),
        draw(4, 2, outputs),
    )
    y = (x.astype(np.float64) @ weight.astype(np.float64).T) * sizes * scales.T + np.asarray(bias, np.float64)
    y = np.asarray(as_program(ACTIVATIONS[activation])(y.astype(np.float32)), np.float64)
    gates = np.where(np.arange(rows)[:, None] < 5, np.asarray(gate[0], np.float64), np.asarray(gate[1], np.float64))
    args, options = (rounded, weight.astype(dtype), bias), {"scales": scales[:, 0], "activation": activation}
    for function in LINEARS:
        result = function(*args, **options)
        assert result.dtype == jnp.bfloat16
        assert_close(result, y, TOLERANCE)
        more = {"residual": residual, "gate": gate, "first_rows": 5}
        assert_close(function(*args, **options, **more), np.asarray(residual, np.float64) + gates * y, TOLERANCE)
        groups = function(*args, **options, groups=2)
        assert_close(groups.transpose(1, 0, 2).reshape(rows, outputs), y, TOLERANCE)


def test_swiglu_multiplies_the_rounded_values():
    dtype = "int8"
    rows, inputs, outputs = SIZES["ragged, in parts"]
    (x, sizes), (weight, scales) = (
        round_with_numpy(draw(n, m, inputs), dtype) for n, m in ((0, rows), (1, 2 * outputs))
    )
    rounded = Rounded(x.astype(dtype), np.broadcast_to(sizes, (rows, 128)))
    both = (x.astype(np.float64) @ weight.astype(np.float64).T) * sizes * scales.T
    values, gates = np.split(both, 2, axis=1)
    options = {"scales": scales[:, 0], "activation": "swiglu"}
    for function in LINEARS:
        result = function(rounded, weight.astype(dtype), None, **options)
        assert result.dtype == jnp.bfloat16
        assert_close(result, values * gates / (1 + np.exp(-gates)), TOLERANCE)


# The heads of 40 channels of a small model fill no register.
@pytest.mark.parametrize(
    ("width", "shared", "heads", "first", "dtype"),
    [(128, 1, 6, 1, "int8"), (64, 2, 6, 1, "float8_e4m3fn"), (40, 1, 1, 0, "int8")],
)
def test_queries_are_rounded_by_row_and_head(width, shared, heads, first, dtype):
    rows = 150
    tiles = heads // shared - first
    q = draw(0, 2, rows, heads * width) * np.exp(draw(1, 2, rows, 1))
    q[:, 3] = 0
    own = q[..., first * shared * width :]
    unit = np.exp(draw(2, 2, own.shape[2]))
    options = {"width": width, "shared": shared, "first": first, "interpret": True}
    terms, scales = as_program(round_queries)(q, unit, jnp.dtype(dtype), **options)
    expected, sizes = as_program(round_queries_reference)(own, unit, jnp.dtype(dtype), heads=tiles * shared)
    scales = np.asarray(scales).reshape(2, tiles * shared, rows)
    np.testing.assert_allclose(scales, sizes, rtol=1e-6)
    assert len(terms) == len(expected) == (1 if dtype == "int8" else 2)
    assert dtype != "int8" or (np.frexp(scales)[0] == 0.5).all()  # The scales are powers of two.
    spread = np.repeat(scales, width, axis=1).swapaxes(1, 2)
    error = sum(np.asarray(term, np.float32) for term in terms) * spread - own * unit[:, None]
    assert (np.abs(error) <= spread * (0.501 if dtype == "int8" else 448 / 16**2)).all()
    for term, reference in zip(terms, expected, strict=True):
        assert (np.asarray(term, np.float32) == np.asarray(reference, np.float32)).mean() > 0.99


@pytest.mark.parametrize(
    ("width", "shared", "first", "dtype"), [(128, 1, 1, "float8_e4m3fn"), (64, 2, 1, "int8"), (40, 1, 0, "int8")]
)
def test_keys_are_rounded_without_their_mean(width, shared, first, dtype, monkeypatch):
    monkeypatch.setattr(low_precision, "TOKENS", 64)
    monkeypatch.setattr(low_precision, "TOKENS_AT_ONCE", 32)
    k = draw(0, 2, 150, (first + 1) * width * shared) + 20 * draw(1, 1, 1, (first + 1) * width * shared)
    k[:, 130:], own = np.nan, slice(first * width * shared, None)
    real = np.asarray(k, np.float64)[:, :130, own]
    plain = real - real.mean(axis=1, keepdims=True)
    by_head = np.abs(plain).reshape(2, 130, shared, width).max(axis=(1, 3)) / DTYPES[dtype]
    options = {"tiles": 1, "width": width, "shared": shared, "first": first, "interpret": True}
    for values, scales, mean in (
        as_program(round_keys)(k, 130, jnp.dtype(dtype), **options),
        as_program(round_keys)(k, jnp.int32([130]), jnp.dtype(dtype), **options),
        as_program(round_keys_reference)(k[..., own], 130, jnp.dtype(dtype), heads=shared),
    ):
        assert values.shape == (2, 150, width * shared) and values.dtype == dtype
        np.testing.assert_allclose(scales, np.repeat(by_head, width, axis=1), rtol=1e-5)
        np.testing.assert_allclose(mean, real.mean(axis=1), rtol=1e-5)
        rounded, spread = np.asarray(values, np.float64)[:, :130], np.asarray(scales)[:, None]
        step = 0.501 if dtype == "int8" else np.maximum(np.abs(rounded) / 16, 2**-9)
        assert (np.abs(rounded * spread - plain) <= step * 1.01 * spread).all()


# int8 has neither NaN nor infinities.
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.thorough)])
def test_values_that_are_not_finite_stay_so(dtype):
    wrong, rows = np.asarray([np.nan, np.inf]), np.asarray([7, 9])
    x, weight = draw(0, 40, 256), np.ones((128, 256), dtype)
    x[rows, 3] = wrong
    zeros, ones = np.zeros(128, np.float32), np.ones(128, np.float32)
    for function in ROUND_ROWS:
        result = np.asarray(LINEARS[1](function(x, jnp.dtype(dtype)), weight, zeros, scales=ones))
        assert not np.isfinite(result[rows]).any() and np.isfinite(np.delete(result, rows, axis=0)).all()
    q, k, v = (draw(seed, 300, 128, dtype=jnp.bfloat16) for seed in range(3))
    options = {"heads": 1, "width": 128, "scale": 0.1, "kv_len": 300, "qk": dtype}
    for softmax, key in (("optimistic", np.nan), ("online", np.inf)):
        not_finite, odd = q.copy(), k.copy()
        not_finite[rows, 3], odd[7, 3] = wrong, key
        out, right = UNCHECKED(not_finite, k, v, softmax=softmax, **options)
        assert not np.isfinite(np.asarray(out, np.float32)[rows]).any()
        assert np.isfinite(np.delete(np.asarray(out, np.float32), rows, axis=0)).all()
        assert softmax == "online" or not right
        out, _ = UNCHECKED(q, odd, v, softmax=softmax, **options)
        assert not np.isfinite(np.asarray(out, np.float32)).any()
    options |= {"softmax": "online", "pv": dtype}
    not_finite, odd_value = q.copy(), v.copy()
    not_finite[rows, 3], odd_value[7, 3] = wrong, np.nan
    out = np.asarray(UNCHECKED(not_finite, k, v, **options)[0], np.float32)
    assert not np.isfinite(out[rows]).any() and np.isfinite(np.delete(out, rows, axis=0)).all()
    out = np.asarray(UNCHECKED(q, k, odd_value, **options)[0], np.float32)
    assert not np.isfinite(out[:, 3]).any() and np.isfinite(np.delete(out, 3, axis=1)).all()


def test_rows_of_tiny_numbers_stay_finite():
    x = np.asarray([[1e-37, -1e-38, 0, 2e-37], [0, 0, 0, 0]], np.float32)
    for dtype in DTYPES:
        values, scales = ROUND_ROWS[0](x, jnp.dtype(dtype))
        restored = np.asarray(values, np.float32) * np.asarray(scales)[:, :1]
        assert np.isfinite(restored).all() and np.abs(restored - x).max() < 3e-37


@pytest.mark.parametrize(("length", "dtype"), [(5, "int8"), (40, "float8_e4m3fn")])
def test_few_keys_are_attended_to_closely(length, dtype):
    q, k, v = (draw(seed, length, 256) for seed in range(3))
    got = np.asarray(as_program(flash_attention)(q, k, v, heads=2, qk=dtype, interpret=INTERPRET), np.float64)
    expected = np.asarray(REFERENCE(q, k, v, heads=2), np.float64)
    assert (got * expected).sum() / np.linalg.norm(got) / np.linalg.norm(expected) > 0.999


def test_unsupported_8_bit_logits_are_refused():
    wide = np.zeros((8, 512), np.float32)
    with pytest.raises(ValueError, match=r"\b256\b"):
        flash_attention(wide, wide, wide, heads=1, qk="int8", interpret=INTERPRET)
    with pytest.raises(ValueError, match=r"softmax.*'auto', 'optimistic' or 'online'.*'bounded'"):
        flash_attention(wide, wide, wide, heads=4, qk="int8", softmax="bounded", interpret=INTERPRET)
    for qk, softmax in (("int8", "optimistic"), ("float8_e4m3fn", "auto"), (None, "auto")):
        with pytest.raises(ValueError, match=rf"pv='int8'.*{qk!r}.*{softmax!r}"):
            flash_attention(wide, wide, wide, heads=4, qk=qk, pv="int8", softmax=softmax, interpret=INTERPRET)


@pytest.mark.parametrize(
    ("dtype", "softmax", "width", "counted"),
    [("int8", "optimistic", 128, False), ("float8_e4m3fn", "online", 128, False), ("int8", "online", 64, True)],
)
def test_attention_of_some_heads_with_logits_in_8_bits(dtype, softmax, width, counted):
    """Some of K's channels have a bias, many times the differences between keys."""
    shared, length, kv_len = 128 // width, 600, 580  # So many heads share a tile.
    q, k, v = (draw(seed, length, 3 * shared * width, dtype=jnp.bfloat16) for seed in range(3))
    k[:, ::7] += 8
    k[kv_len:] = np.nan
    first = (shared, 0, shared)
    options = {"width": width, "scale": width**-0.5, "softmax": softmax, "qk": dtype}
    options["kv_len"] = jnp.int32(kv_len) if counted else kv_len
    out, right = UNCHECKED(q, k, v, heads=2 * shared, first_heads=first, **options)
    assert right
    parts = (x[:, n * width :][:, :256] for x, n in zip((q, k, v), first, strict=True))
    expected = np.asarray(REFERENCE(*parts, heads=2 * shared, kv_len=kv_len), np.float64)
    got = np.asarray(out, np.float64)
    cosine = (got * expected).sum() / np.linalg.norm(got) / np.linalg.norm(expected)
    assert 0.9995 <= cosine < 0.99998  # bfloat16 alone is above that.


@pytest.mark.parametrize(
    ("width", "length", "counted", "dtype"),
    [(128, 1200, True, "int8"), (64, 1200, False, "int8"), (64, 100, True, "float8_e4m3fn")],
)
def test_both_products_in_8_bits_are_near_the_exact_ones(width, length, counted, dtype):
    """Channels of V differ in size and mean. Later keys have larger logits, so what was added is rescaled."""
    heads, first, kv_len = 2, 2, length - 13
    q, k, v = (draw(seed, rows, (first + heads) * width) for seed, rows in enumerate((200, length, length)))
    k *= np.linspace(0.2, 2, length, dtype=np.float32)[:, None]
    sizes = np.exp(2 * draw(3, v.shape[1]))
    v = sizes * (v + 3 * draw(4, v.shape[1]))
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    k[kv_len:], v[kv_len:] = np.nan, np.nan
    options = {"heads": heads, "first_heads": (0, 2, 2), "width": width, "scale": width**-0.5}
    options["kv_len"] = jnp.int32(kv_len) if counted else kv_len
    out, right = UNCHECKED(q, k, v, qk=dtype, pv=dtype, **options)
    own = slice(first * width, None)
    q, k, v = (np.asarray(x, np.float64) for x in (q[:, : heads * width], k[:kv_len, own], v[:kv_len, own]))
    q, k, v = (x.reshape(len(x), heads, width) for x in (q, k, v))
    weights = np.exp(np.einsum("qnd,knd->nqk", q, k) * width**-0.5)
    expected = np.einsum("nqk,knd->qnd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)
    got, spread = np.asarray(out, np.float64), expected.std(axis=0)
    assert right and out.dtype == jnp.bfloat16
    # The largest measured are 0.041 and 0.071. Rounding to bfloat16 adds 2^-9 of the channel's mean.
    error = np.sqrt(np.square(got - expected).mean(axis=0)) - 2**-9 * np.abs(expected.mean(axis=0))
    assert (error / spread).max() < BOTH[dtype]
    centred, exact = got - got.mean(axis=0), expected - expected.mean(axis=0)
    gains = (centred * exact).sum(axis=0) / np.square(exact).sum(axis=0)
    assert np.abs(gains - 1).max() < BOTH[dtype] / 2


@pytest.mark.parametrize(("dtype", "block_sizes"), [("int8", SMALL), ("float8_e4m3fn", None)])
def test_weights_that_8_bits_make_zero_count_in_the_sum(dtype, block_sizes):
    """Without them, results would be 4 % too large where logits have a standard deviation of 2."""
    q, k, v = (draw(seed, 1500, 128) for seed in range(3))
    q, v = q * np.float32(2 * 128**-0.5 / np.log(2)), v - v.mean(axis=0)
    weights = np.exp2(q.astype(np.float64) @ k.T)
    expected = weights / weights.sum(axis=1, keepdims=True) @ v
    options = {"heads": 1, "qk": dtype, "pv": dtype}
    tiles = {"scale": np.log(2), "block_sizes": block_sizes, "interpret": INTERPRET}
    part = {"platform": "cpu", "first_heads": (0, 0, 0), "width": 128, "kv_len": 1500}
    plain = as_program(attention_part, **part, **options)(q, k, v)[0]
    for got in (as_program(flash_attention)(q, k, v, **tiles, **options), plain):
        assert abs((np.asarray(got) * expected).sum() / np.square(expected).sum() - 1) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_fit_8_bits_at_any_size_of_logits(dtype):
    """A row's shift is rounded as its logits are, and a weight above the type's largest would change its sign."""
    second = {"int8": 126 / 127, "float8_e4m3fn": 384 / 448}[dtype]  # Numbers of the type, if the largest is 1.
    factors = np.append(np.linspace(0.8, 6.5, 60) / (1 - second), [1e5, 1e9]).astype(np.float32)
    q, k = np.zeros((len(factors), 128), np.float32), np.zeros((700, 128), np.float32)
    q[:, 0], k[[600, 601, 3, 4], 0] = factors, (1, second, -1, -second)
    v = draw(0, len(k), 128)
    options = {"heads": 1, "scale": np.log(2), "qk": dtype, "pv": dtype, "interpret": INTERPRET}
    got = np.asarray(as_program(flash_attention)(q, k, v, **options), np.float64)
    weights = np.exp2(factors[:, None].astype(np.float64) * (k[:, 0] - 1))
    expected = weights / weights.sum(axis=1, keepdims=True) @ v
    # Both weights are off by a rounding and V by another. The difference of the logits may be off by 1 %.
    tolerance = {"int8": 0.02, "float8_e4m3fn": 0.08}[dtype]
    assert np.abs(got - expected).max() < tolerance * np.abs(v).max()


@pytest.mark.parametrize(("dtype", "counted"), [("int8", True), ("float8_e4m3fn", False)])
def test_both_products_in_8_bits_without_the_kernel(dtype, counted):
    """All keys are one chunk, so the kernel's weights are relative to the same maximum."""
    q, k, v = (draw(seed, 300, 256, dtype=jnp.bfloat16) for seed in range(3))
    k[290:], v[290:] = np.nan, np.nan
    options = {"heads": 2, "first_heads": (0, 0, 0), "width": 128, "qk": dtype, "pv": dtype}
    options["kv_len"] = jnp.int32(290) if counted else 290
    out, right = as_program(attention_part, platform="cpu", **options)(q, k, v)
    options |= {"scale": np.log(2)}
    kernel, exact = UNCHECKED(q, k, v, **options)[0], REFERENCE(q, k, v, heads=2, kv_len=290, scale=np.log(2))
    assert right and out.dtype == jnp.bfloat16
    off, error = (np.asarray(out, np.float64) - np.asarray(x, np.float64) for x in (kernel, exact))
    assert np.linalg.norm(off) < 0.5 * np.linalg.norm(error)
