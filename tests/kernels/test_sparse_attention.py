"""Block-sparse attention in interpret mode, against float64, with random lists of blocks and adversarial inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import (
    INTERPRET,
    SIMULATED,
    Case,
    D,
    adversarial,
    as_program,
    attend_exactly,
    error_bound,
    found_races,
    normal,
    round_case,
)
from wan_tpu_kernels import sparse_kernel
from wan_tpu_kernels.sparse_attention import sparse_attention, sparse_attention_reference
from wan_tpu_kernels.sparse_kernel import SparseTile, sparse_tiles
from wan_tpu_kernels.two_blocks import KEYS, QUERIES


@functools.cache
def program(**options):
    """One compiled program for each set of options and shapes; `kv_len` may also be an argument of it."""
    return jax.jit(functools.partial(sparse_attention, interpret=INTERPRET, **options))


def draw_lists(q_len: int, kv_len: int, count: int, heads: int = 1) -> np.ndarray:
    """Draw lists of blocks, every second with the last block in it, [1, heads, blocks of queries, count]."""
    rng, blocks = np.random.default_rng(count), -(-kv_len // KEYS)
    lists = [np.sort(rng.permutation(blocks)[:count]) for _ in range(heads * -(-q_len // QUERIES))]
    for chosen in lists[::2]:
        chosen[-1] = blocks - 1
    return np.asarray(lists, np.int32).reshape(1, heads, -1, count)


def run(case: Case, lists: np.ndarray, dtype=jnp.bfloat16, **options) -> np.ndarray:
    arrays, options = [x.astype(dtype)[None] for x in case], {"heads": 1} | options
    counted = {"kv_len": options.pop("kv_len")} if isinstance(options.get("kv_len"), jax.Array) else {}
    return np.asarray(program(**options)(*arrays, lists, **counted), np.float32)[0]


def assert_exact(case: Case, lists: np.ndarray, got: np.ndarray, dtype=jnp.bfloat16) -> None:
    """Check one head's result, whose lists are [blocks of queries, count]."""
    case = round_case(case, dtype)
    for block, chosen in enumerate(lists):
        rows = slice(block * QUERIES, (block + 1) * QUERIES)
        keys = np.concatenate([np.arange(i * KEYS, min((i + 1) * KEYS, len(case.k))) for i in chosen])
        part = Case(case.q[rows], case.k[keys], case.v[keys])
        np.testing.assert_allclose(got[rows], attend_exactly(part), rtol=0, atol=error_bound(part, dtype))


@pytest.mark.parametrize("name", ["normal", "huge norms", "late key", "very negative rows", "sink"])
def test_sparse_attention_equals_float64(name):
    case, lists = adversarial(name, 300, 700), draw_lists(300, 700, 7)
    assert_exact(case, lists[0, 0], run(case, lists))


def test_a_list_may_be_shorter_than_a_chunk():
    case, lists = normal(300, 700), draw_lists(300, 700, 1)
    assert_exact(case, lists[0, 0], run(case, lists, jnp.float32), jnp.float32)


def test_one_query():
    case, lists = normal(1, 700), draw_lists(1, 700, 5)
    assert_exact(case, lists[0, 0], run(case, lists, softmax="online"))


@pytest.mark.thorough
def test_lists_longer_than_the_unrolled_chunks_are_exact(monkeypatch):
    monkeypatch.setattr(sparse_kernel, "UNROLLED", 2)
    # There are three rounds of two chunks, and one chunk. The case overflows and is repeated with "online".
    case, lists = adversarial("late key", 130, 2100), draw_lists(130, 2100, 26)
    arrays = (x.astype(jnp.bfloat16)[None] for x in case)
    got = as_program(sparse_attention, heads=1, interpret=INTERPRET)(*arrays, lists)
    assert_exact(case, lists[0, 0], np.asarray(got, np.float32)[0])


def test_the_check_sees_overflow():
    """Otherwise the cases above might pass without the repeat they are meant to force."""
    failed, tile = [], SparseTile(D, 1, 8, 8, D**-0.5 * np.log2(np.e))
    tiles = as_program(lambda *args: sparse_tiles(*args, tile, 1, (0, 0, 0), True))
    for name in ("late key", "sink"):
        case, lists = adversarial(name, 512, 704), draw_lists(512, 704, 8)
        q, k, v = (x.astype(jnp.bfloat16)[None] for x in case)
        kv_len = np.array([704], np.int32)
        failed.append(bool(np.isnan(tiles(q, k, v, lists.reshape(1, 2, -1), kv_len)[1]).any()))
    assert failed == [True, False]


def test_keys_beyond_kv_len_are_never_read():
    q, k, v = normal(300, 700)
    lists = draw_lists(300, 520, 6)
    k[520:], v[520:] = np.nan, np.nan
    assert_exact(Case(q, k[:520], v[:520]), lists[0, 0], run(Case(q, k, v), lists, kv_len=520, softmax="online"))


@pytest.mark.parametrize("kv_len", [321, 448, 700])
def test_lists_and_keys_of_any_length_at_run_time(kv_len):
    """One program for all; what stands for no block is as large as it likes."""
    q, k, v = normal(300, 700)
    k[kv_len:], v[kv_len:] = np.nan, np.nan
    blocks = -(-kv_len // KEYS)
    lists = draw_lists(300, kv_len, blocks)
    padded = np.pad(lists, ((0, 0), (0, 0), (0, 0), (0, 11 - blocks)), constant_values=1000)
    got = run(Case(q, k, v), padded, least=6, kv_len=jnp.int32(kv_len))
    assert_exact(Case(q, k[:kv_len], v[:kv_len]), lists[0, 0], got)


@pytest.mark.parametrize("width", [64, pytest.param(128, marks=pytest.mark.thorough)])
def test_each_head_has_lists_of_its_own(width):
    """So have heads that share a tile, beside others that force a repeat."""
    cases = [
        Case(*(x[:, :width] for x in adversarial(name, 300, 700))) for name in ("late key", "normal", "sink", "zeros")
    ]
    lists = draw_lists(300, 700, 6, heads=4)
    together = Case(*(np.concatenate(arrays, axis=1) for arrays in zip(*cases, strict=True)))
    got = run(together, lists, heads=4)
    for head, case in enumerate(cases):
        assert_exact(case, lists[0, head], got[:, head * width : (head + 1) * width])


def test_each_element_of_a_batch_has_its_own_lists():
    case, lists = normal(300, 700), draw_lists(300, 700, 6)
    arrays = [np.stack([x, 2 * x]).astype(jnp.bfloat16) for x in case]
    got = program(heads=1, softmax="online")(*arrays, np.concatenate([lists, lists[:, :, ::-1]]))
    assert_exact(case, lists[0, 0], np.asarray(got[0], np.float32))
    assert_exact(Case(*(2 * x for x in case)), lists[0, 0, ::-1], np.asarray(got[1], np.float32))


def test_reference_is_exact_too():
    case, lists = adversarial("sink"), draw_lists(300, 700, 6)
    got = as_program(sparse_attention_reference, heads=1)(*(x[None] for x in case), lists)
    assert_exact(case, lists[0, 0], np.asarray(got)[0], jnp.float32)


def test_sparse_attention_is_exact_in_simulated_tpu_memory():
    case, lists = normal(512, 512), draw_lists(512, 512, 6, heads=2)
    args = [x.astype(jnp.bfloat16)[None] for x in case]
    got = np.asarray(as_program(sparse_attention, heads=2, interpret=SIMULATED)(*args, lists), np.float32)[0]
    for head, lanes in enumerate((slice(64), slice(64, 128))):
        assert_exact(Case(*(x[:, lanes] for x in case)), lists[0, head], got[:, lanes])
    assert not found_races()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 129}, r"\[B, L, N \* D\]"),
        ({"channels": 384, "heads": 4, "blocks": (1, 4, 3, 5)}, r"\b128\b"),
        ({"blocks": (1, 2, 2, 5)}, r"int32 \[1, 2, 3, '1 to 11'\].*int32 \[1, 2, 2, 5\]"),
        ({"blocks": (1, 2, 3, 12)}, r"\b1\b.*\b11\b"),
    ],
)
def test_errors_say_what_is_allowed(change, message):
    call = {"channels": 256, "heads": 2, "blocks": (1, 2, 3, 5)} | change
    q, k = (jnp.zeros((1, length, call["channels"]), jnp.bfloat16) for length in (300, 700))
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, k, jnp.zeros(call["blocks"], jnp.int32), heads=call["heads"])
