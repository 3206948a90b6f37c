"""Sounds at other rates, as torchaudio computes them. Imports no torch."""

import math
from fractions import Fraction

import numpy as np

from wan_tpu.tail import Tail

_ZEROS, _ROLLOFF = 6, 0.99  # Zero crossings of the filter, and where it ends; torchaudio's.


def count_resampled(samples: int, rate: int, target: int) -> int:
    """Return how many samples `resample` makes."""
    ratio = Fraction(target, rate)
    return -(-ratio.numerator * samples // ratio.denominator)


def resample(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Return samples, float32 [channels, samples], at another rate, as torchaudio.transforms.Resample computes them.

    The filter is a sinc with a window of Hann's: torchaudio/functional/functional.py, `_get_sinc_resample_kernel`.
    """
    ratio = Fraction(target, rate)
    new, old = ratio.numerator, ratio.denominator
    if new == old:
        return np.ascontiguousarray(samples, np.float32)
    base = min(old, new) * _ROLLOFF
    width = math.ceil(_ZEROS * old / base)
    offsets = np.arange(-width, width + old, dtype=np.float64) / old
    phases = (-np.arange(new)[:, None] / new).astype(np.float32)  # Rounded, as torchaudio's are.
    times = np.clip((phases + offsets) * base, -_ZEROS, _ZEROS)
    window = np.cos(times * np.pi / _ZEROS / 2) ** 2
    kernel = (np.sinc(times) * window * (base / old)).astype(np.float32)
    count = count_resampled(samples.shape[1], rate, target)
    groups = -(-count // new)
    padded = np.pad(samples, ((0, 0), (width, width + groups * old))).astype(np.float32)
    views = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[1], axis=1)[:, ::old][:, :groups]
    # Padding, of which some is at the end only to fill the last group.
    return np.ascontiguousarray((views @ kernel.T).reshape(len(samples), -1)[:, :count])


def read_soundtrack(track: Tail, rate: int, count: int) -> np.ndarray:
    """Return a sound in stereo at another rate, float32 [2, count]; what is missing is silence."""
    assert track.sound is not None
    stereo = resample(np.broadcast_to(track.sound, (2, track.samples)), track.rate, rate)
    return np.pad(stereo[:, :count], ((0, 0), (0, max(0, count - stereo.shape[1]))))
