"""The convolution of video VAEs, in Pallas' interpreter, and its reference, against torch in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.kernels.cases import INTERPRET, SIMULATED, as_program, assert_close, found_races
from wan_tpu_kernels.vae import causal_conv as causal_conv_module
from wan_tpu_kernels.vae import conv_shape as shapes
from wan_tpu_kernels.vae.causal_conv import causal_conv, causal_conv_reference

FUNCTIONS = {"kernel": as_program(causal_conv, interpret=INTERPRET), "jnp": as_program(causal_conv_reference)}
# Tolerances: sums have a few hundred float32 terms; in bfloat16 the normalised input and the result are rounded.
DTYPES = {"float32": 3e-6, "bfloat16": 2**-6}


class Call:
    """A call with random arrays, and torch's result."""

    def __init__(
        self,
        x,
        outputs,
        taps,
        *,
        before,
        past=0,
        stride=1,
        padding="zeros",
        centred=False,
        eps=0.0,
        dtype="float32",
        pieces="",
    ):
        rng = np.random.default_rng(0)
        self.draw = lambda *shape: rng.standard_normal(shape).astype(jnp.dtype(dtype))
        frames, _, rows, channels = x
        self.x, self.stride, self.before, self.padding = self.draw(*x), stride, before, padding
        self.centred, self.eps = centred, eps
        if eps:  # Some pixels are so small that it shows.
            self.x[:, ::2] *= 1e-2
        self.weight = self.draw(*taps, channels, outputs) * jnp.dtype(dtype).type((channels * np.prod(taps)) ** -0.5)
        self.bias = self.draw(outputs)
        count = 2 if centred else taps[0] - stride if past else 0
        out = ((count + frames - taps[0]) // stride + 1, *x[1:3], outputs)
        shapes = {"norm": (channels,), "norm_after": (outputs,), "residual": out}
        self.optional = {name: self.draw(*shape) for name, shape in shapes.items() if name in pieces}
        self.past = self.draw(past, *x[1:]) if past else None
        self.frames = np.concatenate([self.past[-count:], self.x]) if past and count else self.x
        edge = (self.frames.shape[0], 1, rows, channels)
        self.edges = (self.draw(*edge), self.draw(*edge)) if taps[1] > 1 else (None, None)

    def run(self, function, **more):
        options = {"past": self.past, "before": self.before, "stride": self.stride, "edges": self.edges}
        options |= {"padding": self.padding, "centred": self.centred, "norm_eps": self.eps} | self.optional
        return function(self.x, self.weight, self.bias, **options | more)

    def run_torch(self):
        wide = {name: torch.from_numpy(np.array(array, np.float64)) for name, array in self.optional.items()}
        x = torch.from_numpy(np.array(self.frames, np.float64))
        kx, ky = self.weight.shape[1:3]
        if kx > 1:
            left, right = (torch.from_numpy(np.array(edge, np.float64)) for edge in self.edges)
            x = torch.cat([left] * self.before[0] + [x] + [right] * (kx - 1 - self.before[0]), dim=1)
        if self.centred:
            x = torch.cat([x[:1], x, x[-1:]])
        x = normalise(x, wide.get("norm"), self.eps)
        above, below = self.before[1], ky - 1 - self.before[1]
        mode = {"zeros": "constant", "edge": "replicate", "reflect": "reflect"}[self.padding]
        x = torch.nn.functional.pad(x.transpose(2, 3), (above, below, 0, 0), mode=mode).transpose(2, 3)
        weight = torch.from_numpy(np.array(self.weight, np.float64)).permute(4, 3, 0, 1, 2)
        bias = torch.from_numpy(np.array(self.bias, np.float64))
        y = torch.nn.functional.conv3d(x.permute(3, 0, 1, 2)[None], weight, bias, stride=(self.stride, 1, 1))
        y = y[0].permute(1, 2, 3, 0) + wide.get("residual", 0)
        return normalise(y, wide.get("norm_after"), self.eps).numpy()


def normalise(x, gamma, eps):
    if gamma is None:
        return x
    return torch.nn.functional.silu(x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma)


CALLS = {
    "two frames a product": (((4, 4, 16, 24), 20, (3, 3, 3)), {"past": 4, "pieces": "norm residual"}),
    "one frame": (((1, 6, 32, 128), 136, (3, 3, 3)), {"past": 2, "pieces": "norm norm_after"}),
    "edges that go on": (((2, 4, 16, 24), 20, (3, 3, 3)), {"past": 2, "pieces": "norm residual", "padding": "edge"}),
    "frames before and after": (
        ((7, 4, 32, 24), 20, (3, 3, 3)),
        {"centred": True, "eps": 1e-4, "pieces": "norm norm_after residual", "padding": "reflect"},
    ),
    "the only frame": (((1, 4, 16, 24), 20, (3, 3, 3)), {"centred": True, "pieces": "norm"}),
    "the first frame": (((1, 3, 16, 8), 8, (1, 3, 3)), {"past": 0, "pieces": "norm residual"}),
    "in time": (((2, 3, 16, 8), 260, (3, 1, 1)), {"past": 2, "before": (0, 0)}),
    "every second frame": (((4, 3, 16, 8), 8, (3, 1, 1)), {"past": 4, "before": (0, 0), "stride": 2}),
    "after its pixel": (((2, 6, 16, 32), 8, (1, 2, 2)), {"past": 0, "before": (0, 0)}),
}


# In bfloat16 only the normalised input and the rounding of the result differ, so one call is enough.
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "float32" if number else "bfloat16") for number, name in enumerate(CALLS)]
)
def test_causal_conv_is_torchs(name, dtype, monkeypatch):
    monkeypatch.setattr(shapes, "PIXELS", 32)  # There are several tiles, and several products in each.
    monkeypatch.setattr(shapes, "PIXELS_AT_ONCE", 16)
    monkeypatch.setattr(shapes, "SLABS", (4, 2, 1))
    sizes, more = CALLS[name]
    call = Call(*sizes, **{"before": (1, 1)} | more, dtype=dtype)
    expected = call.run_torch()
    for function in FUNCTIONS.values():
        assert_close(call.run(function), expected, DTYPES[dtype])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_beyond_the_picture_are_returned_as_zero(name):
    call = Call((2, 4, 16, 8), 8, (3, 3, 3), past=2, before=(1, 1))
    out = np.asarray(call.run(FUNCTIONS[name], columns=jnp.int32(3), rows=13))
    whole = call.run_torch()
    assert np.abs(out[:, :3, :13] - whole[:, :3, :13]).max() < 1e-5
    assert not out[:, 3:].any()
    assert not out[:, :, 13:].any()


def assert_no_races(call):
    assert_close(call.run(FUNCTIONS["kernel"], interpret=SIMULATED), call.run_torch(), DTYPES["float32"])
    assert not found_races()


@pytest.mark.parametrize(
    ("frames", "more"), [(2, {"past": 2}), (6, {"centred": True, "padding": "reflect"})], ids=["tiles", "slabs"]
)
def test_no_tile_reads_what_another_has_not_written(frames, more, monkeypatch):
    monkeypatch.setattr(shapes, "PIXELS", 32)
    monkeypatch.setattr(shapes, "SLABS", (4, 2, 1))
    assert_no_races(Call((frames, 4, 16, 8), 8, (3, 3, 3), before=(1, 1), pieces="norm residual", **more))


def test_weights_that_do_not_fit_are_fetched_in_parts(monkeypatch):
    monkeypatch.setattr(shapes, "PIXELS", 32)
    monkeypatch.setattr(causal_conv_module, "vmem_bytes", lambda interpret: 9 * 2**20)  # The weights are 7 MiB.
    call = Call((1, 4, 16, 8), 512, (3, 3, 3), past=2, before=(1, 1), pieces="norm norm_after residual")
    shape = shapes.conv_shape(call.x, call.weight, call.past, (1, 1), 1, 9 * 2**20, interpret=True)
    assert (shape.o_block, shape.steps) == (256, 2)
    assert_no_races(call)


@pytest.mark.parametrize(("vmem_mib", "expected"), [(128, (4, 256)), (64, (2, 128))], ids=["v6e", "v7x"])
def test_a_tile_is_smaller_where_no_part_of_the_weights_fits_beside_a_large_one(vmem_mib, expected):
    # LTX-2.0's encoder on one of eight devices: a frame of 8 x 48 pixels, 226 MB of weights.
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 8, 48, 2048), (3, 3, 3, 2048, 2048)))
    past = jax.ShapeDtypeStruct((2, 8, 48, 2048), jnp.bfloat16)
    shape = shapes.conv_shape(x, weight, past, (1, 1), 1, int(0.85 * vmem_mib * 2**20), interpret=True)
    assert (shape.block, shape.o_block) == expected


def test_rows_that_do_not_fill_tiles_are_refused():
    call = Call((1, 2, 15, 8), 8, (1, 3, 3), past=0, before=(1, 1))
    with pytest.raises(ValueError, match=r"\b16\b"):
        call.run(FUNCTIONS["kernel"])
