"""Attention's kernels in interpret mode, against float64, on adversarial inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import (
    INTERPRET,
    NAMES,
    SIMULATED,
    SMALL,
    SWAPPED,
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
from wan_tpu_kernels.blocks import BlockSizes, Schedule
from wan_tpu_kernels.flash_attention import flash_attention, flash_attention_reference
from wan_tpu_kernels.flash_kernel import AttentionTile
from wan_tpu_kernels.flash_tiles import flash_tiles

WAYS = ("auto", "bounded", "online")  # "auto" is "optimistic".


@functools.cache
def program(**options):
    """Return the compiled function, which all cases with the same options share."""
    return jax.jit(functools.partial(flash_attention, interpret=INTERPRET, **options))


def run(case: Case, dtype=jnp.bfloat16, **options) -> np.ndarray:
    options = {"block_sizes": SMALL, "heads": 1} | options
    return np.asarray(program(**options)(*(x.astype(dtype) for x in case)), np.float32)


def assert_exact(case: Case, got: np.ndarray, dtype=jnp.bfloat16) -> None:
    case = round_case(case, dtype)
    np.testing.assert_allclose(got, attend_exactly(case), rtol=0, atol=error_bound(case, dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("softmax", WAYS)
def test_flash_attention_equals_float64(name, softmax):
    case = adversarial(name)
    assert_exact(case, run(case, softmax=softmax))


@pytest.mark.parametrize("softmax", ["auto", "online"])
@pytest.mark.parametrize("name", ["normal", "late key"])
def test_float32_is_computed_in_float32(name, softmax):
    case = adversarial(name)
    assert_exact(case, run(case, jnp.float32, softmax=softmax), jnp.float32)


@pytest.mark.parametrize("softmax", ["optimistic", "online"])
def test_schedules_do_not_change_the_result(softmax):
    case = adversarial("sink")
    assert_exact(case, run(case, softmax=softmax, block_sizes=SWAPPED))


@pytest.mark.parametrize("length", [1, 127, 128, 129])
def test_any_length_is_exact(length):
    case = normal(length, length)
    assert_exact(case, run(case, block_sizes=None))


@pytest.mark.long
@pytest.mark.parametrize("softmax", ["optimistic", "online"])
def test_as_many_keys_as_a_video_has_are_exact(softmax):
    case = round_case(normal(8, 75_600), jnp.bfloat16)
    blocks = BlockSizes(8, 16_384, fixed=Schedule(4096), online=Schedule(4096))
    assert_exact(case, run(case, softmax=softmax, block_sizes=blocks))


def test_repeat_with_planned_blocks_is_exact():
    """Unless the caller passes block sizes, the repeat has its own."""
    case = adversarial("late key", 64, 1100)
    assert_exact(case, run(case, block_sizes=None))


def run_tiles(case: Case, softmax: str) -> list[jax.Array]:
    tile = AttentionTile(SMALL, softmax, len(case.k), D**-0.5 * np.log2(np.e), D)
    q, k, v = (x.astype(jnp.bfloat16)[None] for x in case)
    return as_program(lambda q, k, v: flash_tiles([q], k, v, None, tile, 1, True))(q, k, v)


def test_the_check_sees_overflow():
    """Otherwise the cases above might pass without the repeat, or the proof, that they are meant to need."""
    for name, repeated in (("late key", True), ("huge norms", True), ("sink", False)):
        case = adversarial(name, 512, 640)
        assert bool(np.isnan(run_tiles(case, "optimistic")[1]).any()) == repeated
    assert not np.isfinite(np.asarray(run_tiles(adversarial("huge norms", 256, 512), "bounded")[0], np.float32)).all()


@pytest.mark.parametrize("softmax", WAYS)
def test_nan_comes_out_where_it_went_in(softmax):
    q, k, v = normal(300, 700)
    q[5, 3] = np.nan
    v[600, 7] = np.nan
    got = run(Case(q, k, v), softmax=softmax)
    assert np.isnan(got[5]).all()
    assert np.isnan(got[:, 7]).all()
    assert np.isfinite(np.delete(np.delete(got, 5, 0), 7, 1)).all()


def test_keys_beyond_kv_len_are_never_read():
    q, k, v = normal(300, 700)
    k[520:], v[520:] = np.nan, np.nan
    assert_exact(Case(q, k[:520], v[:520]), run(Case(q, k, v), kv_len=520))


@pytest.mark.parametrize("count", [1, 130, 256, 520, 700])
@pytest.mark.parametrize("softmax", ["auto", "bounded"])
def test_number_of_keys_may_be_known_only_at_run_time(softmax, count):
    q, k, v = normal(300, 700)
    k[count:], v[count:] = np.nan, np.nan
    attend = program(heads=1, softmax=softmax, block_sizes=SMALL)  # One program for any number.
    got = attend(*(x.astype(jnp.bfloat16) for x in (q, k, v)), kv_len=count)
    assert_exact(Case(q, k[:count], v[:count]), np.asarray(got, np.float32))


def test_one_block_may_have_all_queries_of_a_batch_though_they_fill_no_whole_lanes():
    blocks = BlockSizes(208, 256, Schedule(128), Schedule(128))
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((2, n, 128)).astype(jnp.bfloat16) for n in (208, 304, 304))
    got = np.asarray(program(heads=2, kv_len=300, softmax="online", block_sizes=blocks)(q, k, v), np.float32)
    for index, of_one in enumerate(zip(q, k, v, strict=True)):
        expected = flash_attention_reference(*of_one, heads=2, kv_len=300)
        np.testing.assert_allclose(got[index], np.asarray(expected, np.float32), atol=2**-7)


def test_layouts_agree():
    heads, width = 3, 64
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, n, heads * width)).astype(jnp.bfloat16) for n in (200, 300, 300))
    options = {"block_sizes": SMALL, "softmax": "online"}
    got = np.asarray(program(heads=heads, **options)(q, k, v))
    second = program(heads=heads, **options)(q[1], k[1], v[1])
    apart = [x.reshape(2, -1, heads, width).transpose(0, 2, 1, 3).reshape(2 * heads, -1, width) for x in (q, k, v)]
    by_head = np.asarray(program(**options)(*apart))
    together = by_head.reshape(2, heads, -1, width).transpose(0, 2, 1, 3).reshape(got.shape)
    np.testing.assert_array_equal(got, together)
    np.testing.assert_array_equal(got[1], second)


@pytest.mark.parametrize(
    ("width", "softmax"),
    [(64, "auto"), *(pytest.param(*other, marks=pytest.mark.thorough) for other in ((64, "online"), (32, "auto")))],
)
def test_narrow_heads_share_a_tile(width, softmax):
    """Each head is exact on its own, beside heads that force a repeat that it doesn't need."""
    names = ("late key", "normal", "sink", "huge norms")
    cases = [Case(*(x[:, :width] for x in adversarial(name, 300, 700))) for name in names]
    together = Case(*(np.concatenate(arrays, axis=1) for arrays in zip(*cases, strict=True)))
    got = run(together, heads=4, softmax=softmax)
    for index, case in enumerate(cases):
        assert_exact(case, got[:, index * width : (index + 1) * width])


def test_narrow_heads_are_exact_in_simulated_tpu_memory():
    """Memory starts as NaN, so nothing of a tile is used before it is written."""
    q, k, v = adversarial("normal", 256, 512)
    args = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    got = np.asarray(as_program(flash_attention)(*args, heads=2, block_sizes=SMALL, interpret=SIMULATED), np.float32)
    for lanes in (slice(64), slice(64, 128)):
        assert_exact(Case(q[:, lanes], k[:, lanes], v[:, lanes]), got[:, lanes])


def test_vmap_is_exact_too():
    """Run-time choices become selects: here "bounded" for the first element and "optimistic" for the second."""
    q, k, v = normal(130, 300)
    stack = [np.stack(pair).astype(jnp.bfloat16) for pair in ((q, 10 * q), (k, k), (v, v))]
    got = np.asarray(jax.vmap(program(heads=1, block_sizes=SMALL))(*stack), np.float32)
    assert_exact(Case(q, k, v), got[0])
    assert_exact(Case(10 * q, k, v), got[1])


def test_reference_is_exact_too():
    case = adversarial("sink")
    got = as_program(flash_attention_reference)(*case, heads=1)
    assert_exact(case, np.asarray(got), jnp.float32)


@pytest.mark.parametrize("softmax", ["bounded", "optimistic", "online"])
def test_flash_attention_is_exact_in_simulated_tpu_memory(softmax):
    case = adversarial("normal", 256, 512)
    args = [x.astype(jnp.bfloat16) for x in case]
    got = as_program(flash_attention)(*args, heads=1, softmax=softmax, block_sizes=SMALL, interpret=SIMULATED)
    assert_exact(case, np.asarray(got, np.float32))
    assert not found_races()


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((4, 8), (4, 8), (4, 8)), {}, r"\[N, L, D\]"),
        (((4, 8), (4, 8), (4, 8)), {"heads": 3}, "heads"),
        (((1, 4, 8), (1, 4, 8), (1, 5, 8)), {}, r"4, 8.*5, 8"),
        (((1, 4, 8), (1, 4, 8), (1, 4, 8)), {"kv_len": 5}, r" 1 .* 4\b"),
        (((1, 4, 8), (1, 4, 8), (1, 4, 8)), {"softmax": "fast"}, "'auto'.*'bounded'"),
        (((1, 4, 8), (1, 4, 8), (1, 4, 8)), {"qk": "int4"}, "'int8'"),
    ],
)
def test_errors_say_what_is_allowed(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(*(jnp.zeros(shape, jnp.bfloat16) for shape in shapes), **options)
