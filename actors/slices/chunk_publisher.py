"""Chunks of a video that is denoised piece by piece (Helios), on their way from the denoiser to the decoder.

The denoiser stores the latents of each chunk in the request's scope, where the decoder waits for them.
"""

import asyncio
from collections import deque

from actors.slices.async_slice import AsyncSlice
from actors.slices.handover import PublishedPayloads
from actors.slices.messages import ChunkDenoised, SliceRequest

PUBLISHED_S = 0.5  # The longest that a slice waits for a chunk to be published, since other requests need the slice.


class ChunkPublisher:
    """Publishes the chunks of one request in order, while its slice goes on computing."""

    def __init__(self, slice_: AsyncSlice, published: PublishedPayloads, request: SliceRequest) -> None:
        self._slice, self._published, self._request = slice_, published, request
        self._publishing: deque[asyncio.Task[ChunkDenoised]] = deque()

    async def add(self, host_key: str, chunk: int) -> None:
        """Copy a denoised chunk from the hosts, and publish it after the previous ones.

        Return when that is done, or after `PUBLISHED_S`: the slice goes on even if the scope doesn't answer.
        """
        _, ref = await self._slice.save("copy_chunk", host_key, chunk)
        before = self._publishing[-1] if self._publishing else None

        async def publish() -> ChunkDenoised:
            if before is not None:
                await before
            await self._published.publish(self._request.scope, ref, chunk=chunk)
            return ChunkDenoised(chunk)

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
        for task in self._publishing:
            if not task.cancel() and not task.cancelled():
                task.exception()  # Marks the error as retrieved; the first task's error was raised already.
        self._publishing.clear()
