"""Block-sparse attention in interpret mode, against float64, by lists of blocks that are drawn or made to break it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.cases import INTERPRET, Case, D, adversarial, as_program, error_bound, exact, normal, rounded
from wan_tpu_kernels import sparse_attention as module
from wan_tpu_kernels.sparse_attention import KEYS, QUERIES, sparse_attention, sparse_attention_reference


@functools.cache
def program(**options):
    """One compiled program for each set of options and shapes."""
    return jax.jit(functools.partial(sparse_attention, interpret=INTERPRET, **options))


def drawn(q_len: int, kv_len: int, count: int, heads: int = 1) -> np.ndarray:
    """Lists of blocks, with the last one in every second, [1, heads, blocks of queries, count]."""
    rng, blocks = np.random.default_rng(count), -(-kv_len // KEYS)
    lists = [np.sort(rng.permutation(blocks)[:count]) for _ in range(heads * -(-q_len // QUERIES))]
    for chosen in lists[::2]:
        chosen[-1] = blocks - 1
    return np.asarray(lists, np.int32).reshape(1, heads, -1, count)


def run(case: Case, lists: np.ndarray, dtype=jnp.bfloat16, **options) -> np.ndarray:
    arrays = (x.astype(dtype)[None] for x in case)
    return np.asarray(program(**{"heads": 1} | options)(*arrays, lists), np.float32)[0]


def assert_exact(case: Case, lists: np.ndarray, got: np.ndarray, dtype=jnp.bfloat16) -> None:
    """lists [blocks of queries, count] of one head."""
    case = rounded(case, dtype)
    for block, chosen in enumerate(lists):
        rows = slice(block * QUERIES, (block + 1) * QUERIES)
        keys = np.concatenate([np.arange(i * KEYS, min((i + 1) * KEYS, len(case.k))) for i in chosen])
        part = Case(case.q[rows], case.k[keys], case.v[keys])
        np.testing.assert_allclose(got[rows], exact(part), rtol=0, atol=error_bound(part, dtype))


@pytest.mark.parametrize("softmax", ["auto", "online"])
@pytest.mark.parametrize("name", ["normal", "huge norms", "late key", "very negative rows", "sink"])
def test_equals_float64(name, softmax):
    case, lists = adversarial(name, 300, 700), drawn(300, 700, 7)
    assert_exact(case, lists[0, 0], run(case, lists, softmax=softmax))


@pytest.mark.parametrize("count", [1, 4, 11])
def test_lists_of_any_length(count):
    """Shorter than what is computed at once, as long, and all blocks there are."""
    case, lists = normal(300, 700), drawn(300, 700, count)
    assert_exact(case, lists[0, 0], run(case, lists, jnp.float32), jnp.float32)


@pytest.mark.parametrize("length", [1, pytest.param(640, marks=pytest.mark.long)])
def test_any_number_of_queries(length):
    case, lists = normal(length, 700), drawn(length, 700, 5)
    assert_exact(case, lists[0, 0], run(case, lists))


@pytest.mark.long
def test_longer_lists_are_a_loop(monkeypatch):
    monkeypatch.setattr(module, "UNROLLED", 2)
    case, lists = adversarial("late key", 130, 2100), drawn(130, 2100, 26)  # three rounds of two, and one
    # It overflows, and is computed again in the other way.
    arrays = (x.astype(jnp.bfloat16)[None] for x in case)
    got = as_program(sparse_attention, heads=1, interpret=INTERPRET)(*arrays, lists)
    assert_exact(case, lists[0, 0], np.asarray(got, np.float32)[0])


def test_the_check_sees_overflow():
    """Else the cases above might pass without the repeat they are meant to force."""
    found, tile = [], module._Tile(D, 1, 704, 8, D**-0.5 * np.log2(np.e))
    tiles = as_program(lambda *args: module._tiles(*args, tile, 1, (0, 0, 0), True))
    for name in ("late key", "sink"):
        case, lists = adversarial(name, 512, 704), drawn(512, 704, 8)
        q, k, v = (x.astype(jnp.bfloat16)[None] for x in case)
        found.append(bool(np.isnan(tiles(q, k, v, lists.reshape(1, 2, -1))[1]).any()))
    assert found == [True, False]


def test_keys_beyond_kv_len_are_never_looked_at():
    q, k, v = normal(300, 700)
    lists = drawn(300, 520, 6)
    k[520:], v[520:] = np.nan, np.nan
    assert_exact(Case(q, k[:520], v[:520]), lists[0, 0], run(Case(q, k, v), lists, kv_len=520))


@pytest.mark.parametrize("width", [64, pytest.param(128, marks=pytest.mark.long)])
def test_each_head_has_lists_of_its_own(width):
    """Heads that share a tile too, beside others that force a repeat."""
    cases = [
        Case(*(x[:, :width] for x in adversarial(name, 300, 700))) for name in ("late key", "normal", "sink", "zeros")
    ]
    lists = drawn(300, 700, 6, heads=4)
    together = Case(*(np.concatenate(arrays, axis=1) for arrays in zip(*cases, strict=True)))
    got = run(together, lists, heads=4)
    for head, case in enumerate(cases):
        assert_exact(case, lists[0, head], got[:, head * width : (head + 1) * width])


def test_a_batch():
    case, lists = normal(300, 700), drawn(300, 700, 6)
    arrays = [np.stack([x, 2 * x]).astype(jnp.bfloat16) for x in case]
    got = program(heads=1)(*arrays, np.concatenate([lists, lists[:, :, ::-1]]))
    assert_exact(case, lists[0, 0], np.asarray(got[0], np.float32))
    assert_exact(Case(*(2 * x for x in case)), lists[0, 0, ::-1], np.asarray(got[1], np.float32))


def test_reference_is_exact_too():
    case, lists = adversarial("sink"), drawn(300, 700, 6)
    got = as_program(sparse_attention_reference, heads=1)(*(x[None] for x in case), lists)
    assert_exact(case, lists[0, 0], np.asarray(got)[0], jnp.float32)


@pytest.mark.parametrize("width", [64, 128])
def test_simulated_tpu_memory(width):
    """In Pallas' simulation of a TPU: memory starts as NaN, copies happen late, races are looked for."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator  # has no public name

    case, lists = normal(512, 512), drawn(512, 512, 6, heads=D // width)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")
    args = [x.astype(jnp.bfloat16)[None] for x in case]
    got = as_program(sparse_attention, heads=D // width, interpret=params)(*args, lists)
    got = np.asarray(got, np.float32)[0]
    for head in range(D // width):
        lanes = slice(head * width, (head + 1) * width)
        assert_exact(Case(*(x[:, lanes] for x in case)), lists[0, head], got[:, lanes])
    assert not simulator.races.races_found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 129}, r"\[B, L, N \* D\]"),
        ({"channels": 384, "heads": 4, "blocks": (1, 4, 3, 5)}, "fill tiles of 128 lanes"),
        ({"kv_len": 701}, "from 1 to 700"),
        ({"blocks": (1, 2, 2, 5)}, r"int32 \[1, 2, 3, '1 to 11'\], got int32 \[1, 2, 2, 5\]"),
        ({"blocks": (1, 2, 3, 12)}, "1 to 11"),
        ({"dtype": jnp.float16}, "bfloat16 or float32"),
    ],
)
def test_errors_say_what_is_allowed(change, message):
    given = {"channels": 256, "heads": 2, "kv_len": None, "blocks": (1, 2, 3, 5), "dtype": jnp.bfloat16} | change
    q, k = (jnp.zeros((1, length, given["channels"]), given["dtype"]) for length in (300, 700))
    lists = jnp.zeros(given["blocks"], jnp.int32)
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, k, lists, heads=given["heads"], kv_len=given["kv_len"])
