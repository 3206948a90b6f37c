"""SIGTERM, which `ray job stop` and Kubernetes send, ends a command as Ctrl-C does."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import TypeVar

T = TypeVar("T")

REPEATED_S = 5.0  # A second SIGTERM within this time is taken for the first one, sent again.


class Terminated(KeyboardInterrupt):
    """SIGTERM has ended a command; `exit_code` is the one that shells use for it."""

    exit_code = 143


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block in good order, with `Terminated`. Signals reach the main thread only.

    Senders repeat the signal: within `REPEATED_S` a second one changes nothing, nor does any once this block has ended.
    Later ones, and Ctrl-C, interrupt again, because whatever this process was importing or waiting for may have
    swallowed the first.

    Ray starts its processes with SIGINT blocked, and a job's driver inherits that (2.60, services.py), so it is
    unblocked here. A shell starts `command &` with SIGINT ignored, and then only SIGTERM interrupts.
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
        signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own, which cancels the running task.

    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
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
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run(work: Coroutine[None, None, T]) -> T:
    """Run a coroutine to its end. SIGTERM cancels it as Ctrl-C does; it ends in `Terminated` or `KeyboardInterrupt`.

    It is cancelled where it waits. An exception of a signal handler could come anywhere, even after a video is finished
    and before that is reported.
    """

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task.cancelling() or task.cancel())
        return await work

    with end_on_sigterm():
        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            raise Terminated from None


def _ignore(*_: object) -> None:
    """Do nothing at a signal. Unlike `SIG_IGN`, child processes that are started meanwhile don't inherit this."""
