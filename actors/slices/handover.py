"""Hand payloads over to the next stage: publish them in the request's scope, and save them when a slice is drained."""

import asyncio
import contextlib
from collections import deque
from typing import Any

from actors.slices.drain import DrainState
from actors.slices.references import RefHandle, RequestScope

MAX_PUBLISHED = 64  # Payloads that are remembered for adoption. Sixteen requests at an encoder have 48.
FETCHED_S = 2.0  # Time for a payload to reach stages that asked for it just before it was adopted.


class PublishedPayloads:
    """The latest payloads of one leader that their next stage may not have fetched yet."""

    def __init__(self, drain: DrainState) -> None:
        self._drain = drain
        self._latest: deque[tuple[RequestScope, RefHandle]] = deque(maxlen=MAX_PUBLISHED)

    async def publish(self, scope: RequestScope, ref: Any, *, chunk: int | None = None) -> RefHandle:
        """Put a payload, which may be a chunk's latents, into its request's scope.

        During a drain, also copy it so that it outlives this leader.
        """
        handle = await (scope.put(ref) if chunk is None else scope.put_chunk(chunk, ref))
        self._latest.append((scope, handle))
        if self._drain.has_begun:
            await scope.adopt(handle)
        return handle

    async def adopt_all(self) -> None:
        """Copy every payload that its next stage hasn't fetched, so that it outlives this leader."""
        with self._drain.keep_leader():
            adopting = (scope.adopt(handle) for scope, handle in self._latest)
            await asyncio.gather(*adopting, return_exceptions=True)
            await asyncio.sleep(FETCHED_S)


async def fetch_again(scope: RequestScope, handles: list[RefHandle | None], refs: list[Any], waited_s: float) -> list:
    """Return references that are still valid after a wait for a place on the slice.

    If the process that made a payload has ended meanwhile, another process owns the payload now, and the old reference
    is of no use. So after a long wait the references are requested again.

    Args:
        refs: The references from before the wait, returned if it was short or if the scope doesn't answer.
    """
    if waited_s > FETCHED_S / 2:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FETCHED_S):
                return await scope.get(*handles)
    return refs
