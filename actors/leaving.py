"""When a replica's slice is taken away, or was lost, once that is known."""

import time

from actors.errors import StageMoved

HAND_OVER_S = 5.0  # kept free before a drained slice is taken away, to copy a state out and write it


class Leaving:
    """Nothing is known of it at first."""

    def __init__(self, name: str) -> None:
        """name: the replica's, for messages."""
        self._name = name
        self._by: float | None = None  # of time.monotonic()

    @property
    def known(self) -> bool:
        """Whether nothing new is taken any more."""
        return self._by is not None

    def begin(self, left_s: float) -> None:
        """Note that the slice is taken away after so many seconds."""
        self._by = time.monotonic() + left_s

    def check(self) -> None:
        """Raise `StageMoved` when nothing new is taken any more."""
        if self.known:
            raise self.moved()

    def moved(self) -> StageMoved:
        """Return what is raised in what has not begun."""
        return StageMoved(f"{self._name} is leaving; another replica takes what comes")

    def must_go(self, needed_s: float) -> bool:
        """Whether the slice is taken away before that much more work would be done."""
        return self._by is not None and time.monotonic() + needed_s + HAND_OVER_S > self._by
