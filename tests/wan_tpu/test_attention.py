"""Attention on CPU against torch's, at lengths that don't fill the blocks."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from wan_tpu.attention import CPU_QUERY_BLOCK, attention
from wan_tpu.mesh import make_mesh


@pytest.mark.parametrize("queries", [1, 127, 2 * CPU_QUERY_BLOCK, 2 * CPU_QUERY_BLOCK + 1, 1000])
@pytest.mark.parametrize("keys", [1, 257, 1000])
def test_equals_torch_at_any_length(queries, keys):
    rng = np.random.default_rng(queries + keys)
    q, k, v = (rng.standard_normal((2, n, 3, 16)).astype(np.float32) for n in (queries, keys, keys))
    got = np.asarray(attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), make_mesh((1, 1, 1), heads=3)))
    by_head = [torch.from_numpy(x).transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*by_head).transpose(1, 2).numpy()
    np.testing.assert_allclose(got, expected, atol=2e-6)  # a few float32 roundings of values near 1


def test_huge_scores_stay_finite():
    q = jnp.full((1, 600, 1, 8), 300.0)
    got = attention(q, q, jnp.ones((1, 600, 1, 8)), make_mesh((1, 1, 1), heads=1))
    np.testing.assert_allclose(np.asarray(got), 1.0, rtol=1e-6)
