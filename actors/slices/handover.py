"""Payloads on their way out of a stage: published in their request's scope, and kept when their slice is drained."""

import asyncio
import contextlib
from collections import deque
from typing import Any

from actors.slices.drain import DrainState
from actors.slices.references import RefHandle, RequestScope

MAX_PUBLISHED = 64  # Payloads remembered for adoption: those of sixteen requests for an encoder are 48.
FETCHED_S = 2.0  # A payload may take this long to reach those who asked for it before it was adopted.


class PublishedPayloads:
    """The latest payloads of one leader that may still wait for their next stage."""

    def __init__(self, drain: DrainState) -> None:
        self._drain = drain
        self._latest: deque[tuple[RequestScope, RefHandle]] = deque(maxlen=MAX_PUBLISHED)

    async def publish(self, scope: RequestScope, ref: Any) -> RefHandle:
        """Put a payload into its request's scope; while the slice is drained, also have it outlive this leader."""
        handle = await scope.put(ref)
        self._latest.append((scope, handle))
        if self._drain.has_begun:
            await scope.adopt(handle)
        return handle

    async def adopt_all(self) -> None:
        """Have every payload that still waits for its next stage outlive this leader."""
        with self._drain.keep_leader():
            adopting = (scope.adopt(handle) for scope, handle in self._latest)
            await asyncio.gather(*adopting, return_exceptions=True)
            await asyncio.sleep(FETCHED_S)


async def fetch_again(scope: RequestScope, handles: list[RefHandle | None], refs: list[Any], waited_s: float) -> list:
    """Return references that hold after a wait for a place on the slice.

    Payloads whose makers have gone meanwhile have other owners by now, so their references are asked for anew.

    Args:
        scope: The request's scope.
        handles: What the references are of.
        refs: The references from before the wait, returned where it was short or the scope doesn't answer.
        waited_s: How long the wait took.
    """
    if waited_s > FETCHED_S / 2:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FETCHED_S):
                return await scope.get(*handles)
    return refs
