"""The exceptions of this package: one small tree. Every message is a single line that includes the remedy.

A type says whose fault it is: `InvalidRequest` blames the request, other `InvalidInput` the arguments of this process,
`Unavailable` something outside that others share, and everything else this program or the machine that it runs on.
"""


class WanTpuError(Exception):
    """The base of all exceptions that this package raises on purpose."""

    exit_code = 1


class InvalidInput(WanTpuError):
    """The caller's input can't be used; the message says what would be accepted."""

    exit_code = 2


class InvalidRequest(InvalidInput):
    """A request is out of range, or doesn't fit the model; `field` names the field, if it is about a single one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class DoesNotFit(InvalidRequest):
    """The compiler or a device refused a program for lack of memory."""

    def __init__(self, message: str, needed_bytes: int | None = None, device_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes  # The bytes that the program needs on a device, if the refusal states them.
        self.device_bytes = device_bytes  # The bytes that a device has, if the refusal states them.


class CompileFailed(WanTpuError):
    """The compiler refused a program for a reason other than memory, so it would refuse it on every device."""


class CheckpointError(InvalidInput):
    """A checkpoint is missing, damaged, incomplete, or of a family that this package doesn't know."""


class MeshError(InvalidInput):
    """The device mesh doesn't fit the devices, or the model doesn't divide over it."""


class OutputError(WanTpuError):
    """A result can't be written to its destination, or this machine's ffmpeg can't encode it."""

    exit_code = 2


class Unavailable(WanTpuError):
    """A bucket, a hub or a shared disk doesn't answer now. No input is wrong, and the same call may succeed later."""


class UnhealthyResult(WanTpuError):
    """A stage computed NaN or Inf, or the whole video has a single colour."""
