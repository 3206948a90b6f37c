"""Store a video's fragments while it is decoded, for clients that watch; decoding never waits for it."""

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from actors.engine import Fragment
from actors.jobs.errors import LeaseLost, StoreUnavailable
from actors.jobs.tables import Job, StoredFragment
from actors.jobs.work import WorkQueue
from actors.observe.logs import log_event
from wan_tpu.errors import WanTpuError
from wan_tpu.storage.base import Storage

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 100_000_000  # More than a long video has. A worker holds its finished mp4 as well.
_AGAIN_S = 0.5  # Pause before the database is tried again.
_LAST_S = 10.0  # How long a finished job waits until its last fragments are stored.


class Fragments:
    """The fragments of one attempt at a job. They are held until a client watches, and dropped if none does.

    If one can't be stored, the clients that watch are cut off, and the job goes on.
    """

    def __init__(self, queue: WorkQueue, storage: Storage, job: Job) -> None:
        self._queue, self._storage, self._job = queue, storage, job
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._waiting: deque[Fragment] = deque()
        self._latest: tuple[int, int] | None = None  # Run and index of the fragment that came last,
        self._stored: tuple[int, int] | None = None  # and of the one that was stored last.
        self._finishing = self._failed = False
        self._refusal: str | None = None  # Why the next fragment can't follow the others.
        self._storing: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def storing(self) -> AsyncIterator["Fragments"]:
        """Store fragments until the block ends."""
        self._storing = asyncio.create_task(self._store_all())
        try:
            yield self
        finally:
            self._storing.cancel()
            await asyncio.wait([self._storing])

    def add(self, fragment: Fragment) -> None:
        """Take the next fragment, in any thread."""
        if not self._failed:
            self._latest = fragment.run, fragment.index
            self._waiting.append(fragment)
            self._loop.call_soon_threadsafe(self._news.set)

    def refuse(self, reason: str) -> None:
        """Take no more fragments, in any thread, because the next one can't follow the others."""
        self._refusal = reason
        self._loop.call_soon_threadsafe(self._news.set)

    def look(self) -> None:
        """See whether a client watches by now: the job's `watched_at` was read."""
        if self._job.watched_at is not None:
            self._news.set()

    async def finish(self) -> bool:
        """Wait a moment until all fragments are stored; return whether they are, so that clients have all of them."""
        assert self._storing is not None
        self._finishing = True
        self._news.set()
        await asyncio.wait([self._storing], timeout=_LAST_S)
        return self._storing.done() and self._stored is not None and self._stored == self._latest

    async def _store_all(self) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while (fragment := self._take()) is not None:
                    await self._store(fragment)
                if self._finishing:
                    return
        except LeaseLost:
            self._fail()
        except Exception as error:
            known = isinstance(error, WanTpuError)
            fields = {"job": self._job.id, "reason": str(error) if known else type(error).__name__}
            log_event(log, "fragments end", logging.WARNING, **fields)
            self._fail()
            with contextlib.suppress(LeaseLost, StoreUnavailable):
                await asyncio.to_thread(self._queue.abandon_fragments, self._job)

    def _take(self) -> Fragment | None:
        """Return the next fragment to store, if there is one and a client watches."""
        if self._refusal is not None:
            raise WanTpuError(self._refusal)
        while self._waiting and self._latest is not None and self._waiting[0].run != self._latest[0]:
            self._waiting.popleft()  # Its decoder was lost, and another one has begun again.
        if sum(len(fragment.content) for fragment in self._waiting) > MAX_HELD_BYTES:
            raise WanTpuError(f"more than {MAX_HELD_BYTES} bytes wait to be stored")
        return self._waiting.popleft() if self._waiting and self._job.watched_at is not None else None

    async def _store(self, fragment: Fragment) -> None:
        digest = await asyncio.to_thread(lambda: hashlib.sha256(fragment.content).hexdigest())
        place = f"{self._job.id}.{self._job.attempts}.{fragment.run}-{fragment.index:04}"
        stored = StoredFragment(
            name=f"{place}.{digest[:16]}.mp4",
            job=self._job.id,
            attempt=self._job.attempts,
            run=fragment.run,
            number=fragment.index,
            digest=digest,
        )
        await self._insist(self._queue.announce, self._job, [stored.name])
        await asyncio.to_thread(self._storage.write, stored.name, fragment.content)
        await self._insist(self._queue.publish_fragment, self._job, stored)
        self._stored = fragment.run, fragment.index

    def _fail(self) -> None:
        self._failed = True
        self._latest = self._stored = None
        self._waiting.clear()

    async def _insist(self, change: Callable[..., Any], *args: Any) -> None:
        """Change the database, and retry for as long as it is unavailable: the job waits for it as well."""
        while True:
            try:
                return await asyncio.to_thread(change, *args)
            except StoreUnavailable:
                await asyncio.sleep(_AGAIN_S)
