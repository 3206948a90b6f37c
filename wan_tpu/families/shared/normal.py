"""Draw torch's normal numbers in several threads, with the same result as in one.

torch's generator for CPUs is MT19937, and a tensor of at least 16 normal numbers takes one of its numbers for each. Its
words are a linear recurrence over GF(2). So the words that follow after n numbers are sums of the next 19,937, by the
bits of x^n modulo the recurrence's polynomial (Haramoto et al., Efficient jump ahead for F2-linear random number
generators, 2008). Polynomials are integers here, whose bit i is the coefficient of x^i.
"""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

_THREADS = 16
_PART_BITS = 25  # A thread draws so many numbers (2^25) at a time, which takes a fifth of a second.
_WORDS, _MIDDLE, _DEGREE = 624, 397, 19937
_MATRIX = 0x9908B0DF  # The recurrence's lowest row.
_STATE = slice(24, 24 + 8 * _WORDS)  # Where the words are in the bytes of a generator's state, each as a uint64.


def draw_normal(
    shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype, part_bits: int = _PART_BITS
) -> torch.Tensor:
    """Return what `torch.randn` does, of a generator for CPUs, which is of no use afterwards.

    Args:
        shape: The shape.
        generator: The generator.
        dtype: float32, or one that rounds it; float64 takes more of the generator's numbers.
        part_bits: Each thread draws 2^`part_bits` numbers at a time, at least 1024.
    """
    values = torch.empty(tuple(shape), dtype=dtype)
    numbers, size = values.view(-1), 1 << part_bits
    count = max(1, len(numbers) // size)  # The last part has what is left, too, so that it is never too short.
    parts = numbers.split([size] * (count - 1) + [len(numbers) - size * (count - 1)])
    with ThreadPoolExecutor(_THREADS, "noise") as pool:
        drawn = []
        for part in parts:
            state = generator.get_state()
            drawn.append(pool.submit(part.normal_, generator=generator))
            if part is not parts[-1]:
                generator = torch.Generator("cpu").set_state(_jump(state, part_bits))
        for each in drawn:
            each.result()
    return values


def _jump(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a generator's state after 2^`bits` more numbers."""
    jumped = state.clone()
    words = jumped[_STATE].numpy().view(np.uint64)
    sequence = np.concatenate([words.astype(np.uint32), np.zeros(_DEGREE, np.uint32)])
    step = _WORDS - _MIDDLE  # So many words follow from those that are known.
    for start in range(0, _DEGREE, step):
        stop = min(start + step, _DEGREE)
        high, low = sequence[start:stop] & 0x80000000, sequence[start + 1 : stop + 1] & 0x7FFFFFFF
        mixed = ((high | low) >> 1) ^ np.where(low & 1, np.uint32(_MATRIX), np.uint32(0))
        sequence[start + _WORDS : stop + _WORDS] = sequence[start + _MIDDLE : stop + _MIDDLE] ^ mixed
    windows = np.lib.stride_tricks.sliding_window_view(sequence, _WORDS)
    words[:] = functools.reduce(np.bitwise_xor, list(windows[_find_terms(bits)]))
    return jumped


@functools.cache
def _find_terms(bits: int) -> np.ndarray:
    """Return the exponents of x^(2^`bits`) modulo the recurrence's polynomial."""
    polynomial = _make_polynomial()
    below = [exponent for exponent in range(_DEGREE) if polynomial >> exponent & 1]
    power = 2  # x
    for _ in range(bits):
        power = int("0".join(f"{power:b}"), 2)  # Its square.
        while high := power >> _DEGREE:
            power ^= high << _DEGREE
            for exponent in below:
                power ^= high << exponent
    return np.flatnonzero([power >> exponent & 1 for exponent in range(_DEGREE)])


def _make_polynomial() -> int:
    """Return the recurrence's polynomial (Matsumoto and Nishimura, Mersenne Twister, 1998, appendix A)."""
    first = 1 << _WORDS | 1 << _MIDDLE
    polynomial = first
    for bit in range(31):
        polynomial = polynomial << _WORDS - 1 ^ polynomial << _MIDDLE - 1 ^ first * (_MATRIX >> bit & 1)
    return polynomial ^ _MATRIX >> 31
