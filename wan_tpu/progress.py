"""Show progress: on a terminal a bar with the time left, elsewhere plain lines."""

import sys
import threading
import time
from typing import Protocol

from tqdm import tqdm

BYTES = "B"  # The unit of bars that count bytes.
QUIET_S = 2.0  # What takes less isn't shown: small files are read at once, and programs come from a cache.


class Bar(Protocol):
    """The progress of one stage."""

    def step(self, units: int = 1) -> None:
        """Count units of work that are done."""

    def close(self) -> None:
        """End the bar, whether or not its stage succeeded."""


class Silent:
    """Shows nothing, and serves as its own bar. It is the default of the Python interface."""

    def bar(self, stage: str, total: int, unit: str = "") -> Bar:
        return self

    def step(self, units: int = 1) -> None:
        """Count work that nobody sees."""

    def close(self) -> None:
        """End a stage that nobody sees."""


class Console:
    """Shows each stage on stderr; `unit` is the word for the units of work."""

    def __init__(self, unit: str = "step") -> None:
        self._unit = unit

    def bar(self, stage: str, total: int, unit: str = "") -> Bar:
        """Start a stage of `total` units; `unit` is a word for them, or `BYTES`, and overrides the console's."""
        kind = _TerminalBar if sys.stderr.isatty() else _LineBar
        return kind(stage, total, unit or self._unit)


class Progress(Protocol):
    """Shows or forwards the progress of the stages."""

    def bar(self, stage: str, total: int, unit: str = "") -> Bar:
        """Start a stage of `total` units, which are steps unless `unit` is another word, or `BYTES`."""


def say(message: str) -> None:
    """Show what begins now, where there is no bar yet: importing JAX and PyTorch takes seconds."""
    print(message, file=sys.stderr, flush=True)


class CompileNotice:
    """Says which program is being compiled, once that takes longer than `QUIET_S`: on a TPU it may take minutes."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def __call__(self, program: str | None) -> None:
        """Take the name of a program that is compiled from now on, or None when it is compiled."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if program is not None:
            self._timer = threading.Timer(QUIET_S, tqdm.write, (f"compiling {program}",), {"file": sys.stderr})
            self._timer.daemon = True
            self._timer.start()


def format_count(done: int, total: int, unit: str = "") -> str:
    """Format progress in a few characters."""
    if unit != BYTES:
        return f"{done}/{total}"
    scale, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / scale:.1f}/{total / scale:.1f} {name}"


class _TerminalBar:
    def __init__(self, stage: str, total: int, unit: str) -> None:
        settings = {"unit_scale": True, "delay": QUIET_S, "leave": False} if unit == BYTES else {}
        self._bar = tqdm(total=total, desc=f"{stage:<13}", unit=unit, dynamic_ncols=True, **settings)

    def step(self, units: int = 1) -> None:
        self._bar.update(units)

    def close(self) -> None:
        self._bar.close()


class _LineBar:
    """Prints a line at the start, after every tenth of the work, and at the end: at most a dozen in all.

    For bytes it prints none in the first `QUIET_S`.
    """

    def __init__(self, stage: str, total: int, unit: str) -> None:
        self._stage, self._total, self._unit, self._done = stage, total, unit, 0
        self._start = time.perf_counter()
        self._first: tuple[float, int] | None = None  # When the first units were done, and how many these were.
        self._say("started")

    def step(self, units: int = 1) -> None:
        before = self._done * 10 // self._total
        self._done += units
        now = time.perf_counter()
        if self._first is None:  # They may have waited for the compiler, so they say nothing about the others.
            self._first = now, self._done
        if self._done < self._total and self._done * 10 // self._total > before:
            begin, first = self._first
            if self._done > first:
                self._say(f"ETA {(now - begin) / (self._done - first) * (self._total - self._done):.0f} s")
            else:
                self._say(f"{now - self._start:.1f} s")

    def close(self) -> None:
        self._say(f"{time.perf_counter() - self._start:.1f} s")

    def _say(self, message: str) -> None:
        if self._unit == BYTES and time.perf_counter() - self._start < QUIET_S:
            return
        count = format_count(self._done, self._total, self._unit)
        print(f"{self._stage}: {count}, {message}", file=sys.stderr, flush=True)
