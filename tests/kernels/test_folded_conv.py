"""The convolution with folded rows, in Pallas' interpreter, and its reference, against torch in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.kernels.cases import INTERPRET, SIMULATED, as_program, found_races
from wan_tpu.families.shared.convolutions import taps_first, upsampling_taps
from wan_tpu_kernels.vae import folded_shape as shapes
from wan_tpu_kernels.vae.folded_conv import folded_conv, folded_conv_reference

FUNCTIONS = {"kernel": as_program(folded_conv, interpret=INTERPRET), "jnp": as_program(folded_conv_reference)}
# Tolerances: sums have a few thousand float32 terms; in bfloat16 the result is rounded, or sums of rounded weights are.
DTYPES = {"float32": 3e-6, "bfloat16": 2**-8}


class Call:
    """A call on a picture of T frames, X columns and Y folded rows with random arrays, and torch's result."""

    def __init__(self, x, fold, channels, outputs, *, taps=3, frames=0, dtype="float32", pieces="", **options):
        rng = np.random.default_rng(0)

        def draw(*shape):
            return rng.standard_normal(shape).astype(jnp.dtype(dtype))

        self.fold, self.options, self.taps = fold, options, taps
        shape = (*x, fold * channels)
        self.x, self.past = draw(*shape), draw(2, *shape[1:]) if frames else None
        seen = (x[0] + frames, 1, *shape[2:])
        self.edges = (draw(*seen), draw(*seen)) if taps > 1 else (None, None)
        scale = (channels * (frames + 1) * taps**2) ** -0.5
        self.weight = (draw(outputs, channels, frames + 1, taps, taps) * scale).astype(jnp.dtype(dtype))
        self.bias = draw(outputs)
        size = 2 if "doubles" in options else 1
        result = (x[0], size * x[1], x[2], size * fold * outputs)
        more = {"residual": result, "norm_after": (outputs,)}
        self.arrays = {name: draw(*shape) for name, shape in more.items() if name in pieces}

    def run(self, function, **more):
        weight = self.weight
        laid_out = upsampling_taps(weight[:, :, 0]) if "doubles" in self.options else taps_first(weight)
        before = (self.taps // 2, self.taps // 2)
        options = {"past": self.past, "edges": self.edges, "fold": self.fold, "before": before}
        return function(self.x, laid_out.astype(weight.dtype), self.bias, **options | self.options | self.arrays | more)

    def run_torch(self):
        """Return the result in picture rows, normalised and before, [T', X', g Y, O]."""
        frames = np.concatenate([self.past, self.x]) if self.past is not None else self.x
        if self.taps > 1:
            frames = np.concatenate([self.edges[0], frames, self.edges[1]], axis=1)
        x = self._unfold(frames).permute(3, 0, 1, 2)
        weight = torch.from_numpy(np.asarray(self.weight, np.float64)).transpose(3, 4)
        size = 1
        if "doubles" in self.options:
            x, size = x.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, 1:-1], 2
        x = torch.nn.functional.pad(x, (self.taps // 2, self.taps // 2))
        bias = torch.from_numpy(np.asarray(self.bias, np.float64))
        y = torch.nn.functional.conv3d(x[None], weight, bias)[0].permute(1, 2, 3, 0)
        if "residual" in self.arrays:
            y = y + self._unfold(self.arrays["residual"], size * self.fold)
        normed = y
        if (gamma := self.arrays.get("norm_after")) is not None:
            root = y.square().mean(-1, keepdim=True).sqrt()
            normed = torch.nn.functional.silu(y / root * torch.from_numpy(np.asarray(gamma, np.float64)))
        return normed.numpy(), y.numpy()

    def _unfold(self, x, fold=None):
        fold = fold or self.fold
        return torch.from_numpy(np.asarray(x, np.float64)).reshape(*x.shape[:2], fold * x.shape[2], -1)


CALLS = {
    "four rows of 96 channels": (((2, 4, 16), 4, 96, 96), {"frames": 2, "pieces": "residual norm_after"}),
    "eight rows of 48 channels": (((1, 2, 16), 8, 48, 48), {"pieces": "norm_after"}),
    "two rows of 192 channels": (((1, 2, 16), 2, 192, 192), {"pieces": "norm_after"}),
    "one row": (((2, 2, 16), 1, 128, 136), {"frames": 2}),
    "doubled to 96 channels": (((1, 4, 16), 2, 192, 96), {"doubles": True, "pieces": "norm_after"}),
    "doubled from one row": (((2, 2, 16), 1, 128, 64), {"doubles": True, "pieces": "residual"}),
    "joined frames": (((3, 2, 16), 4, 96, 3), {"frames": 2, "joins": True}),
    "one tap": (((2, 2, 16), 2, 64, 128), {"taps": 1}),
    "in time": (((2, 2, 16), 2, 64, 128), {"taps": 1, "frames": 2}),
}


def assert_close(got, expected, tolerance):
    """Compare a result in folded rows with one in picture rows."""
    got = np.asarray(got, np.float64)
    if got.shape[0] < expected.shape[0]:  # Frames are joined.
        got = got.reshape(*got.shape[1:3], expected.shape[0], -1).transpose(2, 0, 1, 3)
    assert np.abs(got.reshape(expected.shape) - expected).max() <= tolerance * np.abs(expected).max()


# Where the kernel runs on a matrix unit of 128 columns, its products are others.
@pytest.mark.parametrize(
    ("name", "dtype", "width"),
    [
        ("four rows of 96 channels", "bfloat16", 256),
        ("four rows of 96 channels", "float32", 128),
        *((name, "float32", 256) for name in list(CALLS)[1:]),
        pytest.param("two rows of 192 channels", "float32", 128, marks=pytest.mark.thorough),
    ],
)
def test_folded_conv_is_torchs(name, dtype, width, monkeypatch):
    monkeypatch.setattr(shapes, "PIXELS", 64)  # There are several tiles.
    monkeypatch.setattr(shapes, "INTERPRETED_CHIP", (width, 1))
    sizes, more = CALLS[name]
    call = Call(*sizes, **more, dtype=dtype)
    normed, raw = call.run_torch()
    for function in FUNCTIONS.values():
        got, *rest = call.run(function, keeps_raw=True)
        assert_close(got, normed, DTYPES[dtype])
        assert_close(rest[0], raw, DTYPES[dtype])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_beyond_the_picture_are_returned_as_zero(name):
    sizes, more = CALLS["doubled to 96 channels"]
    call = Call(*sizes, **more)
    columns, rows = 3, 16 * call.fold - 7
    out = np.asarray(call.run(FUNCTIONS[name], columns=jnp.int32(columns), rows=rows))
    whole, _ = call.run_torch()
    out = out.reshape(whole.shape).copy()
    inside = np.s_[:, : 2 * columns, : 2 * rows]
    assert np.abs(out[inside] - whole[inside]).max() < 1e-4
    out[inside] = 0
    assert not out.any()


def test_no_tile_reads_what_another_has_not_written(monkeypatch):
    monkeypatch.setattr(shapes, "PIXELS", 64)
    call = Call((2, 4, 16), 4, 32, 32, frames=2, pieces="residual norm_after")
    assert_close(call.run(FUNCTIONS["kernel"], interpret=SIMULATED), call.run_torch()[0], DTYPES["float32"])
    assert not found_races()


def test_lanes_that_do_not_fill_registers_are_refused():
    call = Call((1, 2, 16), 2, 96, 96)
    with pytest.raises(ValueError, match="fill registers"):
        call.run(FUNCTIONS["kernel"])
