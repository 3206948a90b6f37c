"""What a slice did, told when it has ended: what progress, figures and timelines are made of."""

from dataclasses import dataclass
from typing import Literal

from actors.pipeline_spec import Chips

What = Literal["compute", "fetch", "load", "compile"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One thing that a slice did, told when it has ended.

    what     "compute": the chips work on the request; "fetch": its inputs or results travel, beside other work;
             "load": weights are read; "compile": programs are made
    start_s, end_s   seconds of `time.time()`, so that hosts' spans can be laid side by side (as exact as their clocks)
    step     counts from 1, where the span is one denoising step
    nbytes   of all objects, where inputs have come onto the devices: nobody needs the objects any more
    chips    "emulated" or "simulated" unless it ran on real ones: every figure and picture says so
    """

    slice: str
    request: str
    stage: str
    what: What
    start_s: float
    end_s: float
    step: int | None = None
    nbytes: int | None = None
    pool: str = ""
    chips: Chips = "real"

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s
