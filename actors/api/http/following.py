"""Follow jobs for clients: one query reads all followed jobs twice a second, however many clients follow them."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator

from actors.api.http.access import Access
from actors.api.http.error_answers import HttpError
from actors.jobs.errors import JobNotFound
from actors.jobs.tables import Job
from actors.observe.logs import log_event
from wan_tpu.errors import WanTpuError

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_AGAIN_S = 5

EstimatedJob = tuple[Job, float | None]  # A job, and in how many seconds it will be done, if that is known.


class _Follower:
    def __init__(self, owner: str, latest: EstimatedJob) -> None:
        self.owner, self.latest = owner, latest
        self.news = asyncio.Event()
        self.end: Exception | None = None

    def tell(self, latest: EstimatedJob | None = None, *, end: Exception | None = None) -> None:
        self.latest, self.end = latest or self.latest, end
        self.news.set()


class Following:
    """The event streams of one ingress. Their number per key is limited, and a revoked key loses them."""

    def __init__(self, look: Callable[[Iterable[str]], dict[str, EstimatedJob]], access: Access, of_a_key: int) -> None:
        """Set up without any streams.

        Args:
            look: Returns those of the given ids that exist as jobs. It is called in threads.
            access: Knows which keys are valid.
            of_a_key: How many streams a key may have.
        """
        self._look, self._access, self._of_a_key = look, access, of_a_key
        self._followers: dict[str, set[_Follower]] = {}
        self._streams: Counter[str] = Counter()
        self._looking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def hold_stream(self, owner: str) -> Iterator[None]:
        """Reserve one of a key's streams until the block ends; raises `HttpError` 429 if it has too many."""
        if (mine := self._streams[owner]) >= self._of_a_key:
            message = f"this key has {mine} event streams, the most it may have; close some, or poll"
            raise HttpError(429, message, code="too_many_streams", after_s=_AGAIN_S)
        self._streams[owner] += 1
        try:
            yield
        finally:
            self._streams[owner] -= 1
            if not self._streams[owner]:
                del self._streams[owner]

    @contextlib.asynccontextmanager
    async def follow(self, seen: EstimatedJob, owner: str) -> AsyncIterator[AsyncIterator[EstimatedJob]]:
        """Follow a job until it ends. The caller must have called `hold_stream`.

        Args:
            seen: The job as it was just seen, which comes first.
            owner: The key that follows it.

        Yields:
            An iterator over the job's states. It raises `JobNotFound` if the job is deleted, and `HttpError` 401 if
            the key is revoked.
        """
        job, follower = seen[0].id, _Follower(owner, seen)
        self._followers.setdefault(job, set()).add(follower)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on())
        try:
            async with contextlib.aclosing(self._watch(follower)) as news:
                yield news
        finally:
            self._followers[job].discard(follower)
            if not self._followers[job]:
                del self._followers[job]

    def count_followers(self, job: str) -> int:
        """Return how many streams of this ingress follow a job."""
        return len(self._followers.get(job, ()))

    async def _watch(self, follower: _Follower) -> AsyncGenerator[EstimatedJob, None]:
        while True:
            follower.news.clear()
            yield follower.latest
            if follower.latest[0].ended:
                return
            await follower.news.wait()
            if follower.end is not None:
                raise follower.end

    async def _look_on(self) -> None:
        """Read the followed jobs for as long as there are any."""
        while self._followers:
            await asyncio.sleep(_LOOK_S)
            if not (jobs := list(self._followers)):
                break
            try:
                jobs_now = await asyncio.to_thread(self._look, jobs)
            except WanTpuError as error:
                log_event(log, "events wait", logging.WARNING, reason=str(error))
                continue
            except Exception:  # Followers keep waiting.
                log.exception("events wait")
                continue
            for job in jobs:  # Not those followed only since, which weren't read.
                for follower in self._followers.get(job, ()):
                    self._tell(follower, job, jobs_now.get(job))
        self._looking = None

    def _tell(self, follower: _Follower, job: str, seen: EstimatedJob | None) -> None:
        if not self._access.is_in_force(follower.owner):
            message = "the API key isn't in force any more"
            follower.tell(end=HttpError(401, message, code="invalid_api_key"))
        elif seen is None:
            follower.tell(end=JobNotFound(f"there is no job {job!r} any more; it was deleted, or has expired"))
        elif _has_changed(follower.latest[0], seen[0]):
            follower.tell(seen)


def _has_changed(before: Job, now: Job) -> bool:
    """Return whether a job has changed. A new estimate alone doesn't count, since it changes every time."""
    fields = ("status", "progress", "attempts", "position", "warnings")
    return any(getattr(before, name) != getattr(now, name) for name in fields)
