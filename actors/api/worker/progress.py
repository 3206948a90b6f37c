"""Track a job's progress and cost from the spans of its slices. Percent is weighted by measured seconds."""

import itertools
import statistics
from collections.abc import Mapping

from actors.api.estimates import Seconds
from actors.jobs.stored_request import count_left
from actors.jobs.tables import Job
from actors.jobs.values import Progress
from actors.observe.span import Span
from wan_tpu.plan import DECODER, ENCODER, VIDEO, RequestPlan
from wan_tpu.spec import ModelSpec

_NEW = 0.3  # Weight of the latest measurement against earlier ones.
_NEVER_COMPLETE = 99.9

Step = tuple[str, int]  # A step's stage and its work, which is nearly proportional to the seconds that it takes.


class Tracker:
    def __init__(
        self, job: Job, pace: Seconds, chips: Mapping[str, int], dollars: Mapping[str, float] | None = None
    ) -> None:
        """Follow a job.

        Args:
            job: The job, whose costs are updated.
            pace: The measured seconds for videos of the job's size, which are updated.
            chips: Number of chips of a stage's slice, by stage.
            dollars: Price per hour of one of these chips, by stage, if known.
        """
        self._job, self._pace, self._chips, self._dollars = job, pace, chips, dollars or {}
        # Stage and work of each step; None for steps that aren't run.
        self._steps: list[Step | None] = [("", 1)] * int(job.request["steps"])
        self._measured: dict[Step, list[float]] = {}
        before = job.progress or Progress(stage=ENCODER)
        self._stage, self._step, self._percent = ENCODER, 0, before.percent
        self._decoded, self._is_first_attempt, self._in_chunks = False, job.attempts <= 1, False
        self._compiles = False
        self._segments = count_left(job.request)  # What is taken from another job takes no time.
        self._first = self._segments - count_left(job.request, job.finished_segments)
        self._finished = self._first
        # Per stage of this attempt: when it began and ended by its slice's clock, and for how many seconds it computed.
        self.times: dict[str, tuple[float, float, float]] = {}

    def begin_segment(self, model: ModelSpec, plan: RequestPlan) -> None:
        """Follow the plan of the job's next segment.

        Until steps are measured, they are weighted by the tokens that they compute: steps on enlarged latents take
        several times as long as the steps before them.
        """
        self._steps, self._in_chunks = [None] * plan.first_step, len(plan.chunk_stops) > 1
        for expert in plan.experts:
            tokens = model.tokens(model.latent_shapes(plan.request, expert.stop)[VIDEO])
            self._steps += [(expert.stage, tokens * (1 + expert.guided))] * (expert.stop - expert.start)

    def end_segment(self) -> None:
        """Count a segment as finished; another one follows."""
        self._finished += 1
        self._stage, self._step, self._decoded = ENCODER, 0, False

    def note(self, span: Span) -> None:
        """Count a span, or note that a slice compiles, which lasts until the next one."""
        self._compiles = span.kind == "compiling"
        # Chunks are decoded while later ones are denoised. After a resume this may even precede the first step.
        is_beside = span.stage == DECODER and self._step < len(self._steps) and (self._in_chunks or self._step > 0)
        if not is_beside:
            self._stage = span.stage
        first, last, seconds = self.times.get(span.stage, (span.start_s, span.end_s, 0.0))
        seconds += span.seconds if span.kind == "compute" else 0.0
        self.times[span.stage] = min(first, span.start_s), max(last, span.end_s), seconds
        if span.kind != "compute":
            return
        chips, dollars = self._chips.get(span.stage, 1), self._dollars.get(span.stage, 0.0)
        self._job.spend(span.stage, span.seconds, chips, dollars)
        if span.step is not None:
            self._step = max(self._step, span.step)
            if (step := self._steps[span.step - 1]) is not None:
                self._pace.step += _NEW * (span.seconds / self._weights()[span.step - 1] - self._pace.step)
                self._measured.setdefault(step, []).append(span.seconds)
            if self._step == len(self._steps):
                self._stage = DECODER
        elif span.stage == DECODER and not is_beside:
            self._decoded = True

    def estimate(self) -> Progress:
        """Return the progress. Percent never falls, even if lost work is repeated."""
        pace, weights = self._pace, self._weights()
        encoded = self._stage != ENCODER or self._step > 0
        done = pace.encode * encoded + pace.step * sum(weights[: self._step]) + pace.decode * self._decoded
        segment = pace.encode + pace.step * sum(weights) + pace.decode
        done, whole = done + segment * self._finished, segment * self._segments
        self._percent = max(self._percent, min(_NEVER_COMPLETE, 100 * done / max(whole, 1e-9)))
        return Progress(
            stage=self._stage,
            step=self._step,
            steps=len(self._steps),
            percent=round(self._percent, 2),
            eta_s=round(max(0.0, whole - done) * pace.wait, 1),
            compiles=self._compiles,
        )

    def learn(self, seconds: float) -> None:
        """Learn from the completed job, which took `seconds` from its claim to its end."""
        pace, mine, segments = self._pace, self.stage_seconds, self._segments - self._first
        if not segments:
            return
        pace.encode += _NEW * (mine.get(ENCODER, 0.0) / segments - pace.encode)
        pace.decode += _NEW * (mine.get(DECODER, 0.0) / segments - pace.decode)
        if sum(map(len, self._measured.values())) == segments * sum(step is not None for step in self._steps):
            mean = statistics.fmean(itertools.chain.from_iterable(self._measured.values()))
            for step, times in self._measured.items():
                weight = statistics.fmean(times) / max(mean, 1e-9)
                pace.weights[step] = (1 - _NEW) * pace.weights.get(step, weight) + _NEW * weight
        if mine and self._is_first_attempt:
            pace.wait += _NEW * (max(1.0, seconds / max(sum(mine.values()), 1e-9)) - pace.wait)

    def _weights(self) -> list[float]:
        """Return how long each step takes, in multiples of the mean step."""
        works = [work for _, work in filter(None, self._steps)]
        mean = statistics.fmean(works)
        return [0.0 if step is None else self._pace.weights.get(step, step[1] / mean) for step in self._steps]

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds that this attempt has spent computing, by stage."""
        return {stage: seconds for stage, (_, _, seconds) in self.times.items() if seconds}
