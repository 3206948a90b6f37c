"""Show how long work goes on: a bar with ETA on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Protocol

from tqdm import tqdm


class Bar(Protocol):
    """The progress of one stage."""

    def step(self) -> None:
        """One more unit of work is done."""

    def close(self) -> None:
        """The stage ended, well or not."""


class Silent:
    """Shows nothing, as progress and as its bars: the default of the Python interface."""

    def bar(self, stage: str, total: int) -> Bar:
        """Start a stage of `total` units."""
        return self

    def step(self) -> None:
        """Count a unit of work that nobody sees."""

    def close(self) -> None:
        """End a stage that nobody sees."""


class Console:
    """Shows each stage on stderr; `unit` is the word for what is counted."""

    def __init__(self, unit: str = "step") -> None:
        self._unit = unit

    def bar(self, stage: str, total: int) -> Bar:
        """Start a stage of `total` units."""
        return _TerminalBar(stage, total, self._unit) if sys.stderr.isatty() else _LineBar(stage, total)


class Progress(Protocol):
    """What shows, or passes on, how far the stages are."""

    def bar(self, stage: str, total: int) -> Bar:
        """Start a stage of `total` units."""


class _TerminalBar:
    def __init__(self, stage: str, total: int, unit: str) -> None:
        self._bar = tqdm(total=total, desc=f"{stage:<13}", unit=unit, dynamic_ncols=True)

    def step(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class _LineBar:
    """A line at the start, at every tenth, and at the end: at most a dozen for any length."""

    def __init__(self, stage: str, total: int) -> None:
        self._stage, self._total, self._done = stage, total, 0
        self._start = time.perf_counter()
        self._say("started")

    def step(self) -> None:
        before = self._done * 10 // self._total
        self._done += 1
        if self._done < self._total and self._done * 10 // self._total > before:
            left = (time.perf_counter() - self._start) / self._done * (self._total - self._done)
            self._say(f"ETA {left:.0f} s")

    def close(self) -> None:
        self._say(f"{time.perf_counter() - self._start:.1f} s")

    def _say(self, what: str) -> None:
        print(f"{self._stage}: {self._done}/{self._total}, {what}", file=sys.stderr, flush=True)
