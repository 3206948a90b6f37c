"""Estimate how long jobs take and when they will be done, from the durations of the latest ones."""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

from actors.api.foresight import Foresight, foresee
from actors.jobs.queries import Turn
from actors.jobs.store import JobStore
from actors.jobs.stored_request import count_left
from actors.jobs.tables import Job
from wan_tpu.plan import DECODER, ENCODER

_LOOK_EVERY_S = 5.0
_LATEST = 20  # How many completed jobs estimates are based on.
# The shortest and longest poll interval. OpenAI's clients keep the interval of the first answer, so that it must be
# short enough to notice the end in time.
_POLL_MS = (500, 5000)
_POLL_UNKNOWN_MS = 1000
_UNKNOWN_S = 60.0  # Assumed duration of a segment until a job has completed.


@dataclasses.dataclass
class Seconds:
    """Measured seconds for one size of video."""

    encode: float  # Seconds of the encoder for a segment; most videos have one.
    step: float  # Seconds of a denoising step, the mean over all stages.
    decode: float
    wait: float = 1.0  # A job's duration divided by the sum of these. It is above 1 because jobs share the slices.
    # A step's duration divided by that of the mean step, by its stage and its work, if measured.
    weights: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)

    def estimate_alone_s(self, steps: int) -> float:
        """Return the seconds that a video of `steps` steps takes if it has the slices to itself."""
        return self.encode + self.step * steps + self.decode


_SIZES = 256  # Sizes of videos whose seconds are remembered. It bounds memory, since clients choose sizes.
# Wan 2.2 A14B at 720p on v6e-8 (docs/performance.md, docs/benchmarks.md), until the first job has been measured.
_FIRST = Seconds(encode=0.4, step=2.62, decode=0.35)


class Pace:
    """Measured seconds by size of video. An unknown size is scaled from the nearest known one, by pixels."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        """Learn from jobs that completed before this process started, given latest first."""
        self._known: dict[int, Seconds] = {}
        for job in reversed(list(jobs)):
            segments = count_left(job.request)
            used = {stage: seconds / segments for stage, seconds in job.stage_seconds.items()}
            denoising = sum(seconds for stage, seconds in used.items() if stage not in (ENCODER, DECODER))
            step_s = denoising / max(1, job.request["steps"])
            seconds = Seconds(used.get(ENCODER, 0.0), step_s, used.get(DECODER, 0.0))
            if denoising and job.started_at and job.ended_at:
                if job.attempts == 1:  # Otherwise the time between two attempts would count as well.
                    seconds.wait = max(1.0, (job.ended_at - job.started_at) / sum(job.stage_seconds.values()))
                self._known[_count_pixels(job.request)] = seconds

    def estimate_segment_s(self, request: Mapping[str, Any]) -> float:
        """Return the seconds of each of a job's segments, assuming that slices are as busy as for earlier jobs."""
        seconds = self.get(request)
        return seconds.estimate_alone_s(request["steps"]) * seconds.wait

    def get(self, request: Mapping[str, Any]) -> Seconds:
        """Return the seconds for a request's size. The caller updates the object as it measures."""
        size = _count_pixels(request)
        if size not in self._known:
            near = min(self._known, key=lambda known: abs(known - size), default=None)
            scale, base = (size / near, self._known[near]) if near is not None else (1.0, _FIRST)
            self._known[size] = Seconds(base.encode * scale, base.step * scale, base.decode * scale, base.wait)
            if len(self._known) > _SIZES:
                del self._known[next(iter(self._known))]
        return self._known[size]


class Estimator:
    """Estimates from the latest jobs, which it reads again every few seconds. Its methods read the database."""

    def __init__(self, store: JobStore, concurrency: int, model: str) -> None:
        """Estimate for a pipeline of a model that has `concurrency` jobs at a time."""
        self._store, self._concurrency, self._model = store, concurrency, model
        self._looked_at = -math.inf
        self._latest: dict[str, Job] = {}
        self._pace: Pace | None = None
        self._mean_s = _UNKNOWN_S  # The duration of a segment.
        self._foresight = Foresight({}, {}, [], 0.0)

    def estimate_eta_s(self, job: Job) -> float | None:
        """Return the seconds until a job's end, or None if that isn't known."""
        is_running = job.status == "in_progress"
        own_s = job.progress.eta_s if is_running and job.progress is not None else None
        if own_s is None and job.position is None:  # It has ended, or has just begun.
            return None
        self._look()
        if self._pace is None:
            return own_s
        if own_s is not None:
            return own_s + self._mean_s * self._foresight.pauses.get(job.sequence, 0.0)
        own_s, left = job.segments_left * self._pace.estimate_segment_s(job.request), job.segments_left
        turn = Turn(job.priority, job.round, job.sequence, job.owner, left)
        others_s = self._mean_s * (self._foresight.get_end(turn) - left)
        return own_s + max(0.0, others_s - (time.monotonic() - self._looked_at))

    def estimate_next_free_s(self) -> int:
        """Return in how many seconds a full queue may have room again: a whole number from 1 to 600."""
        self._look()
        return min(600, max(1, math.ceil(self._mean_s / self._concurrency)))

    def list_latest(self) -> list[Job]:
        """Return the latest completed jobs of all models."""
        self._look()
        return list(self._latest.values())

    def _look(self) -> None:
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        self._foresight = foresee(*self._store.list_turns(self._model), self._concurrency)
        if jobs := self._store.list_recent(_LATEST, self._latest):
            self._latest = {job.id: job for job in jobs}
            self._pace = Pace(jobs)
            segments = [self._pace.estimate_segment_s(job.request) for job in jobs]
            self._mean_s = statistics.fmean(segments, [count_left(job.request) for job in jobs])


def choose_poll_ms(eta_s: float | None) -> int:
    """Return how long a client should wait before it polls a job again: about a twentieth of the remaining time."""
    lowest, highest = _POLL_MS
    return _POLL_UNKNOWN_MS if eta_s is None else round(min(highest, max(lowest, 50 * eta_s)))


def _count_pixels(request: Mapping[str, Any]) -> int:
    """Return the pixels of a video, which its tokens are nearly proportional to."""
    return int(request["height"] * request["width"] * request["frames"])
