"""What can happen to a request in the pipeline. All of it survives the way through Serve."""

from wan_tpu.errors import WanTpuError


class PipelineError(WanTpuError):
    """Base of what this room raises on purpose."""


class RequestFailed(PipelineError):
    """The request can't be made; others are not touched.

    code  "invalid": it doesn't fit the model; "unhealthy": a stage gave NaN; "error": a stage raised something else;
          "lost": slices were lost under it again and again
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
        self.exit_code = 2 if code == "invalid" else 1

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.code)


class PipelineStartFailed(PipelineError):
    """A pool has no replica that works; the message has what its leader said."""


class PipelineFull(PipelineError):
    """There is no room for one more request; try again later."""


class StageLost(PipelineError):
    """A slice or its leader is gone; the stage is to be done again elsewhere."""


class StageMoved(StageLost):
    """A replica is about to leave, and nothing is lost: the stage goes on elsewhere."""


class InputLost(PipelineError):
    """An object that a stage was given is gone; it is to be made again."""
