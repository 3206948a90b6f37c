"""The errors of a request in the pipeline. All of them survive the way through Serve."""

from wan_tpu.errors import WanTpuError


class PipelineError(WanTpuError):
    """Base class of the errors that this package raises on purpose."""


class RequestFailed(PipelineError):
    """The request can't be made; other requests aren't affected.

    Attributes:
        code: "invalid": the request doesn't fit the model; "unhealthy": a stage produced NaN; "error": a stage raised
            another error wherever it was tried; "lost": slices that ran the request were lost repeatedly.
        elsewhere: Whether to try another slice, as when a file is missing on one of them.
        replica: Serve's name for the leader that failed it, once that is known.
    """

    def __init__(self, message: str, code: str, *, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.code, self.elsewhere = code, elsewhere
        self.replica: str | None = None
        self.exit_code = 2 if code == "invalid" else 1

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.code), self.__dict__


class PipelineExists(PipelineError):
    """There is already a pipeline of that name."""

    exit_code = 2


class PipelineNotFound(PipelineError):
    """The pipeline doesn't exist, or this command may not use it."""

    exit_code = 2


class PipelineStartFailed(PipelineError):
    """A pool can't be started; the message says which and why."""


class StageInterrupted(PipelineError):
    """A stage has ended without its result, for no fault of the request; it must be done again, usually elsewhere.

    Raised itself when the slice, its leader or the driver is gone, or when something that the stage needs can't be
    reached or has been replaced. The subclasses say which other reason there is; with some, nothing is lost.
    """

    replica: str | None = None  # Serve's name for the leader to avoid, once that is known.


class StageFailed(StageInterrupted):
    """A stage raised an error that no request is known to cause, or its devices failed; it is tried again.

    Other slices show whether the request or the slice is to blame: a sick slice fails every request, and a bad request
    fails on every slice.
    """


class MachineFailed(StageFailed):
    """A host of the slice can't do its part, as when its disk is full. No request is to blame, even if all slices fail.

    As with its base class, a slice that fails every request is replaced.
    """


class StageMoved(StageInterrupted):
    """A replica is about to end, and nothing is lost: the stage goes on elsewhere."""


class StageQueuedTooLong(StageMoved):
    """A request has waited `patience_s` for a place on a slice; it is queued again, maybe at a free replica."""


class InputLost(PipelineError):
    """An object that a stage needs is gone; it must be computed again."""
