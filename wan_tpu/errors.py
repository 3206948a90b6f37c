"""The exceptions of this package: one small tree, every message one line with its remedy.

A type says whose fault it is: `InvalidRequest` blames the request, other `InvalidInput` what this process was started
with, `Unavailable` something outside that others share, and everything else this program or the machine it runs on.
"""


class WanTpuError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 1


class InvalidInput(WanTpuError):
    """Something the caller gave can't be used; the message says what would be accepted."""

    exit_code = 2


class InvalidRequest(InvalidInput):
    """A field of a request is out of range, or doesn't fit the model; `field` is its name, where it is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class DoesNotFit(InvalidRequest):
    """The compiler or a device refused a program for memory.

    needed_bytes, device_bytes  what it needs on a device, and what a device has, where the refusal says so
    """

    def __init__(self, message: str, needed_bytes: int | None = None, device_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.device_bytes = device_bytes


class CompileFailed(WanTpuError):
    """The compiler refused a program for another reason than memory: it would refuse it everywhere."""


class CheckpointError(InvalidInput):
    """A checkpoint is missing, damaged, incomplete, or of a family this package doesn't know."""


class MeshError(InvalidInput):
    """The device mesh doesn't fit the devices, or the model doesn't divide over it."""


class OutputError(WanTpuError):
    """A result can't be written where it was asked for, or with the ffmpeg that is there."""

    exit_code = 2


class Unavailable(WanTpuError):
    """A bucket, a hub or a shared disk doesn't answer now. The same call may succeed later: nobody's input is wrong."""


class UnhealthyResult(WanTpuError):
    """A stage computed NaN or Inf, or the video came out as one single colour."""
