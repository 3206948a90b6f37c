"""`wan-tpu generate` without a prompt, on a pseudo-terminal as a person uses it, and with prompts from a pipe."""

import io
import json
import os
import re
import select
import subprocess
import sys
import termios

import psutil
import pytest

from tests.conftest import PHOTO, ROOT
from tests.waiting import SECONDS
from wan_tpu import cli
from wan_tpu.commands.generate import generate

# The terminal becomes the one that this process is controlled by, so that typing Ctrl-C interrupts it.
ON_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from actors.cli import entry; entry()"
MODEL = ["--model", str(ROOT / "examples" / "small-wan2.2-i2v"), "--dtype", "float32"]
# Unoptimised, as programs are in tests, the first fit of previews' colours would take a minute.
SMALL = ["--image", str(PHOTO), "--size", "48x32", "--frames", "5", "--steps", "2", "--previews", "off"]
CTRL_C, CTRL_D = "\x03", "\x04"
PROMPT = "prompt> "


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, arguments, **variables):
        self._mine, its = os.openpty()
        termios.tcsetwinsize(its, (24, 100))
        environment = os.environ | {"TERM": "dumb"} | variables
        command = [sys.executable, "-c", ON_TERMINAL, *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=its, stdout=its, stderr=its, start_new_session=True
        )
        os.close(its)
        self._seen = ""

    def type(self, text):
        os.write(self._mine, text.encode())

    def wait_for(self, pattern):
        """Return what it has printed since the last call, up to the end of the first match of the pattern."""
        while (match := re.search(pattern, self._seen)) is None:
            assert select.select([self._mine], [], [], SECONDS)[0], f"no {pattern!r} in {SECONDS} s: {self._seen}"
            try:
                self._seen += os.read(self._mine, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended without {pattern!r}: {self._seen}") from None
        text, self._seen = self._seen[: match.end()], self._seen[match.end() :]
        return text

    def ask(self, line):
        """Type a line, and return everything until the next prompt."""
        self.type(f"{line}\n")
        self.wait_for(re.escape(line))  # The terminal's echo.
        return self.wait_for(PROMPT)

    def cpu_s(self):
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._mine)


@pytest.mark.thorough
@pytest.mark.long
def test_session_on_a_terminal(tmp_path):
    terminal = Terminal(
        ["generate", *MODEL, *SMALL, "--output", str(tmp_path / "ball.mp4")], XDG_STATE_HOME=str(tmp_path / "state")
    )
    try:
        terminal.wait_for(PROMPT)
        for wrong, hint in (
            ("!seed x", "whole number"),
            ("!sed 3", "seed"),
            ("!preset fast", "preset"),
            ("!again", ""),
        ):
            assert "error: " in (answer := terminal.ask(wrong)) and hint in answer
        assert "seed 3" in terminal.ask("!seed 3")
        assert "ball-1.mp4" in terminal.ask("a red ball")

        terminal.ask("!steps 900")
        before = terminal.cpu_s()
        terminal.type("a blue ball\n")
        terminal.wait_for("denoise_high")  # The bar of the steps.
        assert terminal.cpu_s() - before < 1
        terminal.type(CTRL_C)
        assert "interrupted" in terminal.wait_for(PROMPT)
        assert sorted(file.name for file in tmp_path.glob("*ball*")) == [
            "ball-1.json",
            "ball-1.mp4",
            "ball-1.sheet.png",
        ]

        terminal.ask("!steps 2")
        assert "ball-2.mp4" in terminal.ask("!again")
        terminal.type(CTRL_C)  # It ends the line, not the session.
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()
    records = [json.loads((tmp_path / f"ball-{number}.json").read_text()) for number in (1, 2)]
    assert [(record["request"]["prompt"], record["request"]["seed"]) for record in records] == [
        ("a red ball", 3),
        ("a blue ball", 4),
    ]
    assert records[1]["video"]["compile_s"] == records[1]["video"]["load_s"] == 0  # Weights and programs were kept.
    history = (tmp_path / "state" / "wan-tpu" / "history").read_text().splitlines()
    assert history[-4:] == ["!steps 900", "a blue ball", "!steps 2", "!again"]


def test_session_reads_lines_of_a_pipe_until_one_is_wrong(checkpoint, tmp_path, monkeypatch):
    command = ["--model", str(checkpoint("wan2.1-t2v-1.3b")), "--dtype", "float32", "--size", "48x32", "--frames", "5"]
    command += ["--steps", "1", "--guidance_scale", "1", "--previews", "off", "--output", str(tmp_path / "x.mp4")]
    for lines, code, made in (("", 2, 0), ("a ball\n\n!frames 6\na ball\n", 2, 1)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert cli.run(generate, command) == code
        assert len(list(tmp_path.glob("*.mp4"))) == made


def test_options_that_may_be_repeated_are_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"!reference image:{PHOTO}\n"))
    assert cli.run(generate, [*MODEL, *SMALL, "--output", str(tmp_path / "x.mp4")]) == 2
    assert "minimax-h3" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("!reference\n!lora\n!quit\na ball\n"))
    assert cli.run(generate, [*MODEL, *SMALL, "--output", str(tmp_path / "x.mp4")]) == 0
    assert not list(tmp_path.glob("*.mp4"))
