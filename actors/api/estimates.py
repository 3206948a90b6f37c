"""How long jobs take and when one will be done, from how long the latest ones took."""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

from actors.api.sizes import volume
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from wan_tpu.plan import DECODER, ENCODER

_LOOK_EVERY_S = 5.0
_LATEST = 20  # completed jobs that are looked at
_POLL_MS = (500, 5000)  # of OpenAI's clients, which keep to the first answer: often enough to learn of the end in time
_POLL_UNKNOWN_MS = 1000
_UNKNOWN_S = 60.0  # a job, as long as none has completed


@dataclasses.dataclass
class Seconds:
    """What a size of video takes, measured: the encoder for one job, one denoising step, the decoder.

    wait  how many times longer than the sum of these a job takes, since others are on the slices too
    """

    encode: float
    step: float
    decode: float
    wait: float = 1.0

    def alone_s(self, steps: int) -> float:
        """Return the seconds of a video of so many steps that no other waits beside."""
        return self.encode + self.step * steps + self.decode


_SIZES = 256  # Sizes of videos whose seconds are remembered; requests choose them.
# Of Wan 2.2 A14B at 720p on v6e-8 (docs/performance.md, docs/benchmarks.md), until the first job has been measured.
_FIRST = Seconds(encode=0.4, step=2.62, decode=0.35)


class Pace:
    """Seconds by size of video; those of an unknown size are guessed from one that is known, by tokens."""

    def __init__(self, ended: Iterable[Job] = ()) -> None:
        """ended: jobs that completed before this process began, the latest first."""
        self._known: dict[int, Seconds] = {}
        for job in reversed(list(ended)):
            used, steps = job.stage_seconds, max(1, job.request["steps"])
            denoising = sum(seconds for stage, seconds in used.items() if stage not in (ENCODER, DECODER))
            found = Seconds(used.get(ENCODER, 0.0), denoising / steps, used.get(DECODER, 0.0))
            if denoising and job.started_at and job.ended_at:
                if job.attempts == 1:  # of others, the time in which nothing ran would count too
                    found.wait = max(1.0, (job.ended_at - job.started_at) / sum(used.values()))
                self._known[_tokens(job.request)] = found

    def job_s(self, request: Mapping[str, Any]) -> float:
        """Return the seconds from a job's claim to its end, beside as many others as those before had."""
        found = self.of(request)
        return found.alone_s(request["steps"]) * found.wait

    def of(self, request: Mapping[str, Any]) -> Seconds:
        """Return what this size takes: which its caller updates."""
        size = _tokens(request)
        if size not in self._known:
            near = min(self._known, key=lambda known: abs(known - size), default=None)
            scale, base = (size / near, self._known[near]) if near is not None else (1.0, _FIRST)
            self._known[size] = Seconds(base.encode * scale, base.step * scale, base.decode * scale, base.wait)
            if len(self._known) > _SIZES:
                del self._known[next(iter(self._known))]
        return self._known[size]


class Estimator:
    """Looks at the latest jobs now and then. Its methods read the database."""

    def __init__(self, store: JobStore, concurrency: int) -> None:
        """concurrency: jobs that are in the pipeline at a time."""
        self._store, self._concurrency = store, concurrency
        self._looked_at = -math.inf
        self._pace: Pace | None = None
        self._mean_s = _UNKNOWN_S
        self._running = 0

    def eta_s(self, job: Job) -> float | None:
        """Return the seconds until a job's end, None where that isn't known."""
        if job.status == "in_progress":
            return None if job.progress is None else job.progress.eta_s
        if job.position is None:  # it has ended, or begun just now
            return None
        self._look()
        if self._pace is None:
            return None
        takes = self._pace.job_s(job.request)
        # As many as fit are in the pipeline; each that ends lets one in.
        before = max(0, job.position + self._running + 1 - self._concurrency)
        return takes + before * takes / self._concurrency

    def next_free_s(self) -> int:
        """Return after how many seconds there may be room in a full queue: whole ones, 1 to 600."""
        self._look()
        return min(600, max(1, math.ceil(self._mean_s / self._concurrency)))

    def _look(self) -> None:
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        self._running = self._store.count_running()
        if ended := self._store.list_recent(_LATEST):
            self._pace = Pace(ended)
            self._mean_s = statistics.fmean(self._pace.job_s(job.request) for job in ended)


def poll_after_ms(eta_s: float | None) -> int:
    """Return when it is worth to ask for a job again: twenty times on the way to its end."""
    lowest, highest = _POLL_MS
    return _POLL_UNKNOWN_MS if eta_s is None else round(min(highest, max(lowest, 50 * eta_s)))


def _tokens(request: Mapping[str, Any]) -> int:
    return volume((request["height"], request["width"], request["frames"]))
