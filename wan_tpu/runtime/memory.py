"""Decide whether something fits a device's memory: one rule for plans, layouts and adapters.

The resident memory of all parts must fit together with the largest working memory of any part, since parts run one at a
time.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

GIB = 2**30


class MemoryNeed(NamedTuple):
    """The memory that a part of a model needs on one device."""

    resident_bytes: int  # Memory in use while the part is loaded: its weights, and its programs after their first call.
    working_bytes: int = 0  # Additional memory in use while it runs: arguments, results and temporaries.


def needed_bytes(parts: Iterable[MemoryNeed]) -> int:
    """Return how much memory parts need when they are loaded together."""
    parts = list(parts)
    return sum(part.resident_bytes for part in parts) + max((part.working_bytes for part in parts), default=0)


def fits(parts: Iterable[MemoryNeed], device_bytes: float) -> bool:
    """Return whether a device with this much memory can hold all parts at once, and run each of them."""
    return needed_bytes(parts) <= device_bytes


class DeviceRoom:
    """Works out from `Device.memory_stats()` how much of a device's memory is left for more weights.

    Arrays count as "in use". The further memory that programs need while they run counts as "reserved", which a TPU
    reports separately: of the 31.246 GiB of a v6e, 2.648 were in use, 27.251 reserved, and 1.347 free
    (EnzymeAD/Enzyme-JAX, pull request 2422). The highest use isn't compared with the limit, because it never falls,
    even after weights have been released.
    """

    def __init__(self) -> None:
        self._highest = 0  # The highest use seen so far, in bytes.
        self._at_change = 0  # Use when weights were last loaded or released.
        self._work = 0  # The most that requests' arrays have needed in addition to the weights.

    def bytes_left(self, memory: Mapping[str, int]) -> int:
        """Return how many bytes weights may still take, if the most that requests have needed so far stays free."""
        used, highest = memory["bytes_in_use"], memory["peak_bytes_in_use"]
        if highest > self._highest:
            self._work = max(self._work, highest - (self._at_change or used))
            self._highest = highest
        reserved = max(memory.get("peak_bytes_reserved", 0), memory.get("bytes_reserved", 0))
        return memory["bytes_limit"] - used - self._work - reserved

    def note_change(self, memory: Mapping[str, int]) -> None:
        """Record that weights were loaded or released; memory that this took isn't counted as a request's need."""
        self._at_change = memory["bytes_in_use"]
        self._highest = max(self._highest, memory["peak_bytes_in_use"])


def read_refusal(message: str) -> tuple[int | None, int | None]:
    """Read from the TPU compiler's refusal how much memory a program needs on a device, and how much there is.

    In "... the total memory required for HLO temporaries (64.00G) exceeds available HBM (31.24G)", the figure includes
    arguments and results. "Used 20.1M of 16.0M vmem" is about a kernel's VMEM, not HBM.
    """
    match = re.search(r"\(([\d.]+)([GMK])\) exceeds available HBM \(([\d.]+)([GMK])\)", message)
    if not match:
        return None, None
    unit = {"G": GIB, "M": 2**20, "K": 2**10}
    return int(float(match[1]) * unit[match[2]]), int(float(match[3]) * unit[match[4]])
