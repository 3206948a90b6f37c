"""Jobs that clients follow: all are looked at together, twice a second, however many follow them."""

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

EstimatedJob = tuple[Job, float | None]  # and in how many seconds it will be done


class _Follower:
    def __init__(self, owner: str, seen: EstimatedJob) -> None:
        self.owner, self.seen = owner, seen
        self.news = asyncio.Event()
        self.end: Exception | None = None

    def tell(self, seen: EstimatedJob | None = None, *, end: Exception | None = None) -> None:
        self.seen, self.end = seen or self.seen, end
        self.news.set()


class Following:
    """The streams of one ingress. A key may have so many; one that is revoked loses them."""

    def __init__(self, look: Callable[[Iterable[str]], dict[str, EstimatedJob]], access: Access, of_a_key: int) -> None:
        """look: returns what it finds of some ids; called in threads."""
        self._look, self._access, self._of_a_key = look, access, of_a_key
        self._followers: dict[str, set[_Follower]] = {}
        self._of_owner: Counter[str] = Counter()
        self._looking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Have one of a key's streams until the block ends; raises `HttpError` 429 for one too many."""
        if (mine := self._of_owner[owner]) >= self._of_a_key:
            message = f"{mine} jobs are followed with this key, which is all that may be; close some, or poll"
            raise HttpError(429, message, code="too_many_streams", after_s=_AGAIN_S)
        self._of_owner[owner] += 1
        try:
            yield
        finally:
            self._of_owner[owner] -= 1
            if not self._of_owner[owner]:
                del self._of_owner[owner]

    @contextlib.asynccontextmanager
    async def follow(self, seen: EstimatedJob, owner: str) -> AsyncIterator[AsyncIterator[EstimatedJob]]:
        """Give what a job becomes, from what was just seen of it to its end; whoever follows has a `place`.

        The iterator raises `JobNotFound` for a job that was deleted, and `HttpError` 401 when the key is revoked.
        """
        job, follower = seen[0].id, _Follower(owner, seen)
        self._followers.setdefault(job, set()).add(follower)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on())
        try:
            async with contextlib.aclosing(self._seen(follower)) as news:
                yield news
        finally:
            self._followers[job].discard(follower)
            if not self._followers[job]:
                del self._followers[job]

    def followers(self, job: str) -> int:
        """Return how many streams of this ingress follow a job."""
        return len(self._followers.get(job, ()))

    async def _seen(self, follower: _Follower) -> AsyncGenerator[EstimatedJob, None]:
        while True:
            follower.news.clear()
            yield follower.seen
            if follower.seen[0].ended:
                return
            await follower.news.wait()
            if follower.end is not None:
                raise follower.end

    async def _look_on(self) -> None:
        """Look for as long as anybody follows."""
        while self._followers:
            await asyncio.sleep(_LOOK_S)
            if not (jobs := list(self._followers)):
                break
            try:
                found = await asyncio.to_thread(self._look, jobs)
            except WanTpuError as error:
                log_event(log, "events wait", logging.WARNING, reason=str(error))
                continue
            except Exception:  # who follows waits on
                log.exception("events wait")
                continue
            for job in jobs:  # of those that came meanwhile nothing was asked
                for follower in self._followers.get(job, ()):
                    self._tell(follower, job, found.get(job))
        self._looking = None

    def _tell(self, follower: _Follower, job: str, seen: EstimatedJob | None) -> None:
        if not self._access.in_force(follower.owner):
            message = "the API key isn't in force any more"
            follower.tell(end=HttpError(401, message, code="invalid_api_key"))
        elif seen is None:
            follower.tell(end=JobNotFound(f"there is no job {job!r} any more; it was deleted, or has expired"))
        elif _changes(follower.seen[0], seen[0]):
            follower.tell(seen)


def _changes(before: Job, now: Job) -> bool:
    """Whether there is something to tell; an estimate alone is none, since it changes with every look."""
    told = ("status", "progress", "attempts", "position", "warnings")
    return any(getattr(before, name) != getattr(now, name) for name in told)
