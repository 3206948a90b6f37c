"""The drain of a slice that will be taken away, or that was lost, and the work for which its leader must stay alive."""

import contextlib
import time
from collections.abc import Iterator

from actors.errors import StageMoved


class DrainState:
    """Whether one slice is being drained, and how long it has left."""

    def __init__(self, name: str, hand_over_s: float) -> None:
        """Start without a drain; at the end of one, `hand_over_s` are reserved to copy a state out and store it."""
        self._name, self._hand_over_s = name, hand_over_s
        self._deadline: float | None = None  # On the clock of `time.monotonic()`.
        self._keepers = 0  # The number of blocks that keep the leader alive.

    @property
    def has_begun(self) -> bool:
        """Whether new requests are refused."""
        return self._deadline is not None

    @property
    def is_over(self) -> bool:
        """Whether the slice is being drained and nothing runs on it any more."""
        return self.has_begun and not self._keepers

    def begin(self, left_s: float) -> None:
        """Note that the slice will be taken away in `left_s` seconds, or earlier if a previous call said so."""
        deadline = time.monotonic() + left_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    @contextlib.contextmanager
    def keep_leader(self) -> Iterator[None]:
        """Keep the leader alive until the block ends, even when drained."""
        self._keepers += 1
        try:
            yield
        finally:
            self._keepers -= 1

    def check(self) -> None:
        """Raise `StageMoved` when new requests are refused."""
        if self.has_begun:
            raise self.build_refusal()

    def build_refusal(self) -> StageMoved:
        """Return the error for a request that hasn't begun on this slice."""
        return StageMoved(f"{self._name} is draining and accepts no more requests; another replica takes this one")

    def is_too_late_for(self, needed_s: float) -> bool:
        """Return whether the slice will be taken away before `needed_s` more seconds of work are done."""
        return self._deadline is not None and time.monotonic() + needed_s + self._hand_over_s > self._deadline
