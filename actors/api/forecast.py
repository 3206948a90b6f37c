"""When a job will be done, from how long the latest ones took."""

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence

from actors.jobs.store import JobStore
from actors.jobs.values import Job

_LOOK_EVERY_S = 5.0
_LATEST = 20  # completed jobs that are looked at
_POLL_MS = (500, 5000)  # of OpenAI's clients, which keep to the first answer: often enough to be told in time
_POLL_UNKNOWN_MS = 1000
_UNKNOWN_S = 60.0  # a job, as long as none has completed


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What is told of a job: how many go before it, and the seconds until its end; None where nobody knows."""

    queue_position: int | None = None
    eta_s: float | None = None

    @property
    def poll_after_ms(self) -> int:
        """When it is worth to ask again: twenty times on the way."""
        lowest, highest = _POLL_MS
        return _POLL_UNKNOWN_MS if self.eta_s is None else round(min(highest, max(lowest, 50 * self.eta_s)))


class Forecast:
    """Looks at the latest jobs now and then. Its methods read the database."""

    def __init__(self, store: JobStore, concurrency: int) -> None:
        """concurrency: jobs that are in the pipeline at a time."""
        self._store, self._concurrency = store, concurrency
        self._looked_at = -math.inf
        self._per_work: float | None = None  # seconds
        self._mean_work = 1.0
        self._running = 0

    def outlook(self, job: Job) -> Outlook:
        """Return what can be told of a job."""
        return self.outlook_at(job, self._store.position(job) if job.status == "queued" else None)

    def outlooks(self, jobs: Sequence[Job]) -> list[Outlook]:
        """Return the same for the jobs of a page."""
        positions = self._store.positions([job.id for job in jobs if job.status == "queued"])
        return [self.outlook_at(job, positions.get(job.id)) for job in jobs]

    def outlook_at(self, job: Job, position: int | None) -> Outlook:
        """Return the same for a job whose position is known."""
        if job.status == "in_progress":
            return Outlook(None, job.progress.eta_s if job.progress is not None else None)
        if position is None:  # it has ended, or begun just now
            return Outlook()
        self._look()
        if self._per_work is None:
            return Outlook(position)
        takes = self._per_work * work(job)
        # As many as fit are in the pipeline; each that ends lets one in.
        before = max(0, position + self._running + 1 - self._concurrency)
        return Outlook(position, takes + before * takes / self._concurrency)

    def next_free_s(self) -> int:
        """Return after how many seconds a place in a full queue may be free: whole ones, 1 to 600."""
        self._look()
        takes = _UNKNOWN_S if self._per_work is None else self._per_work * self._mean_work
        return min(600, max(1, math.ceil(takes / self._concurrency)))

    def _look(self) -> None:
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        self._running = self._store.running()
        ended = [job for job in self._store.recent(_LATEST) if job.started_at is not None and job.ended_at is not None]
        if ended:
            self._per_work = statistics.median((job.ended_at - job.started_at) / work(job) for job in ended)  # type: ignore[operator]
            self._mean_work = statistics.fmean(map(work, ended))


def work(job: Job) -> float:
    """Return how much a job is, in a unit of its own: pixels times steps."""
    asked = job.request
    return max(1.0, float(asked["height"] * asked["width"] * asked["frames"] * asked["steps"]))
