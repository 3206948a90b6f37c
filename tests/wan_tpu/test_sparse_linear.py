"""Sparse-linear attention against its paper's formula in float64, by kernels (interpreted) and in plain XLA."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.kernels.cases import INTERPRET, as_program
from tests.wan_tpu.minimax_h3_reference import choose_sparsely
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.local_heads import LocalHeads
from wan_tpu.ops.sparse_linear import SparseLinear, choose_blocks, sparse_linear_attention
from wan_tpu_kernels.sla.block_means import block_means, block_means_reference
from wan_tpu_kernels.sla.linear_attention import EPSILON, add_linear, add_linear_reference
from wan_tpu_kernels.sla.top_lists import pair_lists, pair_lists_reference, top_lists, top_lists_reference
from wan_tpu_kernels.two_blocks import KEYS, QUERIES


def settle(q, k, v, layer, **local):
    return sparse_linear_attention(LocalHeads(q, k, v, **local), layer).settle()


ATTENTION = as_program(settle)


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def by_formula(q, k, v, share, weight=None, bias=None):
    """arXiv 2509.24006 for one head, [L, D] float64: blocks by means, softmax over them, and any linear part."""
    blocks = [np.arange(i, min(i + KEYS, len(k))) for i in range(0, len(k), KEYS)]
    means = np.stack([(k - k.mean(0))[rows].mean(0) for rows in blocks])
    out = np.empty_like(v)
    for start in range(0, len(q), QUERIES):
        rows = slice(start, start + QUERIES)
        best = np.argsort(-(means @ q[rows].mean(0)), kind="stable")[: max(1, int(share * len(blocks)))]
        keys = np.concatenate([blocks[i] for i in best])
        out[rows] = softmax(q[rows] @ k[keys].T * q.shape[1] ** -0.5) @ v[keys]
    if weight is None:
        return out
    phi_q, phi_k = softmax(q), softmax(k)
    linear = phi_q @ (phi_k.T @ v) / (EPSILON + (phi_q * phi_k.sum(0)).sum(1, keepdims=True))
    return out + linear @ weight.T + bias


def draw_inputs(tokens, heads, width, dtype, seed=0):
    """q, k, v [L, N * D], and the linear part's weight and bias."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((tokens, heads * width)).astype(dtype).astype(np.float64) for _ in "qkv")
    return q, k, v, rng.standard_normal((width, width)) / 8, rng.standard_normal(width)


@pytest.mark.parametrize("interpret", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["plain", "kernels"])
@pytest.mark.parametrize(
    ("heads", "width", "tokens"), [(2, 128, 600), pytest.param(2, 64, 640, marks=pytest.mark.thorough)]
)
def test_it_is_the_papers(heads, width, tokens, interpret):
    """With padding behind the tokens, which is NaN, and tokens that fill no whole block."""
    q, k, v, weight, bias = draw_inputs(tokens, heads, width, jnp.float32)
    scale, padding = query_scale(width), ((0, 768 - tokens), (0, 0))
    arrays = [np.pad(x, padding, constant_values=np.nan).astype(np.float32) for x in (q * scale, k, v)]
    got = ATTENTION(
        *arrays,
        SparseLinear(0.4, jnp.asarray(weight), jnp.asarray(bias)),
        heads=heads,
        width=width,
        kv_len=tokens,
        platform="cpu",
        interpret=interpret,
    )
    for head in range(heads):
        lanes = slice(head * width, (head + 1) * width)
        expected = by_formula(q[:, lanes], k[:, lanes], v[:, lanes], 0.4, weight, bias)
        np.testing.assert_allclose(got[:tokens, lanes], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernels"])
def test_a_device_may_have_a_part_of_the_tokens_and_some_of_the_heads(interpret):
    """Its last tokens are padding; of the other devices' heads, arrays may have some, too."""
    q, k, v, weight, bias = draw_inputs(640, 2, 128, jnp.float32)
    how, last = SparseLinear(0.4, jnp.asarray(weight), jnp.asarray(bias)), slice(128, None)
    expected = by_formula(q[:600, last], k[:600, last], v[:600, last], 0.4, weight, bias)[384:]
    q, k, v = (x.astype(np.float32) for x in (q * query_scale(128), k, v))
    more = {"heads": 1, "width": 128, "kv_len": 600, "platform": "cpu", "interpret": interpret}
    part = ATTENTION(q[384:], k[:, last], v, how, first_query=jnp.int32(384), first_heads=(1, 0, 1), **more)
    np.testing.assert_allclose(part[: 600 - 384], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernels"])
def test_the_number_of_tokens_may_be_an_argument(interpret):
    """Without a linear part, as in LightX2V's adapters for MiniMax-H3; one program for all lengths."""
    q, k, v, *_ = draw_inputs(900, 2, 128, jnp.float32)
    layer = SparseLinear(1 - 0.85, shortest=500)
    options = {"heads": 2, "width": 128, "platform": "cpu", "interpret": interpret}
    for tokens in (500, 833):
        padded = [np.where(np.arange(900)[:, None] < tokens, x, np.nan) for x in (q * query_scale(128), k, v)]
        arrays = [x.astype(np.float32) for x in padded]
        got = ATTENTION(*arrays, layer, kv_len=jnp.int32(tokens), **options)
        for lanes in (slice(0, 128), slice(128, 256)):
            expected = by_formula(*(x[:tokens, lanes] for x in (q, k, v)), 1 - 0.85)
            np.testing.assert_allclose(got[:tokens, lanes], expected, rtol=0, atol=2e-5)


ROWS = 2688  # Of the arrays, real ones and padding.
TURBO = SparseLinear(1 - 0.85)  # As LightX2V's adapter for MiniMax-H3 has it.


def draw_heads(tokens):
    """Queries and keys of three heads, [L, N, D]; all keys of a head share a part, as in trained models."""
    rng = np.random.default_rng(0)
    q, k, shared = (rng.standard_normal((rows, 3, 128)).astype(np.float32) for rows in (tokens, tokens, 1))
    return q, k + 2 * shared


def list_theirs(q, k, dtype=torch.float32, least_gap=1e-5):
    """LightX2V's lists [N, blocks of queries, n]; in float32, scores must be apart."""
    query, key = (torch.from_numpy(x).transpose(0, 1).to(dtype) for x in (q, k))
    return choose_sparsely(query, key, TURBO.density, least_gap).numpy()


def list_ours(q, k, kv_len, *, dtype=jnp.float32, kernels):
    """Our lists for the rows that are real, [N, blocks of queries, n]; padding is NaN."""
    padding = (0, ROWS - len(q)), (0, 0)
    scaled, keys = (
        jnp.asarray(np.pad(x.reshape(len(x), -1), padding, constant_values=np.nan), dtype)
        for x in (q * np.float32(query_scale(128)), k)
    )
    more = {"first_query": jnp.int32(0), "interpret": True, "heads": 3, "width": 128, "kernels": kernels}
    lists = np.asarray(as_program(choose_blocks)(scaled, keys, TURBO, kv_len=kv_len, **more))[0]
    return lists[:, : -(-len(q) // QUERIES), : TURBO.count(-(-len(k) // KEYS))]


@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
def test_lists_are_lightx2vs(kernels):
    """Of few keys, of whole and of partial blocks; one program for all lengths."""
    for tokens in (40, 130, 1171, 1281, 2600):  # 1171 rows have 2.85 blocks to keep.
        q, k = draw_heads(tokens)
        expected = list_theirs(q, k)
        assert expected.shape == (3, -(-tokens // 128), max(1, int(0.15 * -(-tokens // 64))))
        np.testing.assert_array_equal(list_ours(q, k, jnp.int32(tokens), kernels=kernels), expected)


@pytest.mark.parametrize("kernels", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["plain", "kernels"])
def test_lists_in_bfloat16_are_lightx2vs_except_for_near_ties(kernels):
    """LightX2V rounds means and scores to bfloat16, too: 2^-9 each, so that scores within 2^-6 may change places."""
    q, k = draw_heads(2600)
    expected = list_theirs(q, k, torch.bfloat16, least_gap=-1)
    lists = list_ours(q, k, jnp.int32(2600), dtype=jnp.bfloat16, kernels=kernels)
    blocks = np.arange(-(-2600 // KEYS))
    ours, theirs = ((x[..., None] == blocks).any(axis=2) for x in (lists, expected))
    assert ours.sum() == theirs.sum()
    assert (ours & ~theirs).sum() < 0.02 * theirs.sum()
    wide = (q.astype(np.float64), QUERIES), ((k - k.mean(axis=0)).astype(np.float64), KEYS)
    means = [np.stack([x[i : i + size].mean(axis=0) for i in range(0, len(x), size)]) for x, size in wide]
    scores = np.einsum("qnd,knd->nqk", *means)
    last = np.sort(scores, axis=2)[..., -lists.shape[2], None]
    gaps = np.abs(scores - last) / np.abs(scores).max(axis=2, keepdims=True)
    assert gaps[ours != theirs].max(initial=0) < 2**-6


def test_one_block_is_kept_at_least():
    q, k, _, weight, bias = draw_inputs(300, 1, 128, jnp.float32)
    for share, count in ((0.01, 1), (1, 5)):
        how = SparseLinear(share, jnp.asarray(weight), jnp.asarray(bias))
        lists = as_program(choose_blocks)(q, k, how, heads=1, width=128, kv_len=300, kernels=False)
        assert lists.shape == (1, 1, 3, count)


@pytest.mark.parametrize(("shape", "count"), [((2, 300, 150), 7), ((1, 130, 20), 130)])
def test_top_lists_are_the_largest_scores(shape, count):
    """With many that are equal, of which the first count, all of a column, and negative ones and infinities."""
    rng = np.random.default_rng(count)
    scores = rng.standard_normal(shape).astype(np.float32)
    scores[:, :, ::3] = np.round(scores[:, :, ::3])
    scores[:, :, 0] = -1
    scores[:, 1, ::2], scores[:, 3, ::2] = np.inf, -np.inf
    scores[:, 5, ::4], scores[:, 7, ::4] = np.nan, -np.nan  # either sign: as large as inf
    lists = np.asarray(as_program(top_lists)(scores, count, interpret=INTERPRET))
    np.testing.assert_array_equal(lists, as_program(top_lists_reference)(scores, count))
    for i, j in ((0, 0), (shape[0] - 1, shape[2] - 1)):
        column = np.where(np.isnan(scores[i, :, j]), np.inf, scores[i, :, j])
        order = np.argsort(-column, kind="stable")[:count]
        np.testing.assert_array_equal(lists[i, j], np.sort(order))


@pytest.mark.parametrize("interpret", [False, True], ids=["plain", "kernel"])
def test_lists_shorter_than_their_arrays(interpret):
    """The count is an argument of the program; entries behind it stand for no score."""
    scores = np.random.default_rng(0).standard_normal((2, 300, 20)).astype(np.float32)
    build = as_program(top_lists, interpret=INTERPRET) if interpret else as_program(top_lists_reference)
    for count in (1, 5, 12):
        lists = build(scores, 12, jnp.int32(count))
        np.testing.assert_array_equal(lists[:, :, :count], as_program(top_lists_reference)(scores, count))
        assert (np.asarray(lists[:, :, count:]) == 300).all()


@pytest.mark.parametrize(("rows", "count"), [(300, 12), pytest.param(40, 30, marks=pytest.mark.thorough)])
def test_lists_of_pairs_are_the_union_of_two(rows, count):
    """Entries say which of both columns have chosen a position; the count is an argument of the program."""
    scores = np.random.default_rng(0).standard_normal((2, rows, 140)).astype(np.float32)
    scores[:, :3] = np.inf  # What all columns choose.
    for number in (count - 2, count):
        lists, lengths = as_program(pair_lists, interpret=INTERPRET)(scores, count, jnp.int32(number))
        expected, expected_lengths = as_program(pair_lists_reference)(scores, count, jnp.int32(number))
        np.testing.assert_array_equal(lists, expected)
        np.testing.assert_array_equal(lengths, expected_lengths)
        best = [set(np.argsort(-scores[0, :, i], kind="stable")[:number].tolist()) for i in range(2)]
        entries = np.asarray(lists)[0, 0, : int(lengths[0, 0])]
        assert entries.tolist() == sorted(
            4 * position + (position in best[0]) + 2 * (position in best[1]) for position in best[0] | best[1]
        )


@pytest.mark.parametrize(("rows", "real"), [(300, 300), (2500, 2100)])
def test_block_means_ignore_padding(rows, real):
    x = np.random.default_rng(rows).standard_normal((rows, 384)).astype(np.float32)
    x[real:] = np.nan
    for size in (64, 128):
        how = {"real": real, "tiles": 2, "lanes": 128, "first": 1}
        means = as_program(block_means)(x, size, **how, interpret=INTERPRET)
        blocks = [x[i : min(i + size, real), 128:] for i in range(0, rows, size)]
        expected = np.stack([block.mean(0) if len(block) else np.zeros(256) for block in blocks])
        np.testing.assert_allclose(np.concatenate([*means], axis=1), expected, rtol=0, atol=1e-5)
        plain = as_program(block_means_reference)(x, size, **how)
        np.testing.assert_allclose(means, plain, rtol=0, atol=1e-5)


def test_counts_out_of_range_are_refused():
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"1 to 4.*{count}"):
            top_lists(jnp.zeros((1, 4, 1)), count)


@pytest.mark.parametrize(("heads", "width", "kv_len"), [(2, 128, 1400), (4, 64, 1024)])
def test_the_linear_part_in_bfloat16(heads, width, kv_len):
    """Of several blocks of keys, whole ones and others; large logits, whose powers need their maximum."""
    q, k, v, weight, bias = draw_inputs(1500, heads, width, jnp.bfloat16)
    sparse, *_ = draw_inputs(1500, heads, width, jnp.bfloat16, seed=1)
    k[kv_len:], v[kv_len:] = np.nan, np.nan
    arrays = [*(x.astype(jnp.bfloat16) for x in (sparse, 60 * q, k, v)), weight, bias]
    got = as_program(add_linear)(*arrays, heads=heads, kv_len=kv_len, interpret=INTERPRET)
    expected = as_program(add_linear_reference)(*arrays, heads=heads, kv_len=kv_len)
    largest = np.abs(np.asarray(expected, np.float32)).max()
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=0, atol=2**-7 * largest
    )
    with pytest.raises(ValueError, match=r"\b96\b"):
        add_linear(*(x[:, :192] for x in arrays[:4]), *arrays[4:], heads=2)
