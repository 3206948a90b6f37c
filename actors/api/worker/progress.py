"""How far a job is and what it has cost, from the spans of its slices. Percent are weighted by measured seconds."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from actors.jobs.tables import Job
from actors.jobs.values import Progress
from actors.observe.timeline import Span
from wan_tpu.spec import DECODER, ENCODER

_NEW = 0.3  # weight of the latest measurement against those before
_NEVER_COMPLETE = 99.9


@dataclasses.dataclass
class Seconds:
    """What a size of video takes, measured: the encoder for one job, one denoising step, the decoder.

    wait  how many times longer than the sum of these a job takes, since others are on the slices too
    """

    encode: float
    step: float
    decode: float
    wait: float = 1.0


# Of Wan 2.2 A14B at 720p on v6e-8 (docs/performance.md, docs/benchmarks.md), until the first job has been measured.
_FIRST = Seconds(encode=0.4, step=2.81, decode=0.35)


class Pace:
    """Seconds by size of video; those of an unknown size are guessed from one that is known, by pixels."""

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
                self._known[volume(job.request)] = found

    def of(self, request: Mapping[str, Any]) -> Seconds:
        """Return what this size takes: which its caller updates."""
        size = volume(request)
        if size not in self._known:
            near = min(self._known, key=lambda known: abs(known - size), default=None)
            scale, base = (size / near, self._known[near]) if near is not None else (1.0, _FIRST)
            self._known[size] = Seconds(base.encode * scale, base.step * scale, base.decode * scale, base.wait)
        return self._known[size]


class Tracker:
    """Follows one job through one attempt, and notes on it what it costs."""

    def __init__(self, job: Job, pace: Seconds, chips: Mapping[str, int]) -> None:
        """chips: stage -> chips of its slice."""
        self._job, self._pace, self._chips = job, pace, chips
        self._steps = int(job.request["steps"])
        before = job.progress or Progress(stage=ENCODER)
        self._stage, self._step, self._percent = ENCODER, 0, before.percent
        self._decoded, self._first = False, job.attempts <= 1
        # When each stage of this attempt began and ended, by its slice's clock, and the seconds that it computed.
        self.times: dict[str, tuple[float, float, float]] = {}

    def note(self, span: Span) -> None:
        """Take in what a slice has done."""
        self._stage = span.stage
        first, last, computed = self.times.get(span.stage, (span.start_s, span.end_s, 0.0))
        computed += span.seconds if span.what == "compute" else 0.0
        self.times[span.stage] = min(first, span.start_s), max(last, span.end_s), computed
        if span.what != "compute":
            return
        self._job.spend(span.stage, span.seconds, self._chips.get(span.stage, 1))
        if span.step is not None:
            self._step = max(self._step, span.step)
            self._pace.step += _NEW * (span.seconds - self._pace.step)
            if self._step == self._steps:
                self._stage = DECODER
        elif span.stage == DECODER:
            self._decoded = True

    def progress(self) -> Progress:
        """Return how far it is; percent never fall, even when something was lost and is done again."""
        pace = self._pace
        encoded = self._stage != ENCODER or self._step > 0
        done = pace.encode * encoded + pace.step * self._step + pace.decode * self._decoded
        whole = pace.encode + pace.step * self._steps + pace.decode
        self._percent = max(self._percent, min(_NEVER_COMPLETE, 100 * done / max(whole, 1e-9)))
        return Progress(
            stage=self._stage,
            step=self._step,
            steps=self._steps,
            percent=round(self._percent, 2),
            eta_s=round(max(0.0, whole - done) * pace.wait, 1),
        )

    def completed(self, seconds: float) -> None:
        """Learn from a job that went through; seconds: from its claim to its end."""
        pace, mine = self._pace, self.stage_seconds
        pace.encode += _NEW * (mine.get(ENCODER, 0.0) - pace.encode)
        pace.decode += _NEW * (mine.get(DECODER, 0.0) - pace.decode)
        if mine and self._first:
            pace.wait += _NEW * (max(1.0, seconds / max(sum(mine.values()), 1e-9)) - pace.wait)

    @property
    def stage_seconds(self) -> dict[str, float]:
        """What this attempt has computed, by stage."""
        return {stage: computed for stage, (_, _, computed) in self.times.items() if computed}


def volume(request: Mapping[str, Any]) -> int:
    """Return the pixels of a video."""
    return int(request["height"]) * int(request["width"]) * int(request["frames"])
