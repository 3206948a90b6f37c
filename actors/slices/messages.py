"""What crosses between a driver, the leader of a slice and its workers: small picklable values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.observe.timeline import Span

Report = Callable[[Any], object]


@dataclass(frozen=True)
class WorkerProgress:
    """Reported while a method runs: `done` of `total` units; `item` is the stage, component or program at hand."""

    item: str
    done: int
    total: int


class ReportedProgress:
    """Reports what it is told: a `wan_tpu.progress.Progress`, and the `Bar` of one stage."""

    def __init__(self, report: Report, item: str = "", total: int = 0) -> None:
        self._report, self._item, self._total, self._done = report, item, total, 0

    def bar(self, stage: str, total: int) -> "ReportedProgress":
        """Start a stage of `total` units."""
        return ReportedProgress(self._report, stage, total)

    def step(self) -> None:
        """Report one more unit."""
        self._done += 1
        self._report(WorkerProgress(self._item, self._done, self._total))

    def close(self) -> None:
        """Do nothing: the method that reports ends, too."""


@dataclass(frozen=True)
class RefHandle:
    """Stands for a payload that waits for its next stage, in streams that must not carry references.

    key  never given twice, so that a store which was restarted, and has lost all, finds nothing under it
    """

    key: str


@dataclass(frozen=True)
class Prepared:
    """A request's inputs are on the devices: nobody needs the objects any more.

    seconds  that it took from the object store to the devices; nbytes  of all objects
    """

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class StageResult:
    """What a stage has made, the last event of its stream.

    step  how many denoising steps are done; warnings  for whoever asked for the video
    """

    handle: RefHandle
    step: int | None = None
    warnings: tuple[str, ...] = ()


Event = Span | Prepared | StageResult  # of a stage's stream
