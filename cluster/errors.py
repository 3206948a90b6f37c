"""The exceptions of this package, in one small tree. Every message says what was given and what would work."""


class ClusterError(Exception):
    """Base of everything that this package raises on purpose; a command returns `exit_code`."""

    exit_code = 1


class UnknownSlice(ClusterError, ValueError):
    """No such kind of slice exists; the message names the nearest."""

    exit_code = 2


class LayoutError(ClusterError, ValueError):
    """A layout can't be used; the message names file, pool and remedy."""

    exit_code = 2


class ClusterNotFound(ClusterError):
    """No cluster was found at an address or in a folder, or its state can't be trusted or read."""

    exit_code = 2


class ClusterStartFailed(ClusterError):
    """An emulated cluster or one of its hosts didn't start."""


class PortTaken(ClusterError):
    """A port can't be listened on; the message says which process holds it, and which port is free."""

    exit_code = 2


class SliceError(ClusterError):
    """Base of the errors of a slice."""


class SliceStartTimeout(SliceError):
    """A slice didn't start in time; the message says in which phase, and which host was missing."""


class SliceLost(SliceError):
    """A host died, hung or left the lockstep, so the slice must be built anew; the message names the host."""


class ChipsBusy(SliceError):
    """JAX can't open the chips of a TPU host, because another process still holds them."""


class WrongHost(SliceError):
    """A host doesn't match its labels, or lacks something that JAX needs; the message says what."""


class OtherHostGone(SliceError):
    """JAX can't start on a host because another host of its slice has failed or isn't there."""


class DeviceFailed(SliceLost):
    """A chip, its runtime or an exchange between chips failed in a call, so the slice is gone."""


class CallFailed(SliceError):
    """Every host raised in the same call, or one of them outside the lockstep; the slice lives on.

    The cause is the exception of the host to blame.
    """


class PriceError(ClusterError, ValueError):
    """A table of prices can't be used, or lacks the price asked for; the message lists what it has."""

    exit_code = 2


class NoCapacity(ClusterError, ValueError):
    """No layout meets a demand; the message says which comes nearest."""

    exit_code = 2
