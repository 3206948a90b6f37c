"""Imports that take seconds: JAX, PyTorch and the models' code."""

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """Run a block of imports, which Ctrl-C ends even where one of them swallows the exception or raises another.

    What it imports stays for good, so no garbage is collected meanwhile.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        with _heed_interrupts():
            yield
    finally:
        if is_collecting:
            gc.enable()


@contextlib.contextmanager
def _heed_interrupts() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    is_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        if is_interrupted and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if is_interrupted:
        raise KeyboardInterrupt
