"""Adversarial inputs, their attention in float64, and the error that a correct kernel may make."""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator  # It has no public name.
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import BlockSizes, Schedule

# A few hundred tokens fill several of these blocks. One schedule sums on the vector unit, the other on the MXU, early.
SMALL = BlockSizes(256, 256, fixed=Schedule(128), online=Schedule(128, columns=128, ahead=1, mxu_sums=True))
SWAPPED = BlockSizes(256, 256, fixed=SMALL.online, online=SMALL.fixed)

D = 128
INTERPRET = jax.default_backend() != "tpu"  # `make test-tpu` runs the kernels themselves.
# For `interpret`: Pallas' simulation of a TPU, in which memory starts as NaN, copies happen late, and races are found.
SIMULATED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")


def found_races() -> bool:
    return simulator.races.races_found


def as_program(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return the function with these options, each call one compiled program as in models, not twenty, op by op.

    Calls of one test that differ only in the values of arrays share a program; a test sets sizes of tiles before them.
    """

    @functools.lru_cache(maxsize=16)
    def compile_for(test, tree, constants):
        def program(arrays):
            leaves = {i: leaf for i, _, leaf in constants} | arrays
            args, more = tree.unflatten([leaves[i] for i in sorted(leaves)])
            return function(*args, **more)

        return jax.jit(program)

    def call(*args, **more):
        leaves, tree = jax.tree.flatten((args, options | more))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray | jax.Array)}
        constants = tuple((i, type(leaf), leaf) for i, leaf in enumerate(leaves) if i not in arrays)
        key = os.environ.get("PYTEST_CURRENT_TEST"), tree, constants
        try:
            program = compile_for(*key)
        except TypeError:  # An argument has arrays of its own, such as trained weights.
            program = compile_for.__wrapped__(*key)
        return program(arrays)

    return call


class Case(NamedTuple):
    """Q, K, V of one head, [L, D] float32."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def draw(seed: int, *shape: int, dtype: Any = jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    """Assert that no error is larger than a share of the largest expected value."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


def normal(q_len: int, kv_len: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    return Case(*(rng.standard_normal((n, D)).astype(np.float32) for n in (q_len, kv_len, kv_len)))


def adversarial(name: str, q_len: int = 300, kv_len: int = 700) -> Case:
    q, k, v = normal(q_len, kv_len, seed=sum(map(ord, name)))
    if name == "huge norms":  # Logits are in the thousands: one key takes all the weight.
        q, k = 30 * q, 30 * k
    elif name == "late key":  # The last key's logits are 400 powers of two above the first chunk's.
        k[-1] = 1000 * q.mean(0)
        q += 2 * q.mean(0) / np.linalg.norm(q.mean(0)) * np.sqrt(D)
    elif name == "equal keys":
        k[:] = k[0]
    elif name == "very negative rows":  # Every logit is about -3000.
        q, k = np.abs(q) * 15, -np.abs(k) * 30
    elif name == "sink":  # The first key is far above all others, in every row.
        q += 4.0
        k[0] = 8.0
    elif name == "zeros":
        q[:], k[:] = 0, 0
    elif name != "normal":
        raise ValueError(name)
    return Case(q, k, v)


NAMES = ("normal", "huge norms", "late key", "equal keys", "very negative rows", "sink", "zeros")


def round_case(case: Case, dtype) -> Case:
    """Return the values that a kernel of this dtype receives, as float32."""
    return Case(*(x.astype(dtype).astype(np.float32) for x in case))


def attend_exactly(case: Case) -> np.ndarray:
    """Compute attention in float64, [Lq, D]."""
    q, k, v = (x.astype(np.float64) for x in case)
    logits = q @ k.T * q.shape[1] ** -0.5
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights @ v / weights.sum(1, keepdims=True)


def error_bound(case: Case, dtype) -> float:
    """Return the largest error of an element that roundings alone explain.

    Let u be half a unit in the last place of dtype, and e of float32; A = D^-1/2 max|q| max|k| bounds a logit's terms.
    - A logit is a float32 sum of D products, then multiplied and shifted: it is off by at most (D + 4) e A, and the
      shift by the same; a weight is off by the factor exp of that, say 1 + x.
    - A weight is rounded to dtype (u); the sum of weights, and each output, are float32 sums of Lk terms (Lk e each).
    - Numerator and denominator are both off by these, relative to weights that are all positive, so |out - exact| is at
      most max|v| times 2 x + 2 u + 2 Lk e. The output is rounded to dtype (u max|v|).
    """
    u, e = float(jnp.finfo(dtype).eps) / 2, 2.0**-24
    norms = (np.linalg.norm(x.astype(np.float64), axis=1).max() for x in (case.q, case.k))
    width = case.q.shape[1]
    x = np.expm1(2 * (width + 4) * e * width**-0.5 * np.prod(list(norms)))
    return float(np.abs(case.v).max() * (2 * x + 3 * u + 2 * len(case.k) * e))
