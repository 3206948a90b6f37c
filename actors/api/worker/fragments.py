"""Store a video's fragments while it is made, for clients that watch; making it never waits for that."""

import asyncio
import contextlib
import hashlib
import io
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from actors.api.worker.context import WorkerContext
from actors.api.worker.job_files import JobFiles
from actors.api.worker.segments import list_parts
from actors.engine import Fragment
from actors.jobs.errors import LeaseLost, StoreUnavailable
from actors.jobs.tables import Job, StoredFragment
from actors.observe.logs import log_event
from wan_tpu.errors import WanTpuError
from wan_tpu.media.continued import ContinuedVideo, NotContinued

log = logging.getLogger(__name__)

AT_ONCE = 4  # Fragments that are written to storage at a time, each in a thread.
_WATCHED_S = 45.0  # A client watches for this long after an ingress has said so. Ingresses repeat it every 10 s.
# How long a finished job waits for its last fragments: as long as one is stored within the first time, and in total.
_HEADWAY_S, _LONGEST_S = 10.0, 120.0


class _Waiting(NamedTuple):
    """A fragment that waits to be stored: its part's index, its place in a run of the engine, and in the file."""

    part: int
    run: int
    number: int
    start: int
    size: int


class Fragments:
    """The fragments of the video that an attempt makes, numbered over all of its parts.

    The parts are the video that is continued, if any, and the segments. While nobody watches, nothing is stored. The
    fragments of the segment that is being made wait in a file on this machine; those of finished parts come from the
    parts' own files, byte for byte as they came while they were made. What an earlier run has stored is reused.

    If a fragment can't follow the others or can't be stored, the clients that watch are cut off, and the job goes on.
    """

    def __init__(self, context: WorkerContext, job: Job, files: JobFiles) -> None:
        self._context, self._job, self._files = context, job, files
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._parts = list_parts(job)
        # Fragments of segments, in a file. Those of a finished part wait only if none of them was dropped.
        self._waiting: deque[_Waiting] = deque()
        self._file: io.FileIO | None = None
        self._latest_run: int | None = None  # Of the fragments of the segment that is being made.
        self._is_incomplete = False  # Whether some of its fragments were dropped.
        self._live: set[int] = set()  # Finished parts whose fragments all came while they were made.
        self._run = -1
        self._begin_run()
        self._watched_at, self._watched_until = job.watched_at, 0.0
        if job.watched_at is not None:
            claimed_at = (job.lease_expires_at or 0.0) - context.settings.reliability.lease_s
            self._watched_until = time.monotonic() + min(_WATCHED_S, _WATCHED_S + job.watched_at - claimed_at)
        self._is_finishing = self._failed = self._is_complete = False
        self._storing: asyncio.Task[None] | None = None
        self.unwritten: set[str] = set()  # Names of announced files that may still be written.

    @contextlib.asynccontextmanager
    async def storing(self) -> AsyncIterator[None]:
        """Store fragments until the block ends."""
        with contextlib.suppress(OSError):  # Without it, clients get segments once they are finished.
            self._file = open(self._files.get_path("fragments"), "w+b", buffering=0)  # noqa: SIM115 (closed below)
        self._storing = asyncio.create_task(self._store_all())
        try:
            yield
        finally:
            self._storing.cancel()
            await asyncio.wait([self._storing])
            self._fail()  # What comes now comes too late.
            if self._file is not None:
                self._file.close()

    def add(self, fragment: Fragment) -> None:
        """Take the next fragment of the segment that is being made, in any thread."""
        self._loop.call_soon_threadsafe(self._add, fragment)

    def end_segment(self, name: str) -> None:
        """Take the name in storage of the segment, after its last fragment: it is a finished part now."""
        if self._latest_run is not None and not self._is_incomplete and self._is_watched:
            self._live.add(len(self._parts))
        self._parts.append(name)
        self._latest_run, self._is_incomplete = None, False
        if len(self._parts) - 1 not in self._live:
            self._drop(len(self._parts))
        self._news.set()

    def look(self) -> None:
        """See whether a client watches by now: the job's `watched_at` was read."""
        if self._job.watched_at != self._watched_at:
            self._watched_at, self._watched_until = self._job.watched_at, time.monotonic() + _WATCHED_S
        self._news.set()

    async def finish(self) -> bool:
        """Wait until all fragments are stored, if a client watches; return whether clients can watch to the end.

        Clients that have received nothing yet get the finished file instead.
        """
        assert self._storing is not None
        self._is_finishing = True
        self._news.set()
        give_up = time.monotonic() + _LONGEST_S
        while not self._storing.done() and time.monotonic() < give_up:
            position = self._position
            await asyncio.wait([self._storing], timeout=_HEADWAY_S)
            if position == self._position:
                break
        return self._is_complete

    @property
    def _is_watched(self) -> bool:
        return time.monotonic() < self._watched_until and not self._failed

    @property
    def _has_begun(self) -> bool:
        """Whether clients may have received fragments."""
        return self._run > 0 or self._position > 0 or self._job.fragments is not None

    def _begin_run(self) -> None:
        """Begin the video again, from its first fragment on."""
        self._run += 1
        self._finished = 0  # The number of parts that are stored whole.
        self._begin = 0  # The number of the next part's first fragment,
        self._digests: list[str] = []  # and the digests of those of its fragments that are stored.
        request, rate = self._job.request, self._context.engine.model.audio_rate
        self._whole = ContinuedVideo(request["fps"], rate if request.get("generate_audio") else None)

    def _add(self, fragment: Fragment) -> None:
        part = len(self._parts)
        if self._latest_run not in (None, fragment.run):
            self._drop(part + 1, since=part)  # Its decoder was lost, and another one has begun again.
            self._is_incomplete = False
        self._latest_run = fragment.run
        if self._failed or self._is_incomplete:
            return
        if (start := self._append(fragment.content)) is None:
            self._is_incomplete = True  # Clients get the rest of this segment from its own file.
            self._drop(part + 1, since=part)
            return
        self._waiting.append(_Waiting(part, fragment.run, fragment.index, start, len(fragment.content)))
        self._news.set()

    def _append(self, content: bytes) -> int | None:
        """Append to the file of waiting fragments; return where, or None if the disk has no room."""
        try:
            if self._file is None:
                return None
            if not self._waiting:
                self._file.truncate(0)
            start = self._file.seek(0, os.SEEK_END)
            return start if self._file.write(content) == len(content) else None
        except OSError:
            return None

    def _drop(self, stop: int, since: int = 0) -> None:
        """Drop the fragments of parts from index `since` to before `stop`."""
        self._waiting = deque(fragment for fragment in self._waiting if not since <= fragment.part < stop)
        self._live.difference_update(range(since, stop))

    async def _store_all(self) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._is_watched and await self._store_next():
                    pass
                if not self._is_watched:
                    self._drop(len(self._parts))
                if self._is_finishing:
                    self._is_complete = self._is_watched and self._finished == len(self._parts)
                    return
        except LeaseLost:
            self._fail()
        except Exception as error:
            known = isinstance(error, (WanTpuError, NotContinued))
            fields = {"job": self._job.id, "reason": str(error) if known else type(error).__name__}
            log_event(log, "fragments end", logging.WARNING, **fields)
            self._fail()
            with contextlib.suppress(LeaseLost, StoreUnavailable):
                await asyncio.to_thread(self._context.queue.abandon_fragments, self._job)

    async def _store_next(self) -> bool:
        """Store what comes next, if it is there; return whether something was."""
        index = self._finished
        if self._job.last_segment is not None and not self._has_begun:
            return False  # Clients get the finished file.
        if index < len(self._parts) and index not in self._live:
            await self._store_part(self._parts[index])
        elif self._waiting and self._waiting[0].part == index:
            await self._store_waiting(index)
        elif index < len(self._parts):
            self._whole.end_part()
            self._end_part()
        else:
            return False
        return True

    async def _store_part(self, name: str) -> None:
        """Store the fragments of a finished part from its file."""
        path = await self._files.fetch(name)
        with contextlib.closing(self._whole.add_part(path)) as contents:
            number = self._begin
            while batch := await asyncio.to_thread(_take, contents):
                if not self._is_watched or not await self._store(number, batch):
                    return
                number += len(batch)
        self._end_part()

    async def _store_waiting(self, part: int) -> None:
        """Store the next fragments of a segment, those that came first."""
        batch = [fragment for fragment in itertools.islice(self._waiting, AT_ONCE) if fragment.part == part]
        assert self._file is not None
        file = self._file.fileno()
        read = await asyncio.to_thread(lambda: [os.pread(file, each.size, each.start) for each in batch])
        if list(itertools.islice(self._waiting, len(batch))) != batch:
            return  # They were dropped meanwhile, and others may have taken their place.
        for _ in batch:
            self._waiting.popleft()
        contents = [self._whole.append(content) for content in read]
        if not await self._store(self._begin + batch[0].number, contents) and part == len(self._parts):
            self._is_incomplete = True
            self._drop(part + 1, since=part)

    def _end_part(self) -> None:
        self._finished, self._begin, self._digests = self._finished + 1, self._position, []

    @property
    def _position(self) -> int:
        """The number of the next fragment to store."""
        return self._begin + len(self._digests)

    async def _store(self, number: int, contents: Sequence[bytes]) -> bool:
        """Store those of a part's fragments that aren't stored yet: reuse earlier runs' ones, and write the others.

        Args:
            number: The number of the first one; those before it are stored.
            contents: The fragments of the whole video, some of which may be stored already.

        Returns:
            False if they don't continue what is stored, because the part was decoded again with other bytes. A new run
            has then begun, for which finished parts are read from their files.
        """
        digests = await asyncio.to_thread(lambda: [hashlib.sha256(content).hexdigest() for content in contents])
        stored = self._digests[number - self._begin :]
        if any(old != new for old, new in zip(stored, digests, strict=False)):
            self._drop(len(self._parts))
            self._begin_run()
            return False
        wanted = [
            self._describe(number + index, digest) for index, digest in enumerate(digests) if index >= len(stored)
        ]
        queue, insist = self._context.queue, self._files.insist
        reused = 0
        if wanted and self._has_begun:
            reused = await insist(queue.reuse_fragments, self._job, wanted)
        if new := wanted[reused:]:
            self._context.settings.limits.check_disk(self._context.storage)
            names = [fragment.name for fragment in new]
            to_write = dict(zip(names, contents[len(stored) + reused :], strict=True))
            await insist(queue.announce, self._job, {name: len(content) for name, content in to_write.items()})
            self.unwritten.update(names)
            await asyncio.gather(*(asyncio.to_thread(self._write, *item) for item in to_write.items()))
            await insist(queue.publish_fragments, self._job, new)
        self._digests += [fragment.digest for fragment in wanted]
        return True

    def _describe(self, number: int, digest: str) -> StoredFragment:
        job = self._job
        name = f"{job.id}.{job.attempts}.{self._run}-{number:04}.{digest[:16]}.mp4"
        return StoredFragment(name=name, job=job.id, attempt=job.attempts, run=self._run, number=number, digest=digest)

    def _write(self, name: str, content: bytes) -> None:
        self._context.storage.write(name, content)
        self.unwritten.discard(name)  # Also if nobody waits any more, since a thread can't be cancelled.

    def _fail(self) -> None:
        self._failed = True
        self._drop(len(self._parts) + 1)


def _take(contents: Iterator[bytes]) -> list[bytes]:
    return list(itertools.islice(contents, AT_ONCE))
