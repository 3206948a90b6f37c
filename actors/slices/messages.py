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
    """Reported while a method runs."""

    item: str
    done: int
    total: int
    unit: str = ""
    # The most seconds until the next report or the end, if a call may take longer than usual, such as for compiling.
    within_s: float | None = None


class ReportedProgress:
    """Sends progress as reports. It is both a `wan_tpu.progress.Progress` and the `Bar` of one stage."""

    def __init__(self, report: Report, item: str = "", total: int = 0, unit: str = "") -> None:
        self._report, self._item, self._total, self._unit, self._done = report, item, total, unit, 0

    def bar(self, stage: str, total: int, unit: str = "") -> "ReportedProgress":
        return ReportedProgress(self._report, stage, total, unit)

    def step(self, units: int = 1) -> None:
        self._done += units
        self._report(HostProgress(self._item, self._done, self._total, self._unit))

    def close(self) -> None:
        """Do nothing, because the end of the method that reports ends the stage as well."""


@dataclass(frozen=True)
class SliceRequest:
    """A request, as its driver sends it to the slices that run its stages."""

    key: str
    plan: RequestPlan  # The request's plan without the image, which only `encode_image` gets.
    scope: RequestScope  # Where the request's payloads wait between two stages.
    snapshots: str  # The name of the request's snapshots (`actors.slices.snapshots.name_of`).
    priority: int = 0  # A request of higher priority runs between two steps of this one.
    # When the request reached its driver, by `time.time()`. Among requests of equal priority, the earliest goes first.
    arrival_s: float = 0.0
    # Serve's names of the replicas whose slices have failed the request; other replicas are preferred.
    avoid: frozenset[str] = frozenset()
    # The router's reasons for choosing each replica, by Serve's names, filled in while a call is routed.
    choices: Mapping[str, str] = field(default_factory=dict, hash=False)
    fragments: bool = False  # Whether the decoder's stream carries the video's fragments.
    previews: bool = False  # Whether the experts' streams carry pictures of the unfinished video.


@dataclass(frozen=True)
class StageResult:
    """The result of a stage, the last event of its stream."""

    handle: RefHandle
    step: int | None = None
    warnings: tuple[str, ...] = ()  # Warnings for the user, such as that a prompt was cut.
    seconds: float | None = None  # Of an encoded prompt: how long the model finds its video to be, if it says so.


@dataclass(frozen=True)
class InputsTaken:
    """Reports that a stage has its inputs on the devices, so that their payloads aren't needed any more."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class EncodedFragment:
    """A fragment of the mp4 that a decoder is still encoding.

    It is small enough to travel in the stream itself. So a caller that has the stage's result also has all fragments.
    """

    index: int
    content: bytes


@dataclass(frozen=True)
class PreviewPainted:
    """A picture of a video that is being denoised."""

    step: int
    picture: bytes  # The picture, a JPEG of at most a few hundred kB.


@dataclass(frozen=True)
class ChunkDenoised:
    """Reports that a chunk of a video can be decoded, and that the request's scope has the chunk's latents."""

    chunk: int


# The items of a stage's stream.
Event = Span | InputsTaken | EncodedFragment | ChunkDenoised | PreviewPainted | StageResult
