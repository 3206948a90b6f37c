"""How often a request is tried again without progress: how long it waits in between, and when it is given up."""

import asyncio
import logging

from actors.errors import MachineFailed, RequestFailed, StageFailed, StageMoved, StageQueuedTooLong
from actors.reliability import ReliabilitySettings
from actors.retrying import back_off

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 15.0  # Before a stage is tried again.
_MOVE_S = 1.0  # Before a request is sent on to another slice.


class RetryBudget:
    def __init__(self, key: str, limits: ReliabilitySettings) -> None:
        self._key, self._limits = key, limits
        self._begin()
        self._done: set[tuple[str, int | None]] = set()

    def note_progress(self, stage: str, step: int | None) -> None:
        """Reset the counts if the request gets this far for the first time."""
        if (stage, step) not in self._done:
            self._done.add((stage, step))
            self._begin()

    def _begin(self) -> None:
        self._attempts = self._moves = 0  # Since the last progress.
        self._waits_s = back_off(LONGEST_WAIT_S)
        next(self._waits_s)  # A slice needs longer than a database: the first wait is the second of those.

    async def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt; raise `RequestFailed` after too many without progress."""
        if isinstance(error, StageQueuedTooLong):
            return
        if isinstance(error, StageMoved) and self._moves < self._limits.move_attempts:
            self._moves += 1
            log.info("%s: %s", self._key, error)
            await asyncio.sleep(_MOVE_S)
            return
        self._attempts += 1
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if self._attempts >= self._limits.stage_attempts:
            # The request failed on every slice that tried it, so the request is to blame.
            if isinstance(error, StageFailed) and not isinstance(error, MachineFailed):
                raise RequestFailed(f"failed {self._attempts} times; the last: {reason}", "error")
            raise RequestFailed(f"given up after {self._attempts} attempts at one stage; the last: {reason}", "lost")
        log.warning("%s: %s; attempt %d", self._key, reason, self._attempts + 1)
        await asyncio.sleep(next(self._waits_s))
