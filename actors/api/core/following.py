"""Follow jobs for clients. One query at regular intervals reads all followed jobs, however many clients there are."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import Generic, TypeVar

from actors.api.core.access import Access
from actors.api.core.errors import HttpError
from actors.api.fair_semaphore import FairSemaphore
from actors.jobs.errors import JobNotFound
from actors.jobs.tables import Job
from actors.jobs.watching import TOLD, Watched
from actors.observe.logs import log_event
from wan_tpu.errors import WanTpuError

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_WATCH_S = 0.15  # Pause between two reads of new fragments, which clients see this much later at most.
_AGAIN_S = 5
_READERS = 8  # Threads that read for streams. Everything else in this process would wait for more of them.
PROMPTS = frozenset(("prompt", "negative_prompt", "next_prompts"))  # Of a request, and of a video.

EstimatedJob = tuple[Job, float | None]  # A job, and in how many seconds it will be done, if that is known.
State = TypeVar("State")  # The state of a job that followers receive.
Look = Callable[[Mapping[str, State]], dict[str, State]]


def follow_jobs(look: Look[EstimatedJob], access: Access) -> "Following[EstimatedJob]":
    """Return a `Following` of the progress of jobs, which are followed without their prompts."""

    def look_without_prompts(jobs: Mapping[str, EstimatedJob]) -> dict[str, EstimatedJob]:
        return {id_: without_prompts(seen) for id_, seen in look(jobs).items()}

    return Following(
        look_without_prompts, access, every_s=_LOOK_S, has_ended=lambda seen: seen[0].has_ended, is_news=_has_changed
    )


def without_prompts(seen: EstimatedJob) -> EstimatedJob:
    """Empty the prompts of a job that was just read: a stream that waits would hold up to a megabyte of them."""
    job = seen[0]
    texts = {name: text for name, text in job.request.items() if name in PROMPTS}
    # The number of prompts is kept, because it says how long the video takes.
    emptied = {name: [""] * len(text) if isinstance(text, list) else text and "" for name, text in texts.items()}
    job.request = job.request | emptied
    return seen


def follow_watched(look: Look[Watched], access: Access) -> "Following[Watched]":
    """Return a `Following` of the stored fragments of jobs."""
    return Following(
        look, access, every_s=_WATCH_S, has_ended=lambda seen: seen.has_ended, is_news=lambda before, now: before != now
    )


class Streams:
    """The streams of one ingress. Their number per key is limited."""

    def __init__(self, of_a_key: int) -> None:
        self._of_a_key = of_a_key
        # Gives keys turns at reading from storage for their streams.
        self.reading = FairSemaphore(_READERS, _READERS - 1)
        self._streams: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, owner: str) -> Iterator[None]:
        """Reserve one of a key's streams until the block ends; raises `HttpError` 429 if it has too many."""
        if (mine := self._streams[owner]) >= self._of_a_key:
            message = f"this key has {mine} open streams, the most it may have; close some, or poll"
            raise HttpError(429, message, code="too_many_streams", after_s=_AGAIN_S)
        self._streams[owner] += 1
        try:
            yield
        finally:
            self._streams[owner] -= 1
            if not self._streams[owner]:
                del self._streams[owner]


class _Follower(Generic[State]):
    def __init__(self, owner: str, latest: State) -> None:
        self.owner, self.latest = owner, latest
        self.news = asyncio.Event()
        self.end: Exception | None = None

    def tell(self, latest: State | None = None, *, end: Exception | None = None) -> None:
        self.latest, self.end = self.latest if latest is None else latest, end
        self.news.set()


class Following(Generic[State]):
    """Reads the jobs that streams follow. The streams of a revoked key are ended."""

    def __init__(
        self,
        look: Look[State],
        access: Access,
        *,
        every_s: float,
        has_ended: Callable[[State], bool],
        is_news: Callable[[State, State], bool],
    ) -> None:
        """Set up without any followers.

        Args:
            look: Returns the jobs with the given ids, except those that don't exist. It gets their latest states, so
                that it can read only what is new. It is called in threads.
            every_s: Pause between two calls of `look`.
            has_ended: Returns whether a job won't change any more.
            is_news: Returns whether a job differs from its state before.
        """
        self._look, self._access, self._every_s = look, access, every_s
        self._has_ended, self._is_news = has_ended, is_news
        self._followers: dict[str, set[_Follower[State]]] = {}
        self._latest: dict[str, State] = {}  # Of each followed job.
        self._looking: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def follow(
        self, job: str, seen: State, owner: str, idle_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[State]]:
        """Follow a job until it ends. The caller must hold one of the key's `Streams`.

        Args:
            seen: The job's state as just read, which is yielded first.
            idle_s: After this many seconds without a change, the latest state is yielded again; None for never.

        Yields:
            An iterator over the job's states. It raises `JobNotFound` if the job is deleted, and `HttpError` 401 if
            the key is revoked.
        """
        follower = _Follower(owner, seen)
        self._followers.setdefault(job, set()).add(follower)
        self._latest.setdefault(job, seen)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on())
        try:
            async with contextlib.aclosing(self._watch(follower, idle_s)) as news:
                yield news
        finally:
            self._followers[job].discard(follower)
            if not self._followers[job]:
                del self._followers[job], self._latest[job]

    def count_followers(self, job: str) -> int:
        """Return how many streams of this ingress follow a job."""
        return len(self._followers.get(job, ()))

    async def _watch(self, follower: _Follower[State], idle_s: float | None) -> AsyncGenerator[State, None]:
        while True:
            follower.news.clear()
            if follower.end is not None:
                raise follower.end
            seen = follower.latest  # Kept, because `latest` may change before the consumer resumes.
            yield seen
            if self._has_ended(seen):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    await follower.news.wait()

    async def _look_on(self) -> None:
        """Read the followed jobs for as long as there are any."""
        while jobs := dict(self._latest):
            try:
                jobs_now = await asyncio.to_thread(self._look, jobs)
            except WanTpuError as error:
                log_event(log, "events wait", logging.WARNING, reason=str(error))
            except Exception:  # Followers keep waiting, and the next read may succeed.
                log.exception("events wait")
            else:
                for job in jobs:  # Jobs that were followed only after the read began are left for the next one.
                    if job in self._latest and job in jobs_now:
                        self._latest[job] = jobs_now[job]
                    for follower in self._followers.get(job, ()):
                        self._tell(follower, job, jobs_now.get(job))
            await asyncio.sleep(self._every_s)
        self._looking = None

    def _tell(self, follower: _Follower[State], job: str, seen: State | None) -> None:
        if not self._access.is_in_force(follower.owner):
            message = "the API key has expired or was revoked"
            follower.tell(end=HttpError(401, message, code="invalid_api_key"))
        elif seen is None:
            follower.tell(end=JobNotFound(f"the job {job!r} no longer exists: it was deleted, or has expired"))
        elif self._is_news(follower.latest, seen):
            follower.tell(seen)


def _has_changed(before: EstimatedJob, now: EstimatedJob) -> bool:
    """Return whether a job has changed. A new estimate alone doesn't count, since it changes every time."""
    return any(getattr(before[0], name) != getattr(now[0], name) for name in TOLD)
