"""The bytes of videos that a worker's process holds in memory, for all of its jobs together."""

import contextlib
import threading
from collections.abc import Iterator

# A quarter of a worker's memory (`cluster.footprints.WORKER`): the rest is for the process itself, for ffmpeg and for
# the copies that libraries make.
LIMIT_BYTES = 512 * 2**20


class HeldBytes:
    """Counts bytes against one limit; any thread may use it.

    What can be read again from a file, such as fragments, is held only within the limit (`take`). What can't, such as a
    video that an engine has just returned, always is (`hold`); no more jobs are claimed while that exceeds the limit.

    Attributes:
        total: The bytes that are held now.
    """

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self.total = 0
        self._limit, self._lock = limit, threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self.total >= self._limit

    def take(self, size: int) -> bool:
        """Count bytes if they are within the limit; return whether they are."""
        with self._lock:
            if self.total + size > self._limit:
                return False
            self.total += size
            return True

    def give_back(self, size: int) -> None:
        """Count bytes as released."""
        with self._lock:
            self.total -= size

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count bytes until the block ends, even beyond the limit."""
        with self._lock:
            self.total += size
        try:
            yield
        finally:
            self.give_back(size)
