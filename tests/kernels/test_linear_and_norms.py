"""The kernels around attention, in Pallas' interpreter, against float64, at sizes that don't fill their tiles."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.activations import SwiGLU

from tests.kernels.cases import INTERPRET, SIMULATED, as_program, assert_close, draw, found_races
from wan_tpu_kernels import head_norm_rope as head_norms
from wan_tpu_kernels import layer_norm as layer_norms
from wan_tpu_kernels import linear_tiles
from wan_tpu_kernels import rms_norm_rope as rms_norms
from wan_tpu_kernels.head_norm_rope import head_norm_rope, head_norm_rope_reference
from wan_tpu_kernels.layer_norm import layer_norm, layer_norm_reference
from wan_tpu_kernels.linear import linear, linear_reference
from wan_tpu_kernels.low_precision import round_rows_reference
from wan_tpu_kernels.rms_norm_rope import rms_norm_rope, rms_norm_rope_reference

LINEARS = as_program(linear_reference), as_program(linear, interpret=INTERPRET)
LAYER_NORMS = as_program(layer_norm_reference), as_program(layer_norm, interpret=INTERPRET)
RMS_NORMS = as_program(rms_norm_rope_reference), as_program(rms_norm_rope, interpret=INTERPRET)
HEAD_NORMS = as_program(head_norm_rope_reference), as_program(head_norm_rope, interpret=INTERPRET)

# Tolerances: sums have a few hundred float32 terms; in bfloat16 there are two roundings.
DTYPES = {"float32": 2e-6, "bfloat16": 2**-7}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Make several tiles, ragged last ones and split inputs at small sizes; a TPU uses its own tiles."""
    if not INTERPRET:
        return
    monkeypatch.setattr(linear_tiles, "ROWS", 48)
    monkeypatch.setattr(linear_tiles, "OUTPUTS", 512)
    monkeypatch.setattr(linear_tiles, "INPUTS", 256)
    monkeypatch.setattr(layer_norms, "ROWS", 32)
    monkeypatch.setattr(layer_norms, "ROWS_AT_ONCE", 16)
    for norms in (rms_norms, head_norms):
        monkeypatch.setattr(norms, "ROWS", 32)
        monkeypatch.setattr(norms, "ROWS_AT_ONCE", 16)


SIZES = {"ragged, in parts": (100, 768, 640), "tiny": (7, 144, 64), "flat": (16, 512, 1024)}


@pytest.mark.parametrize(
    ("size", "activation", "dtype"),
    [*((size, "gelu_tanh", "float32") for size in SIZES), ("ragged, in parts", None, "bfloat16")],
)
def test_linear_is_torchs(size, activation, dtype):
    rows, inputs, outputs = SIZES[size]
    x, weight = draw(0, rows, inputs, dtype=dtype), draw(1, outputs, inputs, dtype=dtype)
    bias, residual, gate = (draw(2, outputs), draw(3, rows, outputs, dtype=dtype), draw(4, 3, outputs))
    wide = [torch.from_numpy(np.array(a, np.float64)) for a in (x, weight, bias)]
    y = torch.nn.functional.linear(*wide)
    if activation:
        y = torch.nn.functional.gelu(y, approximate="tanh")
    for function in LINEARS:
        assert_close(function(x, weight, bias, activation=activation), y, DTYPES[dtype])
    ends = np.asarray([2, rows // 2], np.int32)
    gates = np.asarray(gate, np.float64)[np.searchsorted(ends, np.arange(rows), side="right")]
    more = {"activation": activation, "residual": residual, "gate": gate, "first_rows": ends}
    expected = np.asarray(residual, np.float64) + gates * y.numpy()
    for function in LINEARS:
        assert_close(function(x, weight, bias, **more), expected, DTYPES[dtype])


@pytest.mark.parametrize(("size", "dtype"), [("ragged, in parts", "float32"), ("flat", "bfloat16")])
def test_swiglu_is_diffusers(size, dtype):
    """The first half of the weight's rows gives values, the second half the gates; there is no bias."""
    rows, inputs, outputs = SIZES[size]
    x, weight = draw(0, rows, inputs, dtype=dtype), draw(1, 2 * outputs, inputs, dtype=dtype)
    swiglu = SwiGLU(inputs, outputs, bias=False).double()
    swiglu.proj.weight.data = torch.from_numpy(np.array(weight, np.float64))
    expected = swiglu(torch.from_numpy(np.array(x, np.float64))).detach().numpy()
    for function in LINEARS:
        assert_close(function(x, weight, None, activation="swiglu"), expected, DTYPES[dtype])


def test_sums_may_stay_in_float32_beside_products_of_bfloat16():
    x, weight = draw(0, 50, 256, dtype="bfloat16"), draw(1, 640, 256, dtype="bfloat16")
    bias, residual, gate = draw(2, 640), draw(3, 50, 640), draw(4, 1, 640)
    product = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + bias
    for function in LINEARS:
        result = function(x, weight, bias, residual=residual, gate=gate, dtype=jnp.float32)
        assert result.dtype == jnp.float32
        assert_close(result, residual + gate * product, 2e-6)
    normed = torch.nn.functional.layer_norm(torch.from_numpy(residual.astype(np.float64)), (640,), eps=1e-6).numpy()
    for function in LAYER_NORMS:
        result = function(residual, np.ones((1, 640)), np.zeros((1, 640)), eps=1e-6, dtype=jnp.bfloat16)
        assert result.dtype == jnp.bfloat16
        assert_close(result, normed, 2**-8)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_linear_reads_one_layer_of_a_stack_in_place(eight_bits):
    x, stack, bias, more = draw(0, 100, 768), draw(1, 3, 640, 768), draw(2, 640), {"activation": "swiglu"}
    if eight_bits:
        x = round_rows_reference(x, jnp.int8)
        stack = np.random.default_rng(1).integers(-127, 128, stack.shape, np.int8)
        more = {"scales": np.full(640, 1e-2, np.float32), "residual": draw(3, 100, 640)}
    for function in LINEARS:
        for layer in (0, 2):
            got = function(x, stack, bias, layer=jnp.int32(layer), **more)
            assert np.array_equal(got, function(x, stack[layer], bias, **more))


def test_linear_reads_and_writes_columns_in_groups(monkeypatch):
    if INTERPRET:
        monkeypatch.setattr(linear_tiles, "OUTPUTS", 256)
    x, weight, bias = draw(0, 50, 512), draw(1, 768, 512), draw(2, 768)
    expected = LINEARS[0](x, weight, bias)
    grouped = x.reshape(50, 2, 256).transpose(1, 0, 2)
    parts = grouped[..., :128], grouped[..., 128:]
    for function in LINEARS:
        for laid_out in (grouped, parts):
            assert_close(function(laid_out, weight, bias, residual=expected), 2 * expected, 2e-6)
        for groups in (
            2,
            4,
            6,
        ):  # 384 columns are a tile, 192 aren't whole registers, two of 128 share a tile.
            columns = function(x, weight, bias, groups=groups).transpose(1, 0, 2).reshape(50, 768)
            assert_close(columns, expected, 2e-6)
        assert_close(function(x, weight, None) + bias, expected, 2e-6)


def test_first_rows_alone_are_normalised_and_added_to_a_residual():
    """The last tile has rows that stay as they are."""
    rows = 100
    residual, weight, bias = draw(0, 130, 256), draw(1, 640, 256), draw(2, 640)
    for function in LAYER_NORMS:
        ones, zeros = np.ones((1, 256), np.float32), np.zeros((1, 256), np.float32)
        alone = function(residual[:rows], ones, zeros, eps=1e-6)
        assert np.array_equal(function(residual, ones, zeros, eps=1e-6, rows=rows), alone)
    x, residual = draw(3, rows, 256), draw(4, 130, 640)
    gate = draw(5, 2, 640)
    for function in LINEARS:
        result = function(x, weight, bias, residual=residual, gate=gate, first_rows=90)
        assert np.array_equal(result[rows:], residual[rows:])
        alone = function(x, weight, bias, residual=residual[:rows], gate=gate, first_rows=90)
        assert_close(result[:rows], alone, DTYPES["float32"])


@pytest.mark.parametrize(("rows", "dtype"), [(50, "float32"), (5, "bfloat16")])
def test_layer_norm_is_torchs(rows, dtype):
    x, scale, shift = draw(0, rows, 256), draw(1, 4, 256), draw(2, 4, 256)
    x = (x * 3 + 1).astype(jnp.dtype(dtype))
    normed = torch.nn.functional.layer_norm(torch.from_numpy(np.array(x, np.float64)), (256,), eps=1e-6).numpy()
    for ends in ([3], [0], [rows], [-2, 2, 2 + rows], [1, 1, 4]):  # Segments may be empty, or on other devices.
        modulation, first_rows = (scale[: len(ends) + 1], shift[: len(ends) + 1]), np.asarray(ends, np.int32)
        segment = np.searchsorted(first_rows, np.arange(rows), side="right")
        expected = normed * modulation[0].astype(np.float64)[segment] + modulation[1].astype(np.float64)[segment]
        for function in LAYER_NORMS:
            assert_close(function(x, *modulation, eps=1e-6, first_rows=first_rows), expected, DTYPES[dtype])


def test_layer_norm_with_the_mean_left_in_is_torchs_rms_norm():
    x, scale, shift = draw(0, 50, 256) * 3 + 1, draw(1, 1, 256), draw(2, 1, 256)
    normed = torch.nn.functional.rms_norm(torch.from_numpy(np.array(x, np.float64)), (256,), eps=1e-6).numpy()
    for function in LAYER_NORMS:
        assert_close(function(x, scale, shift, eps=1e-6, centred=False), normed * scale + shift, 2e-6)


@pytest.mark.parametrize(("rows", "dtype"), [(50, "float32"), (5, "bfloat16")])
def test_rms_norm_rope_rotates_pairs_half_a_head_apart(rows, dtype):
    heads, width = 4, 128
    x, weight = draw(0, rows, heads * width, dtype=dtype), draw(1, heads * width)
    angles, tables = draw_rotations(rows, width)
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
    rotated = rotate(normed, heads, angles)
    for function in RMS_NORMS:
        assert_close(function(x, weight, None, eps=1e-6), normed, DTYPES[dtype])
        assert_close(function(x, weight, tables, eps=1e-6), rotated, DTYPES[dtype])
        if rows != 50:  # The layout of columns doesn't depend on the number of rows.
            continue
        grouped = function(x, weight, tables, eps=1e-6, groups=2)
        assert_close(grouped.transpose(1, 0, 2).reshape(rows, -1), rotated, DTYPES[dtype])
        first, second = function(x, weight, tables, eps=1e-6, groups=1, parts=(384, 128))
        assert_close(np.concatenate([first, second], axis=1), rotated, DTYPES[dtype])


def test_rms_norm_rope_gives_every_head_angles_of_its_own():
    heads, rows, width = 4, 50, 64
    x, weight = draw(0, rows, heads * width), draw(1, heads * width)
    angles, tables = zip(*(draw_rotations(rows, width, seed=head) for head in range(heads)), strict=True)
    cos, sin = (jnp.concatenate(parts, axis=1) for parts in zip(*tables, strict=True))
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
    each = np.split(normed, heads, axis=1)
    rotated = np.concatenate([rotate(part, 1, angle) for part, angle in zip(each, angles, strict=True)], axis=1)
    for function in RMS_NORMS:
        assert_close(function(x, weight, (cos, sin), eps=1e-6, head=width), rotated, 2e-6)
        grouped = function(x, weight, (cos, sin), eps=1e-6, head=width, groups=2)
        assert_close(grouped.transpose(1, 0, 2).reshape(rows, -1), rotated, 2e-6)


@pytest.mark.parametrize(
    ("heads", "width", "kind", "dtype"),
    [
        (6, 64, "layer", "float32"),
        (4, 128, "rms", "bfloat16"),
        pytest.param(10, 16, "layer", "float32", marks=pytest.mark.thorough),
    ],
)
def test_head_norm_rope_is_torchs_norm_of_each_head(heads, width, kind, dtype):
    """6 heads of 64 in two groups fill one and a half registers each; 10 heads of 16 fill none."""
    rows = 50
    x, weight, bias = draw(0, rows, heads * width) + 3, draw(1, width), draw(2, width)
    x = (x * np.linspace(1e-3, 30, heads * width, dtype=np.float32)).astype(jnp.dtype(dtype))
    angles, tables = draw_rotations(rows, width)
    each, *vectors = (torch.from_numpy(np.array(a, np.float64)) for a in (x, weight, bias))
    each = each.reshape(rows, heads, width)
    if kind == "layer":
        normed = torch.nn.functional.layer_norm(each, (width,), *vectors, eps=1e-6)
    else:
        normed, bias = torch.nn.functional.rms_norm(each, (width,), vectors[0], eps=1e-6), None
    normed = normed.reshape(rows, -1).numpy()
    # A head whose mean is hundreds of deviations loses that many roundings of float32 in the mean.
    tolerance = DTYPES[dtype] * (20 if kind == "layer" and dtype == "float32" else 1)
    for function in HEAD_NORMS:
        assert_close(function(x, weight, bias, None, eps=1e-6), normed, tolerance)
        grouped = function(x, weight, bias, tables, eps=1e-6, groups=2)
        assert_close(grouped.transpose(1, 0, 2).reshape(rows, -1), rotate(normed, heads, angles), tolerance)
        parts = (2 * width, (heads // 2 - 2) * width) if heads > 4 else (width, width)
        both = function(x, weight, bias, tables, eps=1e-6, groups=2, parts=parts)
        assert_close(np.concatenate(both, axis=2), grouped, tolerance)


def draw_rotations(rows, width, seed=2):
    """Return random angles [rows, D/2], and their tables as kernels take them."""
    angles = np.random.default_rng(seed).uniform(-3, 3, (rows, width // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    return angles, tuple(np.concatenate(both, axis=1).astype(np.float32) for both in ((cos, cos), (-sin, sin)))


def rotate(normed, heads, angles):
    """Rotate each pair (i, i + D/2) as a complex number."""
    pairs = normed.reshape(len(normed), heads, 2, -1)
    values = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * np.exp(1j * angles)[:, None]
    return np.stack([values.real, values.imag], axis=2).reshape(normed.shape)


def test_kernels_are_exact_in_simulated_tpu_memory():
    x, weight, bias = draw(0, 50, 512), draw(1, 512, 512), draw(2, 512)
    ones, zeros = np.ones((1, 512), np.float32), np.zeros((1, 512), np.float32)
    tables = draw(3, 50, 128), draw(4, 50, 128)
    narrow = draw(5, 64), draw(6, 64), (tables[0][:, :64], tables[1][:, :64])
    for (reference, kernel), args, more in (
        (LINEARS, (weight, bias), {}),
        (LAYER_NORMS, (ones, zeros), {"eps": 1e-6}),
        (RMS_NORMS, (bias, tables), {"eps": 1e-6, "groups": 2}),
        (HEAD_NORMS, narrow, {"eps": 1e-6, "groups": 2}),
    ):
        assert_close(kernel(x, *args, **more, interpret=SIMULATED), reference(x, *args, **more), 2e-6)
    assert not found_races()
