"""SIGTERM ends a command in good order, once."""

import asyncio
import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys

import pytest

from actors import interrupts
from wan_tpu import cli
from wan_tpu.commands.importing import heavy_imports


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_command_once_with_its_own_exit_code(capsys):
    tidied = []

    def command(argv):
        with interrupts.end_on_sigterm():
            try:
                terminate()
                signal.pause()
            finally:
                terminate()  # A second one doesn't disturb what is tidied up,
                tidied.append("slices")
        tidied.append("never")

    try:
        assert cli.run(command) == 143
    finally:
        terminate()  # nor one that comes while the process ends.
    assert tidied == ["slices"] and capsys.readouterr().err == "interrupted\n"


def test_sigterm_of_an_event_loop_is_the_last_one_for_what_is_around_it():
    async def work():
        terminate()
        await asyncio.sleep(60)

    tidied = []
    with pytest.raises(interrupts.Terminated):
        with interrupts.end_on_sigterm():
            try:
                interrupts.run(work())
            finally:
                terminate()
                tidied.append("pipeline")
    assert tidied == ["pipeline"]


def test_sigterm_interrupts_again_where_the_first_one_was_swallowed(monkeypatch):
    with pytest.raises(interrupts.Terminated):
        with interrupts.end_on_sigterm():
            with contextlib.suppress(KeyboardInterrupt):  # as imports of some packages do
                terminate()
            terminate()  # too soon to be another one
            monkeypatch.setattr(interrupts, "REPEATED_S", 0)
            terminate()
            signal.pause()


@pytest.mark.parametrize("swallow", [contextlib.nullcontext, lambda: contextlib.suppress(KeyboardInterrupt)])
def test_ctrl_c_ends_imports_that_swallow_it(swallow):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        with heavy_imports(), swallow():
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), heavy_imports():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("half imported") from None
    assert signal.getsignal(signal.SIGINT) is before


# Run in an interpreter of its own, in which nothing has imported Ray yet.
INTERRUPTED = """
import signal, sys
{finder}
sys.meta_path.insert(0, Interrupting())
from actors.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Interrupting:
    """A finder of modules that is interrupted where Ray's parts are imported, as an extension module would be."""

    def find_spec(self, name, path=None, target=None):
        if name in ("ray.serve", "ray.job_submission"):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("half imported") from None


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--down", "--address", "127.0.0.1:1"],
        ["submit", "--address", "http://127.0.0.1:1", "--stop", "job"],
    ],
    ids=lambda argv: argv[0],
)
def test_ctrl_c_while_ray_is_imported_ends_a_command_in_one_line(argv, tmp_path):
    program = INTERRUPTED.format(finder=inspect.getsource(Interrupting))
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 130
    lines = done.stderr.splitlines()
    assert [line for line in lines if not re.match(r" *\d+ s ", line)] == ["interrupted"]  # The others are progress.


def test_ctrl_c_is_told_from_sigterm():
    with pytest.raises(KeyboardInterrupt) as interrupt:
        with interrupts.end_on_sigterm():
            signal.raise_signal(signal.SIGINT)
    assert not isinstance(interrupt.value, interrupts.Terminated)
