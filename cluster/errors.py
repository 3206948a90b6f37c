"""The exceptions of this package: one small tree; every message says what was given and what would work."""


class ClusterError(Exception):
    """Base of everything this package raises on purpose; `exit_code` is what a command returns."""

    exit_code = 1


class UnknownSlice(ClusterError, ValueError):
    """No such kind of slice; the message names the nearest."""

    exit_code = 2


class LayoutError(ClusterError, ValueError):
    """A layout can't be used; the message names file, pool and remedy."""

    exit_code = 2


class ClusterNotFound(ClusterError):
    """There is no cluster where one was looked for, or already one where one was to be made."""

    exit_code = 2


class ClusterStartFailed(ClusterError):
    """An emulated cluster, or one of its hosts, didn't start."""


class PortTaken(ClusterError):
    """A port can't be listened on; the message says who has it, and which one is free."""

    exit_code = 2


class SliceError(ClusterError):
    """Base of what happens to a slice."""


class SliceStartTimeout(SliceError):
    """A slice didn't start in time; the message says in which phase, and which host was missing."""


class SliceLost(SliceError):
    """The slice is gone: a host died, hung, or left the lockstep; the message says which. Build a new one."""


class ChipsBusy(SliceError):
    """JAX on a TPU host doesn't get the host's chips: another process has them still."""


class WrongHost(SliceError):
    """A host isn't what its labels say, or lacks what JAX needs there; the message says what."""


class OtherHostGone(SliceError):
    """JAX can't start on a host because another host of its slice has failed or isn't there."""


class DeviceFailed(SliceLost):
    """The slice is gone because a chip, its runtime or an exchange between chips failed in a call."""


class CallFailed(SliceError):
    """Every host raised in the same call, or one of them beside the lockstep: the slice lives. The cause is the first
    process's exception.
    """


class PriceError(ClusterError, ValueError):
    """A table of prices can't be used, or lacks what is asked for; the message says what there is."""

    exit_code = 2


class NoCapacity(ClusterError, ValueError):
    """No layout meets a demand; the message says what comes nearest."""

    exit_code = 2
