"""Messages between a driver, the leader of a slice and its hosts: small picklable values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.observe.span import Span
from actors.slices.references import RefHandle, RequestScope
from wan_tpu.plan import RequestPlan

Report = Callable[[Any], object]


@dataclass(frozen=True)
class HostProgress:
    """Reported while a method runs.

    Attributes:
        item: The stage, component or program at hand.
        done: Units that are done.
        total: All units.
        unit: The unit, such as "B".
        within_s: Seconds until the next report or the end, where a call may take longer than usual, as to compile.
    """

    item: str
    done: int
    total: int
    unit: str = ""
    within_s: float | None = None


class ReportedProgress:
    """Passes progress on as reports: a `wan_tpu.progress.Progress`, and the `Bar` of one stage."""

    def __init__(self, report: Report, item: str = "", total: int = 0, unit: str = "") -> None:
        self._report, self._item, self._total, self._unit, self._done = report, item, total, unit, 0

    def bar(self, stage: str, total: int, unit: str = "") -> "ReportedProgress":
        """Start a stage of `total` units."""
        return ReportedProgress(self._report, stage, total, unit)

    def step(self, units: int = 1) -> None:
        """Report that more units are done."""
        self._done += units
        self._report(HostProgress(self._item, self._done, self._total, self._unit))

    def close(self) -> None:
        """Do nothing, because the method that reports ends, too."""


@dataclass(frozen=True)
class SliceRequest:
    """A request, as its driver sends it to the slices that it passes.

    Attributes:
        key: The caller's name for it.
        plan: Its plan without the image, which only `encode_image` gets.
        scope: Where its payloads wait between two stages.
        snapshots: The name of its snapshots (`actors.slices.snapshots.name_of`).
        priority: A request of a higher priority runs between two steps of this one.
        came_s: When it came to its driver, in `time.time()`; of equal priority, the first to come goes first.
        avoid: Leaders, by Serve's names for replicas, whose slices have failed it; others are preferred.
        choices: Why the router would choose each replica, by Serve's names, filled in while a call is routed.
        fragments: Whether the decoder's stream carries the video's fragments.
    """

    key: str
    plan: RequestPlan
    scope: RequestScope
    snapshots: str
    priority: int = 0
    came_s: float = 0.0
    avoid: frozenset[str] = frozenset()
    choices: Mapping[str, str] = field(default_factory=dict, hash=False)
    fragments: bool = False


@dataclass(frozen=True)
class StageResult:
    """The result of a stage, the last event of its stream.

    Attributes:
        handle: The result's payload.
        step: How many denoising steps are done.
        warnings: Warnings for the user, such as that a prompt was cut.
    """

    handle: RefHandle
    step: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputsTaken:
    """A stage has its inputs on the devices, so nobody needs their payloads any more.

    Attributes:
        seconds: How long it took to bring them there.
        nbytes: How large they were.
    """

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class EncodedFragment:
    """A fragment of the mp4 that a decoder is still encoding.

    It is small and travels in the stream itself: a caller that has the stage's result has all fragments, too.

    Attributes:
        index: Counts the fragments of this decoding.
        content: Its bytes.
    """

    index: int
    content: bytes


@dataclass(frozen=True)
class ChunkDenoised:
    """A chunk of a video that is denoised chunk after chunk can be decoded; the request's scope has its latents.

    Attributes:
        chunk: Which one, from 0.
    """

    chunk: int


Event = Span | InputsTaken | EncodedFragment | ChunkDenoised | StageResult  # The items of a stage's stream.
