"""How much of a device's memory is left for more weights."""

from collections.abc import Mapping


class DeviceRoom:
    """Works that out from `Device.memory_stats()`.

    Arrays are in use; what programs need beside them while they run is reserved, which on a TPU is counted apart: of
    31.246 GiB of a v6e 2.648 were in use, 27.251 reserved, and 1.347 free (EnzymeAD/Enzyme-JAX, pull request 2422).
    The highest use isn't what is compared with the limit: it never falls, also where weights have been let go of.
    """

    def __init__(self) -> None:
        self._highest = 0  # Use that has been seen, in bytes.
        self._at_change = 0  # Use when weights last came or went.
        self._work = 0  # The most that requests' arrays have taken beside the weights.

    def bytes_left(self, memory: Mapping[str, int]) -> int:
        """Return the bytes that weights may take, so that requests still find what they have needed at most so far."""
        used, highest = memory["bytes_in_use"], memory["peak_bytes_in_use"]
        if highest > self._highest:
            self._work = max(self._work, highest - (self._at_change or used))
            self._highest = highest
        reserved = max(memory.get("peak_bytes_reserved", 0), memory.get("bytes_reserved", 0))
        return memory["bytes_limit"] - used - self._work - reserved

    def note_change(self, memory: Mapping[str, int]) -> None:
        """Take notice that weights have come or gone; what that itself took isn't a request's need."""
        self._at_change = memory["bytes_in_use"]
        self._highest = max(self._highest, memory["peak_bytes_in_use"])
