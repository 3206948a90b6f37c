"""Group norm's kernels in Pallas' interpreter, and their references, against torch in float64."""

import numpy as np
import pytest
import torch

from tests.kernels.cases import INTERPRET, SIMULATED, as_program, assert_close, draw, found_races
from wan_tpu_kernels.vae import group_norm
from wan_tpu_kernels.vae.group_norm import (
    channel_moments,
    channel_moments_reference,
    merge_moments,
    norm_silu,
    norm_silu_reference,
)

MOMENTS = {"kernel": as_program(channel_moments, interpret=INTERPRET), "jnp": as_program(channel_moments_reference)}
NORMS = {"kernel": as_program(norm_silu, interpret=INTERPRET), "jnp": as_program(norm_silu_reference)}
DTYPES = {"float32": 2e-6, "bfloat16": 2**-7}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    if not INTERPRET:  # A TPU uses its own tiles.
        return
    monkeypatch.setattr(group_norm, "TILE_VALUES", 2**13)
    monkeypatch.setattr(group_norm, "VALUES_AT_ONCE", 2**11)


@pytest.mark.parametrize("function", MOMENTS)
@pytest.mark.parametrize(("columns", "rows"), [(None, None), (5, 27), (0, 32)])
def test_moments_are_those_of_the_picture(function, columns, rows):
    """A mean of hundreds of deviations costs no precision, because squares aren't summed around zero."""
    x = draw(0, 3, 8, 32, 64) + 300 * draw(1, 64)
    count, mean, squares = MOMENTS[function](x, columns=columns, rows=rows)
    inside = np.asarray(x, np.float64)[:, :columns, :rows].reshape(-1, 64)
    assert count == len(inside)
    if len(inside):
        assert_close(mean, inside.mean(0), 2e-6)
        assert_close(squares, ((inside - inside.mean(0)) ** 2).sum(0), 2e-5)
    else:
        assert not np.any(mean) and not np.any(squares)


def test_merged_moments_are_those_of_the_union():
    parts = [np.asarray(draw(i, 5 + i, 7), np.float64) * 3 + 20 * i for i in range(3)]
    each = [(len(part), part.mean(0), ((part - part.mean(0)) ** 2).sum(0)) for part in parts]
    counts, means, squares = (np.stack(moment).astype(np.float32) for moment in zip(*each, strict=True))
    total, mean, sums = as_program(merge_moments)(counts[:, None], means, squares)
    whole = np.concatenate(parts)
    assert total == len(whole)
    assert_close(mean, whole.mean(0), 1e-6)
    assert_close(sums, ((whole - whole.mean(0)) ** 2).sum(0), 1e-6)


PICTURES = [(4, 2, 2), (5, 3, 2), (9, 3, 1), (1, 1, 4), (2, 2, 8), (3, None, 1)]


@pytest.mark.parametrize("function", NORMS)
@pytest.mark.parametrize(
    ("dtype", "frames", "latents", "factor"),
    [*(("float32", *picture) for picture in PICTURES), ("bfloat16", *PICTURES[1]), ("bfloat16", *PICTURES[-1])],
)
def test_norm_is_torchs(function, dtype, frames, latents, factor):
    x = draw(0, frames, 8, 32, 64, dtype=dtype)
    scale, shift, around, wide = draw(1, 64), draw(2, 64), None, None
    y = np.array(x, np.float64) * np.array(scale, np.float64) + np.array(shift, np.float64)
    if latents is not None:
        around = draw(3, latents, 8 // factor, 32 // factor, 128, dtype=dtype)
        first = around[:1] if frames % 2 and frames > 1 else around[:0]
        parts = [np.asarray(part, np.float64).transpose(3, 0, 1, 2)[None] for part in (first, around[len(first) :])]
        sizes = [(len(first), 8, 32), (frames - len(first), 8, 32)]
        grown = [
            torch.nn.functional.interpolate(torch.from_numpy(part.copy()), size=size).numpy()
            for part, size in zip(parts, sizes, strict=True)
            if size[0]
        ]
        wide = np.concatenate(grown, axis=2)[0].transpose(1, 2, 3, 0)
        y = y * wide[..., :64] + wide[..., 64:]
    expected = torch.nn.functional.silu(torch.from_numpy(y)).numpy()
    expected[:, 6:], expected[:, :, 30:] = 0, 0
    assert_close(NORMS[function](x, scale, shift, around, columns=6, rows=30), expected, DTYPES[dtype])


def test_group_norm_is_exact_in_simulated_tpu_memory():
    x, vectors, around = (draw(0, 2, 8, 32, 64), (draw(1, 64), draw(2, 64)), draw(3, 2, 4, 16, 128))
    arrays = (x, *vectors, around)
    assert_close(NORMS["kernel"](*arrays, interpret=SIMULATED), NORMS["jnp"](*arrays), 2e-6)
    for got, expected in zip(MOMENTS["kernel"](x, interpret=SIMULATED), MOMENTS["jnp"](x), strict=True):
        assert_close(got, expected, 2e-6)
    assert not found_races()
