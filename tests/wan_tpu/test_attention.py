"""Attention on CPU against torch's, at lengths that don't fill the blocks, with padded keys."""

import numpy as np
import pytest
import torch

from tests.kernels.cases import as_program
from wan_tpu.ops.attention import CPU_QUERY_BLOCK, attention, query_scale


@pytest.mark.parametrize(
    ("queries", "keys"),
    [*((n, 257) for n in (1, 127, 2 * CPU_QUERY_BLOCK, 2 * CPU_QUERY_BLOCK + 1, 1000)), (127, 1), (1000, 1000)],
)
def test_equals_torch_at_any_length(queries, keys):
    rng = np.random.default_rng(queries + keys)
    q, k, v = (rng.standard_normal((n, 3, 16)).astype(np.float32) for n in (queries, keys + 5, keys + 5))
    k[keys:], v[keys:] = 100, np.nan  # padding: it must not count
    flat = [x.reshape(len(x), -1) for x in (q * np.float32(query_scale(16)), k, v)]
    got = np.asarray(as_program(attention)(*flat, heads=3, platform="cpu", kv_len=keys))
    by_head = [torch.from_numpy(x).transpose(0, 1) for x in (q, k[:keys], v[:keys])]
    expected = torch.nn.functional.scaled_dot_product_attention(*by_head).transpose(0, 1).numpy()
    np.testing.assert_allclose(got.reshape(expected.shape), expected, atol=2e-6)  # a few roundings of values near 1


def test_huge_scores_stay_finite():
    q = np.full((600, 8), 300, np.float32)
    got = as_program(attention)(q, q, np.ones((600, 8), np.float32), heads=1, platform="cpu")
    np.testing.assert_allclose(np.asarray(got), 1.0, rtol=1e-6)
