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
    arguments: Sequence[str],
    *,
    timeout_s: float,
    cancelled: threading.Event | None = None,
    descriptors: Sequence[int] = (),
) -> "subprocess.CompletedProcess[bytes]":
    """Run ffmpeg and return its output and messages.

    It is killed if this process or this thread ends, if it takes too long, or once it is cancelled.

    Args:
        arguments: What follows the name of the program.
        timeout_s: How long it may take, in seconds.
        cancelled: Another thread may set this.
        descriptors: Open files that it may use.

    Raises:
        OSError: It can't be started.
        subprocess.TimeoutExpired: It took too long.
    """
    command = [imageio_ffmpeg.get_ffmpeg_exe(), *arguments]
    if sys.platform == "linux":
        command = [sys.executable, "-ISc", _END_WITH_PARENT, str(os.getpid()), *command]
    pipe = subprocess.PIPE
    # With a terminal as its input, ffmpeg would read key presses.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, pass_fds=descriptors) as process:
        try:
            output, messages = _wait(process, time.monotonic() + timeout_s, cancelled or threading.Event())
        except BaseException:
            process.kill()
            raise
    if process.returncode == _NOT_STARTED:
        raise OSError(0, messages.decode(errors="replace"))
    return subprocess.CompletedProcess(command, process.returncode, output, messages)


def _wait(process: "subprocess.Popen[bytes]", until: float, cancelled: threading.Event) -> tuple[bytes, bytes]:
    while True:
        if cancelled.is_set():
            process.kill()
        try:
            return process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise
