"""Video sparse attention against FastVideo's formula, by kernels (interpreted) and in plain XLA."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.kernels.cases import as_program
from tests.wan_tpu.vsa_reference import cut_into_tiles, video_sparse_attention
from wan_tpu.ops import video_sparse
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.local_heads import LocalHeads
from wan_tpu.ops.tiles import ROWS, Tiles
from wan_tpu_kernels.vsa import tile_attention


def settle(q, k, v, layer, **local):
    attempt, coarse = video_sparse.video_sparse_attention(LocalHeads(q, k, v, **local), layer)
    return attempt.settle(), coarse


ATTENTION = as_program(settle)
WIDTH, SPARSITY = 128, 0.7
SOUND, TEXT = 70, 128  # Rows of the sound, and of the text with its padding.


@pytest.fixture(autouse=True)
def short_loops(monkeypatch):
    """The interpreter compiles every chunk that is unrolled."""
    monkeypatch.setattr(tile_attention, "UNROLLED", 1)
    monkeypatch.setattr(tile_attention, "AHEAD", 1)


def draw_rows(grid, heads, words):
    """Return q, k, v in the authors' order [text, sound, video], and the place of each of our rows in it."""
    tiles, others = Tiles(grid, (SOUND, TEXT)), words + SOUND
    rng = np.random.default_rng(words)
    q, k, v = (rng.standard_normal((others + tiles.video_rows, heads, WIDTH)).astype(np.float32) for _ in "qkv")
    order = np.concatenate([others + tiles.order, words + np.arange(SOUND), np.arange(words)])
    return tiles, (q, k, v), order


def arrange(x, order, rows):
    """Return rows in our order, with padding that would outweigh all others."""
    padding = np.full((rows - len(order), *x.shape[1:]), 1e3, np.float32)
    return np.concatenate([x[order], padding]).reshape(rows, -1)


def by_formula(arrays, grid, words):
    """Return the exact results of all rows, and their tiles' coarse results, both in the authors' order."""
    tiles, cuts = cut_into_tiles(grid, (words, SOUND))
    tensors = [torch.from_numpy(x) for x in arrays]
    fine, both = (
        video_sparse_attention(*tensors, torch.full_like(tensors[0], gate), tiles, cuts, SPARSITY).numpy()
        for gate in (0.0, 1.0)
    )
    return fine, both - fine


@pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize(
    "grid",
    [(5, 4, 5), pytest.param((5, 3, 6), marks=pytest.mark.thorough)],
    ids=["whole tiles and others", "no whole tile"],
)
def test_it_is_fastvideos(grid, interpret):
    """Texts of any length run through one program; empty tiles of padding count nowhere."""
    for words in (1, 100):
        tiles, arrays, order = draw_rows(grid, 2, words)
        layer = video_sparse.VideoSparse(tiles, tiles.kept(SPARSITY))
        scaled = [arrange(x, order, tiles.rows + 58) for x in (arrays[0] * np.float32(query_scale(WIDTH)), *arrays[1:])]
        options = {"heads": 2, "width": WIDTH, "platform": "cpu", "interpret": interpret}
        out, coarse = ATTENTION(*scaled, layer, kv_len=jnp.int32(len(order)), **options)
        fine, of_tiles = (x.reshape(len(order), -1)[order] for x in by_formula(arrays, grid, words))
        np.testing.assert_allclose(out[: len(order)], fine, rtol=0, atol=2e-5)
        np.testing.assert_allclose(coarse[tiles.of_rows[: len(order)]], of_tiles, rtol=0, atol=2e-5)


@pytest.mark.parametrize("interpret", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["plain", "kernels"])
def test_a_device_may_have_a_part_of_the_rows_and_some_of_the_heads(interpret):
    tiles, arrays, order = draw_rows((9, 8, 9), 3, 100)
    layer = video_sparse.VideoSparse(tiles, tiles.kept(SPARSITY))
    q, k, v = (arrange(x, order, tiles.rows) for x in (arrays[0] * np.float32(query_scale(WIDTH)), *arrays[1:]))
    options = {"heads": 2, "width": WIDTH, "platform": "cpu", "interpret": interpret, "first_heads": (1, 1, 0)}
    start, columns = 4 * ROWS, slice(WIDTH, None)
    assert start in tiles.starts  # Otherwise its tile would have rows of another device.
    arguments = q[start:], k, v[:, columns], layer
    out, _ = ATTENTION(*arguments, kv_len=len(order), first_query=jnp.int32(start), **options)
    fine, _ = (x[:, 1:].reshape(len(order), -1)[order] for x in by_formula(arrays, (9, 8, 9), 100))
    np.testing.assert_allclose(out[: len(order) - start], fine[start:], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("grid", "sizes"),
    [((37, 24, 42), {64: 540, 32: 54, 16: 60, 8: 6}), ((3, 5, 2), {24: 1, 6: 1}), ((4, 4, 4), {64: 1})],
)
def test_tiles_are_boxes_in_falling_size(grid, sizes):
    tiles = Tiles(grid, (30, 100))
    found = tiles.sizes[: tiles.video]
    assert dict(zip(*np.unique(found, return_counts=True), strict=True)) == sizes and (np.diff(found) <= 0).all()
    assert sorted(tiles.order) == list(range(tiles.video_rows))
    assert list(tiles.sizes[tiles.video :]) == [30, 64, 36]
    where = np.stack(np.unravel_index(tiles.order, grid), axis=1)
    for tile in range(tiles.video):
        assert len(np.unique(where[tiles.of_rows[: tiles.video_rows] == tile] // 4, axis=0)) == 1


@pytest.mark.parametrize(("sparsity", "count"), [(0.9, 66), (0.8, 132)])
def test_the_number_of_kept_tiles_is_fastvideos(sparsity, count):
    """Of numbers that Python rounds: 1 - 0.9 is a little less than a tenth."""
    assert Tiles((37, 24, 42), ()).kept(sparsity) == count
    assert Tiles((4, 16, 20), ()).kept(0.8) == 4
