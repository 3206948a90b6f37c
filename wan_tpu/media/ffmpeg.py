"""Run ffmpeg so that it doesn't outlive whoever waits for it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import imageio_ffmpeg

_LOOK_S = 0.25  # How often to look whether a run is still wanted.
# An ffmpeg that reads or writes a pipe ends soon after the process at its other end. One that reads and writes files
# must be killed by Linux, which does so if the child itself asks for it (1 is PR_SET_PDEATHSIG, and 9 SIGKILL). A small
# program asks for it and then becomes ffmpeg, because code between fork and exec would be unsafe beside JAX's threads.
_END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.stderr.write(error.strerror)
sys.exit(127)
"""
_NOT_STARTED = 127  # ffmpeg itself never exits with this.


def run_ffmpeg(
    arguments: Sequence[str], content: bytes = b"", *, timeout_s: float, cancelled: threading.Event | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run ffmpeg and return its output and messages.

    It is killed if this process or this thread ends, if it takes too long, or once it is cancelled.

    Args:
        arguments: What follows the name of the program.
        content: Its input.
        timeout_s: How long it may take, in seconds.
        cancelled: Another thread may set this.

    Raises:
        OSError: It can't be started.
        subprocess.TimeoutExpired: It took too long.
    """
    command = [imageio_ffmpeg.get_ffmpeg_exe(), *arguments]
    if sys.platform == "linux":
        command = [sys.executable, "-ISc", _END_WITH_PARENT, str(os.getpid()), *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            output, messages = _wait(process, content, time.monotonic() + timeout_s, cancelled or threading.Event())
        except BaseException:
            process.kill()
            raise
    if process.returncode == _NOT_STARTED:
        raise OSError(0, messages.decode(errors="replace"))
    return subprocess.CompletedProcess(command, process.returncode, output, messages)


def _wait(
    process: "subprocess.Popen[bytes]", content: bytes, until: float, cancelled: threading.Event
) -> tuple[bytes, bytes]:
    waiting: bytes | None = content
    while True:
        if cancelled.is_set():
            process.kill()
        try:
            return process.communicate(waiting, timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            waiting = None  # The next call sends the rest.
            if time.monotonic() > until:
                raise
