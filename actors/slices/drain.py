"""When a slice is taken away, or was lost, once that is known; and what keeps its leader until then."""

import contextlib
import time
from collections.abc import Iterator

from actors.errors import StageMoved

HAND_OVER_S = 5.0  # kept free before a drained slice is taken away, to copy a state out and write it


class DrainState:
    """Of one slice. Not begun at first."""

    def __init__(self, name: str) -> None:
        """name: the leader's, for messages."""
        self._name = name
        self._by: float | None = None  # of time.monotonic()
        self._staying = 0

    @property
    def begun(self) -> bool:
        """Whether no new request is taken any more."""
        return self._by is not None

    @property
    def is_over(self) -> bool:
        """Whether the slice is drained, and nothing runs on it any more."""
        return self.begun and not self._staying

    def begin(self, left_s: float) -> None:
        """Note that the slice is taken away after so many seconds; again where it is sooner than was known."""
        by = time.monotonic() + left_s
        self._by = by if self._by is None else min(by, self._by)

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """Have the leader not end, though drained, before the block does."""
        self._staying += 1
        try:
            yield
        finally:
            self._staying -= 1

    def check(self) -> None:
        """Raise `StageMoved` when no new request is taken any more."""
        if self.begun:
            raise self.moved()

    def moved(self) -> StageMoved:
        """Return what is raised in a request that has not begun."""
        return StageMoved(f"{self._name} is draining; another replica takes what comes")

    def too_late_for(self, needed_s: float) -> bool:
        """Whether the slice is taken away before that much more work would be done."""
        return self._by is not None and time.monotonic() + needed_s + HAND_OVER_S > self._by
