"""Attention of tiles to lists of tiles, by the kernel (interpreted without a TPU), against plain jnp."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import INTERPRET, as_program
from wan_tpu_kernels.vsa import tile_attention as kernel
from wan_tpu_kernels.vsa.tile_attention import BLOCKS, ROWS, STEP, Part, tile_attention, tile_attention_reference

WIDTH, HEADS = 128, 2
SIZES = [ROWS, 9, ROWS, ROWS, ROWS, 1, 48]  # Rows of each tile of keys; the first two parts are two and three tiles.


@pytest.fixture(autouse=True)
def short_loops(monkeypatch):
    """The interpreter compiles every chunk that is unrolled."""
    monkeypatch.setattr(kernel, "UNROLLED", 1)
    monkeypatch.setattr(kernel, "AHEAD", 1)


def draw_case(dtype, longest=1.0):
    """Return arguments of the kernel: two parts of queries, three of keys, and lists of all lengths."""
    rng = np.random.default_rng(0)

    def draw(rows, heads):
        return rng.standard_normal((rows, heads * WIDTH)).astype(np.float32)

    k, v = draw(len(SIZES) * ROWS, HEADS), draw(len(SIZES) * ROWS, HEADS)
    k[3 * ROWS : 4 * ROWS] *= longest  # A tile that isn't in the first chunk of most lists.
    for tile, size in enumerate(SIZES):  # Padding as the kernel needs it.
        first = tile * ROWS
        k[first + size : first + ROWS], v[first + size : first + ROWS] = k[first], 0
    split = [slice(0, 2 * ROWS), slice(2 * ROWS, 5 * ROWS), slice(5 * ROWS, None)]

    def cut(x):
        """Return the parts; the second one is in an array of more heads and rows."""
        parts = [x[rows] for rows in split]
        parts[1] = np.pad(parts[1], ((0, 33), (WIDTH, 0)), constant_values=np.nan)
        return [
            Part(jnp.asarray(part, dtype), rows, number == 1)
            for number, (part, rows) in enumerate(zip(parts, (128, 192, 128), strict=True))
        ]

    queries = [Part(jnp.asarray(draw(700, HEADS + 1), dtype), 700, 1), Part(jnp.asarray(draw(128, HEADS), dtype), 128)]
    pairs = BLOCKS * sum(-(-part.rows // STEP) for part in queries)
    lists, lengths = np.zeros((HEADS, pairs, 7), np.int32), np.zeros((HEADS, pairs), np.int32)
    for head, pair in np.ndindex(HEADS, pairs):
        count = int(rng.integers(0, len(SIZES))) if pair else len(SIZES) - 1
        tiles = np.sort(rng.permutation(len(SIZES) - 1)[:count] + 1)
        lists[head, pair, : count + 1] = [3, *(4 * tiles + rng.integers(1, 4, count))]
        lengths[head, pair] = 0 if pair % 5 == 4 else count + 1
    return queries, cut(k), cut(v), lists, lengths, np.array(SIZES, np.int32)


@pytest.mark.parametrize(
    ("dtype", "longest", "tolerance"),
    [pytest.param(jnp.float32, 12, 1e-3, marks=pytest.mark.thorough), (jnp.bfloat16, 12, 2e-2)],
)
def test_it_is_attention_to_the_listed_tiles(dtype, longest, tolerance):
    """With queries and keys in parts, tiles of few rows, lists of all lengths, and logits that need their maximum.

    A row that is counted 63 times too often, and as often less, costs six bits of a sum.
    """
    arguments = draw_case(dtype, longest)
    options = {"heads": HEADS, "width": WIDTH}
    results = as_program(tile_attention)(*arguments, **options, interpret=INTERPRET)
    expected = as_program(tile_attention_reference)(*arguments, **options)
    listed = np.repeat(arguments[4] > 0, 2 * ROWS, axis=1)  # [heads, rows of all steps]
    for part, ours, plain, start in zip(arguments[0], results, expected, (0, 2 * STEP), strict=True):
        used = listed[:, start : start + part.rows].T[..., None]
        ours, plain = (np.asarray(x, np.float32)[: part.rows].reshape(-1, HEADS, WIDTH) for x in (ours, plain))
        np.testing.assert_allclose(ours * used, plain * used, rtol=0, atol=tolerance)
        assert np.abs(plain).max() > 0.5


def test_arguments_that_do_not_belong_together_are_refused():
    queries, keys, values, lists, lengths, sizes = draw_case(jnp.float32)
    fewer = [*values[:-1], Part(values[-1].array, ROWS)]
    for wrong in (
        (queries, keys, fewer, lists, lengths, sizes),
        (queries, keys, values, lists[:, 1:], lengths, sizes),
        (queries, keys, values, lists, lengths[:1], sizes),
        (queries, keys, values, lists, lengths, sizes[1:]),
    ):
        with pytest.raises(ValueError, match="must"):
            tile_attention(*wrong, heads=HEADS, width=WIDTH, interpret=INTERPRET)
