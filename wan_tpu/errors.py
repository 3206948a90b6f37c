"""The exceptions of this package: one small tree, every message one line with its remedy."""


class WanTpuError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 1


class InvalidInput(WanTpuError):
    """Something the caller gave can't be used; the message says what would be accepted."""

    exit_code = 2


class InvalidRequest(InvalidInput):
    """A field of a generation request is out of range, or doesn't fit the model."""


class CheckpointError(InvalidInput):
    """A checkpoint is missing, damaged, incomplete, or of a family this package doesn't know."""


class MeshError(InvalidInput):
    """The device mesh doesn't fit the devices, or the model doesn't divide over it."""


class OutputError(InvalidInput):
    """A result can't be written where it was asked for."""


class UnhealthyResult(WanTpuError):
    """A stage computed NaN or Inf, or the video came out as one single colour."""
