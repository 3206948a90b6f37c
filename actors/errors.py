"""What can happen to a request in the pipeline. All of it survives the way through Serve."""

from wan_tpu.errors import WanTpuError


class PipelineError(WanTpuError):
    """Base of what this package raises on purpose."""


class RequestFailed(PipelineError):
    """The request can't be made; others are not touched.

    code       "invalid": it doesn't fit the model; "unhealthy": a stage gave NaN; "error": a stage raised something
               else, wherever it was tried; "lost": slices were lost under it again and again
    elsewhere  whether it may be one slice alone that says so, as of a file that isn't there: another is to be asked
    replica    as of `StageLost`
    """

    def __init__(self, message: str, code: str, *, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.code, self.elsewhere = code, elsewhere
        self.replica: str | None = None
        self.exit_code = 2 if code == "invalid" else 1

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.code), self.__dict__


class PipelineExists(PipelineError):
    """There is a pipeline of that name already."""

    exit_code = 2


class PipelineNotFound(PipelineError):
    """There is no pipeline of that name, or it isn't one that this command may use."""

    exit_code = 2


class PipelineStartFailed(PipelineError):
    """A pool can't be started; the message says which and why."""


class StageLost(PipelineError):
    """A slice or its leader is gone, or can't do its part; the stage is to be done again elsewhere.

    replica  Serve's name for the leader that is to be avoided, once that is known
    """

    replica: str | None = None


class StageFailed(StageLost):
    """A stage raised what no request is known to cause, or its devices failed: done again, until it is the request's.

    Whether request or slice is to blame shows elsewhere: a sick slice fails everybody, a bad request fails everywhere.
    """


class StageMoved(StageLost):
    """A replica is about to leave, and nothing is lost: the stage goes on elsewhere."""


class StageWaited(StageMoved):
    """A request has waited for its turn at a replica for a while, and by now another one may be free."""


class InputLost(PipelineError):
    """An object that a stage was given is gone; it is to be made again."""
