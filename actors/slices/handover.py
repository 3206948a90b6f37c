"""Hand payloads over to the next stage: publish them in the request's scope, and save them when a slice is drained."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from typing import Any

from actors.slices.drain import DrainState
from actors.slices.messages import ChunkDenoised
from actors.slices.references import RefHandle, RequestScope

MAX_PUBLISHED = 64  # Payloads that are remembered for adoption. Sixteen requests at an encoder have 48.
FETCHED_S = 2.0  # Time for a payload to reach stages that asked for it just before it was adopted.
PUBLISHED_S = 0.5  # The longest that a slice waits for a chunk to be published, since other requests need the slice.


class PublishedPayloads:
    """The latest payloads of one leader that their next stage may not have fetched yet."""

    def __init__(self, drain: DrainState) -> None:
        self._drain = drain
        self._latest: deque[tuple[RequestScope, RefHandle]] = deque(maxlen=MAX_PUBLISHED)

    async def publish(self, scope: RequestScope, ref: Any) -> RefHandle:
        """Put a payload into its request's scope. During a drain, also copy it so that it outlives this leader."""
        handle = await scope.put(ref)
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


class ChunksPublished:
    """Publishes the chunks of one request in order, while its slice goes on computing."""

    def __init__(self) -> None:
        self._publishing: deque[asyncio.Task[ChunkDenoised]] = deque()

    async def add(self, work: Coroutine[Any, Any, ChunkDenoised]) -> None:
        """Publish a chunk after the previous ones. Return when that is done, or after `PUBLISHED_S`."""
        before = self._publishing[-1] if self._publishing else None

        async def publish() -> ChunkDenoised:
            with contextlib.closing(work):
                if before is not None:
                    await before
                return await work

        self._publishing.append(asyncio.create_task(publish()))
        await asyncio.wait([self._publishing[-1]], timeout=PUBLISHED_S)

    def take(self) -> list[ChunkDenoised]:
        """Return the chunks published since the last call; raise the error of one that couldn't be published."""
        chunks = []
        while self._publishing and self._publishing[0].done():
            chunks.append(self._publishing.popleft().result())
        return chunks

    async def take_all(self) -> list[ChunkDenoised]:
        """Wait until all chunks are published, and return the remaining ones as `take` does."""
        if self._publishing:
            await asyncio.wait(self._publishing)
        return self.take()

    def close(self) -> None:
        """Stop publishing."""
        for task in self._publishing:
            if not task.cancel() and not task.cancelled():
                task.exception()  # Marks the error as retrieved; the first task's error was raised already.
        self._publishing.clear()


async def fetch_again(scope: RequestScope, handles: list[RefHandle | None], refs: list[Any], waited_s: float) -> list:
    """Return references that are still valid after a wait for a place on the slice.

    If the process that made a payload has ended meanwhile, another process owns the payload now, and the old reference
    is of no use. So after a long wait the references are requested again.

    Args:
        scope: The request's scope.
        handles: The handles of the payloads.
        refs: The references from before the wait, returned if it was short or if the scope doesn't answer.
        waited_s: How long the wait took.
    """
    if waited_s > FETCHED_S / 2:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FETCHED_S):
                return await scope.get(*handles)
    return refs
