"""Track a job's progress and cost from the spans of its slices. Percent is weighted by measured seconds."""

from collections.abc import Mapping

from actors.api.estimates import Seconds
from actors.jobs.tables import Job
from actors.jobs.values import Progress
from actors.observe.span import Span
from wan_tpu.plan import DECODER, ENCODER

_NEW = 0.3  # Weight of the latest measurement against earlier ones.
_NEVER_COMPLETE = 99.9


class Tracker:
    """Follows one job through one attempt, and adds its cost to the job."""

    def __init__(
        self, job: Job, pace: Seconds, chips: Mapping[str, int], dollars: Mapping[str, float] | None = None
    ) -> None:
        """Follow a job.

        Args:
            job: The job, whose costs are updated.
            pace: The measured seconds of its size, which are updated.
            chips: Number of chips of a stage's slice, by stage.
            dollars: Price per hour of one of these chips, by stage, where known.
        """
        self._job, self._pace, self._chips, self._dollars = job, pace, chips, dollars or {}
        self._steps = int(job.request["steps"])
        before = job.progress or Progress(stage=ENCODER)
        self._stage, self._step, self._percent = ENCODER, 0, before.percent
        self._decoded, self._is_first_attempt = False, job.attempts <= 1
        # When each stage of this attempt began and ended by its slice's clock, and for how many seconds it computed.
        self.times: dict[str, tuple[float, float, float]] = {}

    def note(self, span: Span) -> None:
        """Add a slice's span."""
        self._stage = span.stage
        first, last, computed = self.times.get(span.stage, (span.start_s, span.end_s, 0.0))
        computed += span.seconds if span.kind == "compute" else 0.0
        self.times[span.stage] = min(first, span.start_s), max(last, span.end_s), computed
        if span.kind != "compute":
            return
        chips, dollars = self._chips.get(span.stage, 1), self._dollars.get(span.stage, 0.0)
        self._job.spend(span.stage, span.seconds, chips, dollars)
        if span.step is not None:
            self._step = max(self._step, span.step)
            self._pace.step += _NEW * (span.seconds - self._pace.step)
            if self._step == self._steps:
                self._stage = DECODER
        elif span.stage == DECODER:
            self._decoded = True

    def estimate(self) -> Progress:
        """Return the progress. Percent never falls, even if lost work is repeated."""
        pace = self._pace
        encoded = self._stage != ENCODER or self._step > 0
        done = pace.encode * encoded + pace.step * self._step + pace.decode * self._decoded
        whole = pace.estimate_alone_s(self._steps)
        self._percent = max(self._percent, min(_NEVER_COMPLETE, 100 * done / max(whole, 1e-9)))
        return Progress(
            stage=self._stage,
            step=self._step,
            steps=self._steps,
            percent=round(self._percent, 2),
            eta_s=round(max(0.0, whole - done) * pace.wait, 1),
        )

    def learn(self, seconds: float) -> None:
        """Learn from the completed job, which took `seconds` from its claim to its end."""
        pace, mine = self._pace, self.stage_seconds
        pace.encode += _NEW * (mine.get(ENCODER, 0.0) - pace.encode)
        pace.decode += _NEW * (mine.get(DECODER, 0.0) - pace.decode)
        if mine and self._is_first_attempt:
            pace.wait += _NEW * (max(1.0, seconds / max(sum(mine.values()), 1e-9)) - pace.wait)

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds that this attempt has computed, by stage."""
        return {stage: computed for stage, (_, _, computed) in self.times.items() if computed}
