"""Store pictures of a video while it is denoised. Only the newest is wanted, and a job is as good without."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator

from actors.api.variants import VARIANTS
from actors.api.worker.context import WorkerContext
from actors.engine import PreviewPicture
from actors.jobs.errors import LeaseLost, StoreUnavailable
from actors.jobs.tables import Job
from actors.observe.logs import log_event
from wan_tpu.storage.base import StorageError

log = logging.getLogger(__name__)


class UnfinishedPictures:
    """Stores the newest picture of a job's unfinished video; one that comes meanwhile takes the place of the next."""

    def __init__(self, context: WorkerContext, job: Job) -> None:
        """Set up in the event loop, without storing anything."""
        self._context, self._job = context, job
        self._loop = asyncio.get_running_loop()
        self._next: PreviewPicture | None = None
        self._news = asyncio.Event()
        self.unwritten: set[str] = set()  # Names of announced pictures that may still be written.

    def add(self, picture: PreviewPicture) -> None:
        """Take a picture, in any thread."""
        self._loop.call_soon_threadsafe(self._take, picture)

    def _take(self, picture: PreviewPicture) -> None:
        self._next = picture
        self._news.set()

    @contextlib.asynccontextmanager
    async def storing(self) -> AsyncIterator[None]:
        """Store pictures until the block ends, which doesn't wait for them."""
        storing = asyncio.create_task(self._store_all())
        try:
            yield
        finally:
            storing.cancel()
            await asyncio.wait([storing])

    async def _store_all(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            picture, self._next = self._next, None
            if picture is None:
                continue
            try:
                await asyncio.to_thread(self._store, picture)
            except (LeaseLost, StoreUnavailable, StorageError) as error:  # The next picture may have more luck.
                log_event(log, "no preview", logging.WARNING, job=self._job.id, reason=str(error))
            except Exception:
                log.exception("no preview", extra={"fields": {"job": self._job.id}})

    def _store(self, picture: PreviewPicture) -> None:
        job, digest = self._job, hashlib.sha256(picture.jpeg).hexdigest()[:16]
        parts = [job.id, str(job.attempts), f"step-{picture.step}", digest, VARIANTS["preview"][1]]
        name = ".".join(parts)
        self._context.queue.announce(job, {name: len(picture.jpeg)})
        self.unwritten.add(name)  # Until then even if nobody waits any more, since a thread can't be cancelled.
        self._context.storage.write(name, picture.jpeg)
        self.unwritten.discard(name)
        self._context.queue.show_preview(job, name)
