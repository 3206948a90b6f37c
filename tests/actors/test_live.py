"""What commands say while they wait."""

import contextlib
import logging
import time

from actors.observe import console as live
from actors.observe.console import LiveConsole


def test_lines_come_with_news_and_never_stop(monkeypatch, capsys):
    monkeypatch.setattr(live, "TERMINAL_S", 0.02)
    monkeypatch.setattr(live, "NEWS_S", 0.05)
    monkeypatch.setattr(live, "SILENCE_S", 0.3)
    with LiveConsole() as console:
        console.tell("reads weights")
        time.sleep(1.0)
        bar = console.bar("batch", 4)
        bar.step()
        console.look = lambda: "cat-1 decoder"
        time.sleep(0.3)
        bar.close()
        logging.getLogger("actors.pipeline.driver").warning("cat-1: a slice was lost")
        console.print_line("done")
    lines = [line.partition(" s  ")[2] for line in capsys.readouterr().err.splitlines()]
    assert 2 <= lines.count("reads weights") <= 5
    assert any(
        line.startswith("batch 1/4 [##........], 00:") and line.endswith("left · cat-1 decoder") for line in lines
    )
    assert lines[-2:] == ["cat-1: a slice was lost", "done"]


def test_work_goes_on_when_its_terminal_is_gone(monkeypatch):
    monkeypatch.setattr(live, "TERMINAL_S", 0.01)
    full = open("/dev/full", "w")  # noqa: SIM115 (every write fails, as on a full disk, and so does closing it)
    monkeypatch.setattr(live.sys, "stderr", full)
    with LiveConsole() as console:
        logging.getLogger("actors.pipeline.driver").warning("cat-1: a slice was lost")
        console.print_line("done")
        monkeypatch.setattr(live, "SILENCE_S", 0.0)
        console.tell("reads weights")
        time.sleep(0.1)
        assert console._thread.is_alive()
    with contextlib.suppress(OSError):
        full.close()
