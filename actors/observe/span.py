"""Spans: the work of a slice, and when it was done. Progress, metrics and timelines are made of them."""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Literal

from actors.pipeline_spec import Chips

SpanKind = Literal["compute", "fetch", "load", "compile", "compiling"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A piece of work of a slice, reported when it has ended."""

    slice: str  # "pool/replica": the slice's pool, and Serve's name for the replica that leads the slice.
    request: str
    stage: str
    # "compute": the chips work on the request; "fetch": its inputs or results travel, during other work; "load":
    # weights are read; "compile": programs are compiled; "compiling": the same, reported while it lasts.
    kind: SpanKind
    # In seconds of `time.time()`, so that spans of several hosts can be compared, as exactly as their clocks agree.
    start_s: float
    seconds: float  # How long it took, by the monotonic clock.
    step: int | None = None  # The number of a denoising step, from 1.
    # The bytes of all objects whose contents have come onto the devices; nobody needs the objects any more.
    nbytes: int | None = None
    pool: str = ""
    chosen: str = ""  # Why the router sent the request to this slice, on the first span of a stage's call.
    chips: Chips = "real"  # "emulated" or "simulated" unless it ran on real chips: every figure and picture says so.

    @property
    def end_s(self) -> float:
        """When it ended, as `start_s` counts."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Start:
    """The moment when something began, by the wall clock and by the monotonic clock."""

    wall_s: float = field(default_factory=lambda: time.time())
    monotonic_s: float = field(default_factory=lambda: time.monotonic())

    @property
    def elapsed_s(self) -> float:
        """Seconds since then; never negative, whatever the wall clock does."""
        return time.monotonic() - self.monotonic_s


def split_compute(span: Span, compile_s: float) -> list[Span]:
    """Return a span of computing, preceded by a span of its own for what was compiled, if anything was.

    Programs are compiled at the beginning of a call, or nearly so.
    """
    if not compile_s:
        return [span]
    compiling = dataclasses.replace(span, kind="compile", seconds=compile_s, step=None)
    return [
        compiling,
        dataclasses.replace(span, start_s=compiling.end_s, seconds=max(0.0, span.seconds - compile_s)),
    ]
