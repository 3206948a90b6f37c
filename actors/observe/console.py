"""Report progress on stderr: one line that is rewritten on a terminal, and a line now and then elsewhere."""

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tqdm import tqdm

from wan_tpu.progress import Bar

TERMINAL_S = 0.5  # Seconds between two updates.
NEWS_S, SILENCE_S = 2.0, 10.0  # Without a terminal, lines come at most, and at least, this often.


class LiveConsole:
    """A context manager that shows `look`, or the last text of `tell`, on stderr, with the seconds since its start.

    It is a `Progress`, too: its bar counts requests, and shows the time left. Warnings of this package become lines.
    """

    def __init__(self) -> None:
        self.look: Callable[[], str] | None = None
        self._doing = ""
        self._bar: _LiveBar | None = None
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._text, self._shown_s = "", self._start
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="live")
        self._warnings = _Warnings(self)

    def tell(self, text: str) -> None:
        """Show a text from now on."""
        self._doing = text

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock, _unless_stderr_fails():
            self._wipe()
            print(f"{self._format_elapsed()} {text}", file=sys.stderr, flush=True)
            self._shown_s = time.monotonic()

    def bar(self, stage: str, total: int, unit: str = "") -> Bar:
        """Start to count; `actors.batch.run` reports a step whenever a request has ended."""
        self._bar = _LiveBar(self, stage, total)
        return self._bar

    def __enter__(self) -> Self:
        self._thread.start()
        logging.getLogger("actors").addHandler(self._warnings)
        logging.getLogger("actors").propagate = False
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        logging.getLogger("actors").removeHandler(self._warnings)
        logging.getLogger("actors").propagate = True
        self._ended.set()
        self._thread.join()
        with self._lock, _unless_stderr_fails():
            self._wipe()

    def _run(self) -> None:
        while not self._ended.wait(TERMINAL_S):
            self._show()

    def _show(self) -> None:
        text = self._doing
        if self.look is not None:
            with contextlib.suppress(Exception):  # Other code reports a lost connection; here only less is shown.
                text = self.look()
        if self._bar is not None:
            text = " · ".join(part for part in (self._bar.render(), text) if part)
        with self._lock, _unless_stderr_fails():
            silent = time.monotonic() - self._shown_s
            if self._terminal:
                width = shutil.get_terminal_size().columns - 1
                sys.stderr.write(f"\r\x1b[2K{f'{self._format_elapsed()} {text}'[:width]}")
                sys.stderr.flush()
            elif text and (silent > SILENCE_S or (silent > NEWS_S and text != self._text)):
                print(f"{self._format_elapsed()} {text}", file=sys.stderr, flush=True)
                self._text, self._shown_s = text, time.monotonic()

    def _wipe(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\x1b[2K")

    def _format_elapsed(self) -> str:
        return f"{time.monotonic() - self._start:5.0f} s "


def _unless_stderr_fails() -> contextlib.suppress:
    """Go on where stderr can't be written: the terminal is gone, or the disk of its log is full."""
    return contextlib.suppress(OSError, ValueError)


class _Warnings(logging.Handler):
    def __init__(self, live: LiveConsole) -> None:
        super().__init__(logging.WARNING)
        self._live = live

    def emit(self, record: logging.LogRecord) -> None:
        self._live.print_line(record.getMessage())


class _LiveBar:
    def __init__(self, live: LiveConsole, stage: str, total: int) -> None:
        self._live, self._stage, self._total, self._done = live, stage, total, 0
        self._start = time.monotonic()

    def step(self, units: int = 1) -> None:
        self._done += units

    def close(self) -> None:
        self._live._bar = None

    def render(self) -> str:
        """Return the bar: "batch 3/10 [###.......], 00:40 left"."""
        template = f"{self._stage} {{n}}/{{total}} [{{bar:10}}], {{remaining}} left"
        return tqdm.format_meter(
            self._done, self._total, time.monotonic() - self._start, ascii=".#", bar_format=template
        )
