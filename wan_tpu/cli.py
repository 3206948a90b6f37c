"""How every command ends: with one line and an exit code. `actors.cli` has the table of commands."""

import _thread
import sys
import warnings
from collections.abc import Callable, Sequence

from wan_tpu.errors import WanTpuError


def run(
    command: Callable[[Sequence[str]], int | None],
    argv: Sequence[str] | None = None,
    *,
    expected: tuple[type[Exception], ...] = (),
) -> int:
    """Run one command; turn what it raises on purpose into one line on stderr and an exit code (2 for bad input).

    expected  what else it raises on purpose; its `exit_code` is used, 1 without
    """
    known: tuple[type[Exception], ...] = (WanTpuError, *expected)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    sys.unraisablehook = _keep_interrupt
    try:
        return command(sys.argv[1:] if argv is None else argv) or 0
    except known as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        return getattr(interrupt, "exit_code", 130)


def _keep_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Raise Ctrl-C again where Python would drop it: in a callback of the garbage collector, such as JAX's."""
    if unraisable.exc_type is KeyboardInterrupt:
        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(unraisable)
