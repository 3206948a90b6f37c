"""SIGTERM, which `ray job stop` and Kubernetes send, ends a command as Ctrl-C does."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM end what is done here in good order, with `KeyboardInterrupt`. Only in the main thread.

    Ray starts its processes with SIGINT blocked, and a job's driver inherits that (2.60, services.py), so it is
    unblocked here. A shell's `command &` has it ignored, and then SIGTERM alone interrupts.
    """
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _interrupt(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own, which cancels what runs
