"""SIGTERM, which `ray job stop` and Kubernetes send, ends a command as Ctrl-C does."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import TypeVar

T = TypeVar("T")


class Terminated(KeyboardInterrupt):
    """SIGTERM has ended what was done; `exit_code` is a shell's for it."""

    exit_code = 143


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM end what is done here in good order, with `Terminated`. Only in the main thread.

    From then on SIGTERM changes nothing more, here and in what ends after this: senders repeat it. Ctrl-C still does.

    Ray starts its processes with SIGINT blocked, and a job's driver inherits that (2.60, services.py), so it is
    unblocked here. A shell's `command &` has it ignored, and then SIGTERM alone interrupts.
    """
    terminated = False

    def interrupt(*_: object) -> None:
        nonlocal terminated
        if terminated:
            return
        terminated = True
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own, which cancels what runs

    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        terminated = terminated or isinstance(error, Terminated)
        if terminated:
            raise Terminated from None
        raise
    finally:
        # A function, not SIG_IGN, which processes that are started now would inherit.
        signal.signal(signal.SIGTERM, (lambda *_: None) if terminated else previous)
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
