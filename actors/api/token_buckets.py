"""Rates of keys, as token buckets."""

import threading
import time

_NAMES = 1000  # When more buckets than this are remembered, full ones are forgotten.


class TokenBuckets:
    """A token bucket for each name, safe between threads. It is stored as the time when it will be full (GCRA)."""

    def __init__(self, burst_s: float) -> None:
        """Set up full buckets, each of which holds what it gains within `burst_s`."""
        self._burst_s = burst_s
        self._lock = threading.Lock()
        self._full_at: dict[str, float] = {}  # By time.monotonic().

    def take(self, name: str, every_s: float, count: int = 1) -> tuple[float, float]:
        """Take tokens, unless not even one is there. Several at once may overdraw the bucket, which then owes them.

        Args:
            name: The bucket. It holds at least one token.
            every_s: The time in which it gains a token.

        Returns:
            In how many seconds there will be a token, 0 if they were taken; and in how many the bucket will be full.
        """
        with self._lock:
            now = time.monotonic()
            full_at = max(self._full_at.get(name, now), now)
            wait_s = max(0.0, full_at - (now + max(self._burst_s, every_s) - every_s))
            if not wait_s:
                full_at = self._fill(name, full_at + count * every_s)
            return wait_s, full_at - now

    def overdraw(self, name: str, seconds: float) -> float:
        """Take what a bucket gains within `seconds`; return in how many seconds it will no longer owe any of it."""
        with self._lock:
            now = time.monotonic()
            full_at = self._fill(name, max(self._full_at.get(name, now), now) + seconds)
            return max(0.0, full_at - (now + self._burst_s))

    def give_back(self, name: str, seconds: float) -> None:
        """Give back what a bucket gains within `seconds`."""
        with self._lock:
            self._fill(name, self._full_at.get(name, time.monotonic()) - seconds)

    def _fill(self, name: str, full_at: float) -> float:
        self._full_at[name] = full_at
        if len(self._full_at) > _NAMES:
            now = time.monotonic()
            self._full_at = {other: then for other, then in self._full_at.items() if then > now}
        return full_at
