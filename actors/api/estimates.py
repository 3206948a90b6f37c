"""When a job will be done, from how long the latest ones took."""

import math
import statistics
import time

from actors.jobs.store import JobStore
from actors.jobs.tables import Job

_LOOK_EVERY_S = 5.0
_LATEST = 20  # completed jobs that are looked at
_POLL_MS = (500, 5000)  # of OpenAI's clients, which keep to the first answer: often enough to learn of the end in time
_POLL_UNKNOWN_MS = 1000
_UNKNOWN_S = 60.0  # a job, as long as none has completed


class Estimator:
    """Looks at the latest jobs now and then. Its methods read the database."""

    def __init__(self, store: JobStore, concurrency: int) -> None:
        """concurrency: jobs that are in the pipeline at a time."""
        self._store, self._concurrency = store, concurrency
        self._looked_at = -math.inf
        self._per_work: float | None = None  # seconds
        self._mean_work = 1.0
        self._running = 0

    def eta_s(self, job: Job) -> float | None:
        """Return the seconds until a job's end, None where that isn't known."""
        if job.status == "in_progress":
            return None if job.progress is None else job.progress.eta_s
        if job.position is None:  # it has ended, or begun just now
            return None
        self._look()
        if self._per_work is None:
            return None
        takes = self._per_work * work(job)
        # As many as fit are in the pipeline; each that ends lets one in.
        before = max(0, job.position + self._running + 1 - self._concurrency)
        return takes + before * takes / self._concurrency

    def next_free_s(self) -> int:
        """Return after how many seconds there may be room in a full queue: whole ones, 1 to 600."""
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


def poll_after_ms(eta_s: float | None) -> int:
    """Return when it is worth to ask for a job again: twenty times on the way to its end."""
    lowest, highest = _POLL_MS
    return _POLL_UNKNOWN_MS if eta_s is None else round(min(highest, max(lowest, 50 * eta_s)))


def work(job: Job) -> float:
    """Return how much a job is, in a unit of its own: pixels times steps."""
    asked = job.request
    return max(1.0, float(asked["height"] * asked["width"] * asked["frames"] * asked["steps"]))
