"""SIGTERM, which `ray job stop` and Kubernetes send, ends a command as Ctrl-C does."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import TypeVar

T = TypeVar("T")

REPEATED_S = 5.0  # Within which a second SIGTERM is the first one, sent again.


class Terminated(KeyboardInterrupt):
    """SIGTERM has ended what was done; `exit_code` is a shell's for it."""

    exit_code = 143


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM end what is done here in good order, with `Terminated`. Signals reach the main thread alone.

    Senders repeat it: within `REPEATED_S` a second one changes nothing, nor does any once this block has ended. Later
    ones, and Ctrl-C, interrupt again: what this process was importing or waiting for may have swallowed the first.

    Ray starts its processes with SIGINT blocked, and a job's driver inherits that (2.60, services.py), so it is
    unblocked here. A shell's `command &` has it ignored, and then SIGTERM alone interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated_s: float | None = None

    def interrupt(*_: object) -> None:
        nonlocal terminated_s
        now = time.monotonic()
        if terminated_s is not None and now - terminated_s < REPEATED_S:
            return
        terminated_s = now
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own, which cancels what runs

    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    afterwards = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        if terminated_s is None and not isinstance(error, Terminated):
            raise
        afterwards = _ignore
        raise Terminated from None
    finally:
        signal.signal(signal.SIGTERM, afterwards)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def run(work: Coroutine[None, None, T]) -> T:
    """Run a coroutine to its end. SIGTERM cancels it as Ctrl-C does; it ends in `Terminated` or `KeyboardInterrupt`.

    It is cancelled where it waits; an exception of a signal's handler would come anywhere, also between a video's being
    there and its being told.
    """

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task.cancelling() or task.cancel())
        return await work

    with ended_as_by_ctrl_c():
        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            raise Terminated from None


def _ignore(*_: object) -> None:
    """Do nothing at a signal. Processes that are started meanwhile don't inherit that, as they would `SIG_IGN`."""
