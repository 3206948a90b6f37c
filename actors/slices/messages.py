"""What crosses between a driver, the leader of a slice and its hosts: small picklable values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.observe.span import Span
from actors.slices.references import RefHandle, RequestScope
from wan_tpu.plan import RequestPlan

Report = Callable[[Any], object]


@dataclass(frozen=True)
class HostProgress:
    """Reported while a method runs: `done` of `total` units; `item` is the stage, component or program at hand.

    within_s  until the next one or the end, where that is longer than such a call may take otherwise: it compiles
    """

    item: str
    done: int
    total: int
    unit: str = ""
    within_s: float | None = None


class ReportedProgress:
    """Reports what it is told: a `wan_tpu.progress.Progress`, and the `Bar` of one stage."""

    def __init__(self, report: Report, item: str = "", total: int = 0, unit: str = "") -> None:
        self._report, self._item, self._total, self._unit, self._done = report, item, total, unit, 0

    def bar(self, stage: str, total: int, unit: str = "") -> "ReportedProgress":
        """Start a stage of `total` units."""
        return ReportedProgress(self._report, stage, total, unit)

    def step(self, units: int = 1) -> None:
        """Report so many more units."""
        self._done += units
        self._report(HostProgress(self._item, self._done, self._total, self._unit))

    def close(self) -> None:
        """Do nothing: the method that reports ends, too."""


@dataclass(frozen=True)
class SliceRequest:
    """A request, as its driver sends it to the slices that it passes.

    key        the caller's name for it
    plan       the image left out: only `encode_image` is given it
    scope      where its payloads wait between two stages
    snapshots  the name of its snapshots (`actors.slices.snapshots.name_of`)
    priority   one of a higher one runs between two steps of this one
    came_s     when it came to its driver, `time.time()`: of equal priority, who came first goes first
    avoid      leaders, by Serve's names for replicas, whose slices have failed it: others are taken where there are any
    """

    key: str
    plan: RequestPlan
    scope: RequestScope
    snapshots: str
    priority: int = 0
    came_s: float = 0.0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StageResult:
    """What a stage has made, the last event of its stream.

    step  how many denoising steps are done; warnings  for whoever asked for the video
    """

    handle: RefHandle
    step: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputsTaken:
    """A stage has its inputs on the devices: nobody needs their payloads any more.

    seconds, nbytes  what bringing them there took, and how large they were
    """

    seconds: float
    nbytes: int


Event = Span | InputsTaken | StageResult  # of a stage's stream
