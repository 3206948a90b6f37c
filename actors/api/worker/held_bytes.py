"""The bytes of videos that a worker's process holds in memory, for all of its jobs together."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

# A quarter of a worker's memory (`cluster.footprints.WORKER`): the rest is for the process itself, for ffmpeg and for
# the copies that libraries make.
LIMIT_BYTES = 512 * 2**20
_LOOK_S = 0.2  # Between two looks whether there is room.


class HeldBytes:
    """Counts bytes against one limit. While they exceed it, no more jobs are claimed, and no more inputs are read."""

    def __init__(self) -> None:
        self.total = 0  # The bytes that are held now.
        self._lock, self._turns = threading.Lock(), asyncio.Lock()

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached. While a job waits for room, others are claimed: most have no inputs."""
        return self.total >= LIMIT_BYTES

    @contextlib.asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Wait until there is room for bytes that will be read, and count them until the block ends.

        Jobs wait in turn, so that a large one isn't starved by small ones. What exceeds the limit by itself is held
        alone. A job in the block must not reserve any more: two of them could wait for each other.
        """
        with contextlib.ExitStack() as held:
            if size:
                async with self._turns:
                    while self.total and self.total + size > LIMIT_BYTES:
                        await asyncio.sleep(_LOOK_S)
                    held.enter_context(self.hold(size))
            yield

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count bytes that are there already until the block ends, in any thread."""
        with self._lock:
            self.total += size
        try:
            yield
        finally:
            with self._lock:
                self.total -= size
