"""`torch.randn` on several cores, bit for bit: its generator, the Mersenne Twister MT19937, is jumped to each part.

The generator's state is linear over GF(2). Its state J numbers later is a sum of the next 19,937 states, whose
coefficients are those of t^J modulo the characteristic polynomial (Matsumoto and Nishimura 1998, ACM TOMACS 8:1;
Haramoto et al. 2008, INFORMS J. Computing 20:3). Polynomials over GF(2) are Python's integers here, bit k for t^k.
"""

import functools
import operator
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

_WORDS, _MIDDLE, _TWIST = 624, 397, 0x9908B0DF
_LOW_BITS = 31  # Of a state's first word, which don't belong to the state.
_DEGREE = 32 * _WORDS - _LOW_BITS
_PART = 1 << 25  # Numbers that are worth a thread: 0.2 s. A jump takes 0.02 s, one after the other.
_AT_ONCE = 16  # torch draws so many together. All parts but the last are multiples of it.

# The first fields of a CPU generator's state (`CPUGeneratorImplStateLegacy` in ATen/CPUGeneratorImpl.cpp).
_STATE = np.dtype([("seed", "u8"), ("left", "i4"), ("seeded", "i4"), ("next", "u8"), ("words", "u8", _WORDS)])


def randn(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Return `torch.randn(shape, generator=generator, dtype=dtype)`, drawn by all cores if it is large.

    Unlike torch's, it leaves the state of `generator` undefined.
    """
    numbers = torch.empty(tuple(shape), dtype=dtype)
    threads = min(len(os.sched_getaffinity(0)), numbers.numel() // _PART) or 1
    length = numbers.numel() // threads // _AT_ONCE * _AT_ONCE
    parts = numbers.view(-1).tensor_split([length * k for k in range(1, threads)])
    with ThreadPoolExecutor(threads, "noise") as pool:
        drawing: list[Future[torch.Tensor]] = []
        for part in parts:
            if drawing:
                _skip(generator, length)
            drawing.append(pool.submit(part.normal_, generator=generator.clone_state()))
    for drawn in drawing:
        drawn.result()
    return numbers


def _skip(generator: torch.Generator, count: int) -> None:
    """Advance a generator by `count` 32-bit numbers, at least 624."""
    data = generator.get_state()
    state = data.numpy()[: _STATE.itemsize].view(_STATE)
    drawn = state["next"][0] if state["left"][0] > 1 else _WORDS  # Of the current words. A new generator has `next` 0.
    state["words"] = _jump(state["words"][0].astype(np.uint32), count + int(drawn) - _WORDS)
    state["left"], state["next"] = 1, 0  # All words are drawn: the next call makes new ones.
    generator.set_state(data)


def _jump(words: np.ndarray, count: int) -> np.ndarray:
    """Return the state [624] `count` numbers after a state."""
    states = np.lib.stride_tricks.sliding_window_view(_continue(words, _DEGREE), _WORDS)
    digits = np.frombuffer(f"{_power(count):b}".encode(), np.uint8)[::-1]
    added: list[np.ndarray] = list(states[np.flatnonzero(digits == ord("1"))])
    return functools.reduce(np.bitwise_xor, added)


def _continue(words: np.ndarray, count: int) -> np.ndarray:
    """Return a state's words and the next `count`."""
    words = np.concatenate([words, np.zeros(count, np.uint32)])
    high, step = np.uint32(1 << _LOW_BITS), _WORDS - _MIDDLE
    for k in range(0, count, step):
        n = min(step, count - k)
        mixed = (words[k : k + n] & high) | (words[k + 1 : k + n + 1] & ~high)
        twisted = (mixed >> 1) ^ (mixed & 1) * np.uint32(_TWIST)
        words[k + _WORDS : k + _WORDS + n] = words[k + _MIDDLE : k + _MIDDLE + n] ^ twisted
    return words


@functools.lru_cache(8)
def _power(exponent: int) -> int:
    """Return t^exponent modulo the characteristic polynomial."""
    power = 1
    for bit in f"{exponent:b}":
        power = int(f"{power:b}", 4)  # The square: a zero between each two digits.
        power = _reduce(power << 1 if bit == "1" else power)
    return power


def _reduce(polynomial: int) -> int:
    lower = [k for k in range(_DEGREE) if _characteristic() >> k & 1]
    while high := polynomial >> _DEGREE:
        polynomial ^= high << _DEGREE
        for k in lower:
            polynomial ^= high << k
    return polynomial


@functools.cache
def _characteristic() -> int:
    """Return the characteristic polynomial, by the formula of Matsumoto and Nishimura's appendix."""
    high_bits = 32 - _LOW_BITS
    first, second = 1 << _WORDS | 1 << _MIDDLE, 1 << (_WORDS - 1) | 1 << (_MIDDLE - 1)
    total = _product(*[first] * high_bits, *[second] * _LOW_BITS)
    for k in range(32):
        if _TWIST >> k & 1:
            rest = max(_LOW_BITS - 1 - k, 0)
            total ^= _product(*[first] * min(31 - k, high_bits), *[second] * rest)
    return total


def _product(*factors: int) -> int:
    product = 1
    for factor in factors:
        terms = [product << k for k in range(_WORDS + 1) if factor >> k & 1]
        product = functools.reduce(operator.xor, terms)
    return product
