"""The bytes of videos that a worker's process holds in memory, for all of its jobs together."""

import contextlib
import threading
from collections.abc import Iterator

# A quarter of a worker's memory (`cluster.footprints.WORKER`): the rest is for the process itself, for ffmpeg and for
# the copies that libraries make.
LIMIT_BYTES = 512 * 2**20


class HeldBytes:
    """Counts bytes against one limit; any thread may use it. No more jobs are claimed while they exceed it."""

    def __init__(self) -> None:
        self.total = 0  # The bytes that are held now.
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self.total >= LIMIT_BYTES

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count bytes until the block ends."""
        with self._lock:
            self.total += size
        try:
            yield
        finally:
            with self._lock:
                self.total -= size
