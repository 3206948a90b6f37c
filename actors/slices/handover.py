"""Payloads on their way out of a stage: published in their request's scope, and kept when their slice is drained."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from typing import Any

from actors.slices.drain import DrainState
from actors.slices.messages import ChunkDenoised
from actors.slices.references import RefHandle, RequestScope

MAX_PUBLISHED = 64  # Payloads remembered for adoption: those of sixteen requests for an encoder are 48.
FETCHED_S = 2.0  # A payload may take this long to reach those who asked for it before it was adopted.
PUBLISHED_S = 0.5  # A slice waits this long until a chunk is published, and no longer, because others wait for it.


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


class ChunksPublished:
    """The chunks of one request that are being published, in order, while its slice goes on."""

    def __init__(self) -> None:
        self._publishing: deque[asyncio.Task[ChunkDenoised]] = deque()

    async def add(self, work: Coroutine[Any, Any, ChunkDenoised]) -> None:
        """Publish a chunk after those before it; return as soon as it is, or after a moment."""
        before = self._publishing[-1] if self._publishing else None

        async def publish() -> ChunkDenoised:
            with contextlib.closing(work):
                if before is not None:
                    await before
                return await work

        self._publishing.append(asyncio.create_task(publish()))
        await asyncio.wait([self._publishing[-1]], timeout=PUBLISHED_S)

    def take(self) -> list[ChunkDenoised]:
        """Return the chunks that are published by now, each once; raises the error of one that can't be."""
        chunks = []
        while self._publishing and self._publishing[0].done():
            chunks.append(self._publishing.popleft().result())
        return chunks

    async def take_all(self) -> list[ChunkDenoised]:
        """Wait for the remaining chunks; as `take`."""
        if self._publishing:
            await asyncio.wait(self._publishing)
        return self.take()

    def close(self) -> None:
        """Publish nothing any more."""
        for task in self._publishing:
            if not task.cancel() and not task.cancelled():
                task.exception()  # Marks it as retrieved: the error of the first one that failed was raised.
        self._publishing.clear()


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
