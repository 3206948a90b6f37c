"""`wan-tpu submit` follows a job over connections that break: only the job's state says how it ended."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from actors.cli import main
from actors.commands import submit
from tests.actors.jobs_server import JOB, JobsServer
from tests.conftest import ROOT
from tests.waiting import wait_for


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(submit, "POLL_S", 0.02)
    monkeypatch.setattr(submit, "LONGEST_PAUSE_S", 0.1)
    server = JobsServer()
    yield server
    server.end()


class Following(threading.Thread):
    """Runs the command beside the test."""

    def __init__(self, server, *argv):
        super().__init__(daemon=True)
        self._argv, self.code = ["submit", "--address", server.address, *argv], None
        self.start()

    def run(self):
        self.code = main(self._argv)

    def wait_for_code(self):
        self.join(30)
        assert not self.is_alive()
        return self.code


def test_a_log_is_shown_once_however_often_its_connection_breaks(server, capfd):
    server.log = "first\n"
    following = Following(server, "--attach", JOB)
    for number in range(3):
        wait_for(lambda number=number: server.tails > number, "the follower")
        server.cut()
        server.log += f"line {number}\n"
    wait_for(lambda: server.tails > 3, "the follower")
    server.status, server.exit_code = "FAILED", 1
    assert following.wait_for_code() == 1
    out, err = capfd.readouterr()
    assert out == "first\nline 0\nline 1\nline 2\n"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("status", "exit_code", "code"), [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("STOPPED", None, 130)]
)
def test_the_job_s_end_decides_the_exit_code_after_an_outage(server, capfd, status, exit_code, code):
    server.log = "first\n"
    following = Following(server, "--attach", JOB)
    wait_for(lambda: server.tails, "the follower")
    server.close()
    time.sleep(0.2)
    server.log += "last\n"
    server.status, server.exit_code = status, exit_code
    server.open()
    assert following.wait_for_code() == code
    out, err = capfd.readouterr()
    assert out == "first\nlast\n"
    assert err.count("the job continues, and this command tries to reconnect") == 1
    assert "reconnected" in err


def test_a_follower_that_gives_up_says_how_to_attach_again(server, capfd, monkeypatch):
    monkeypatch.setattr(submit, "GIVE_UP_S", 0.2)
    following = Following(server, "--attach", JOB)
    wait_for(lambda: server.tails, "the follower")
    server.close()
    assert following.wait_for_code() == 3
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: no answer from {server.address} (")
    assert f"wan-tpu submit --attach {JOB}; to stop it: wan-tpu submit --stop {JOB}" in last


def test_a_connection_that_is_silent_is_made_again(server, capfd, monkeypatch):
    """As one behind a machine that has gone: nothing comes, not even its end."""
    monkeypatch.setattr(submit, "SILENCE_S", 0.1)
    following = Following(server, "--attach", JOB)
    wait_for(lambda: server.tails > 2, "the third connection")
    server.log, server.status = "all is well\n", "SUCCEEDED"
    assert following.wait_for_code() == 0
    assert capfd.readouterr().out == "all is well\n"


def test_questions_that_are_never_answered_are_given_up(server, capfd, monkeypatch):
    monkeypatch.setattr(submit, "ANSWER_S", 0.1)
    monkeypatch.setattr(submit, "SILENCE_S", 0.1)
    monkeypatch.setattr(submit, "GIVE_UP_S", 0.3)
    server.silent = True
    assert Following(server, "--attach", JOB).wait_for_code() == 3
    assert "0.3 s" in capfd.readouterr().err


@pytest.mark.parametrize("argv", [["--attach", "nobody"], ["--stop", "nobody"]])
def test_a_job_that_is_not_known_is_said(server, capfd, argv):
    assert Following(server, *argv).wait_for_code() == 2
    assert JOB in capfd.readouterr().err


def test_a_job_is_stopped(server, capfd):
    assert Following(server, "--stop", JOB).wait_for_code() == 0
    assert capfd.readouterr().out == f"job {JOB}: stopped\n"


def test_ctrl_c_during_an_outage_leaves_the_job(server):
    command = [sys.executable, "-m", "actors.cli", "submit", "--address", server.address, "--attach", JOB]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    wait_for(lambda: server.tails, "the follower")
    server.close()
    assert "tries to reconnect" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    assert f"--attach {JOB}" in err
