"""What a slice did, told when it has ended: what progress, figures and timelines are made of."""

import time
from dataclasses import dataclass, field
from typing import Literal

from actors.pipeline_spec import Chips

What = Literal["compute", "fetch", "load", "compile"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One thing that a slice did, told when it has ended.

    what     "compute": the chips work on the request; "fetch": its inputs or results travel, beside other work;
             "load": weights are read; "compile": programs are made
    start_s  seconds of `time.time()`, so that hosts' spans can be laid side by side (as exact as their clocks)
    seconds  how long it took, by a clock that nobody sets
    step     counts from 1, where the span is one denoising step
    nbytes   of all objects, where inputs have come onto the devices: nobody needs the objects any more
    chips    "emulated" or "simulated" unless it ran on real ones: every figure and picture says so
    """

    slice: str
    request: str
    stage: str
    what: What
    start_s: float
    seconds: float
    step: int | None = None
    nbytes: int | None = None
    pool: str = ""
    chips: Chips = "real"

    @property
    def end_s(self) -> float:
        """When it ended, as `start_s` counts."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Start:
    """When something began, by the clock on the wall and by one that nobody sets."""

    wall_s: float = field(default_factory=lambda: time.time())
    monotonic_s: float = field(default_factory=lambda: time.monotonic())

    @property
    def elapsed_s(self) -> float:
        """Seconds since then; never negative, whatever the clock on the wall does."""
        return time.monotonic() - self.monotonic_s
