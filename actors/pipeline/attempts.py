"""The attempts at a request: how long it waits before the next one, and when it is given up."""

import asyncio
import logging

from actors.errors import MachineFailed, RequestFailed, StageFailed, StageMoved, StageQueuedTooLong
from actors.reliability import ReliabilitySettings

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0  # Waits before a stage is tried again grow from the first to the longest.


class Attempts:
    """Counts a request's attempts without progress."""

    def __init__(self, key: str, limits: ReliabilitySettings) -> None:
        """Begin to count.

        Args:
            key: The caller's name for the request.
            limits: How many attempts and moves are allowed.
        """
        self._key, self._limits = key, limits
        self._attempts = self._moves = 0  # Both count since the last progress.
        self._done: set[tuple[str, int | None]] = set()

    def note_progress(self, stage: str, step: int | None) -> None:
        """Reset the counts if the request gets this far for the first time."""
        if (stage, step) not in self._done:
            self._done.add((stage, step))
            self._attempts = self._moves = 0

    async def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt; raise `RequestFailed` after too many without progress."""
        if isinstance(error, StageQueuedTooLong):
            return
        if isinstance(error, StageMoved) and self._moves < self._limits.move_attempts:
            self._moves += 1
            log.info("%s: %s", self._key, error)
            await asyncio.sleep(2 * FIRST_WAIT_S)
            return
        self._attempts += 1
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if self._attempts >= self._limits.stage_attempts:
            # The request failed on every slice that tried it, so the request is to blame.
            if isinstance(error, StageFailed) and not isinstance(error, MachineFailed):
                raise RequestFailed(f"failed {self._attempts} times; the last: {reason}", "error")
            raise RequestFailed(f"given up after {self._attempts} attempts at one stage; the last: {reason}", "lost")
        log.warning("%s: %s; attempt %d", self._key, reason, self._attempts + 1)
        await asyncio.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**self._attempts))
