"""Run a command so that it ends with one line and an exit code. `actors.cli` has the table of commands."""

import _thread
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from wan_tpu.chip_files import NO_TPU, chip_files
from wan_tpu.errors import WanTpuError

# These variables keep libraries from printing messages that mean nothing to a user. Libraries read them when they are
# imported or first used.
QUIET = {
    "DIFFUSERS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "GRPC_VERBOSITY": "NONE",  # gRPC raises its failures anyway, and prints a line for every new process.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
_GOOGLE = "0x1ae0"  # Google's number as a vendor of PCI devices.


def run(
    command: Callable[[Sequence[str]], int | None],
    argv: Sequence[str] | None = None,
    *,
    expected: tuple[type[Exception], ...] = (),
) -> int:
    """Run a command; turn the errors that it raises on purpose into one line on stderr and an exit code.

    Args:
        argv: Its arguments, by default those of this process.
        expected: Exceptions, in addition to `WanTpuError`, that it raises on purpose.

    Returns:
        The exit code: 2 for bad input; an exception's `exit_code`, 1 without one.
    """
    known: tuple[type[Exception], ...] = (WanTpuError, *expected)
    _quiet_libraries()
    warnings.filterwarnings("always", module="wan_tpu|actors")  # Show every video's warnings, even repeated ones.
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    sys.unraisablehook = _keep_interrupt
    try:
        return command(sys.argv[1:] if argv is None else argv) or 0
    except known as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except BrokenPipeError:  # Whoever reads the output has seen enough, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # What is left would raise again at the end.
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        return getattr(interrupt, "exit_code", 130)
    except Exception as error:
        if not _follows_interrupt(error):
            raise
        print("interrupted", file=sys.stderr)
        return 130


def _follows_interrupt(error: BaseException) -> bool:
    """Return whether an exception was raised in response to Ctrl-C, as imports of some packages do."""
    before = error.__cause__ or error.__context__
    return before is not None and (isinstance(before, KeyboardInterrupt) or _follows_interrupt(before))


def _quiet_libraries() -> None:
    # If libtpu is installed, JAX queries it; it then looks for a TPU VM's description and prints ten lines of errors.
    settings = QUIET if "JAX_PLATFORMS" in os.environ or _has_tpu() else QUIET | NO_TPU
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _has_tpu() -> bool:
    """Return whether this machine may have a TPU, judging by its PCI devices, as JAX does, or by its device files."""
    if chip_files():
        return True
    try:
        return any(file.read_text().strip() == _GOOGLE for file in Path("/sys/bus/pci/devices").glob("*/vendor"))
    except OSError:
        return True  # It can't be determined, so nothing is changed.


def _keep_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Raise Ctrl-C again where Python would drop it: in a callback of the garbage collector, such as JAX's."""
    if unraisable.exc_type is KeyboardInterrupt:
        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(unraisable)
