"""Run ffmpeg so that it doesn't outlive whoever waits for it."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import imageio_ffmpeg

from wan_tpu.errors import Unavailable

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
# A machine or its operator ends a process by these signals. Others, such as SIGSEGV, come from a damaged file.
_OUTSIDE_SIGNALS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGXCPU}
# What ffmpeg exits with, and what it and its libraries say, where the machine gives it no memory or no thread. Lines
# that begin with a space describe the file.
_SHORTAGE_EXITS = {256 - errno.EAGAIN, 256 - errno.ENOMEM}
_SHORTAGE = re.compile(
    rb"^\S.*(?:Cannot allocate memory|Resource temporarily unavailable|get_buffer\(\) failed|malloc of size \d+ failed|"
    rb"failed to map segment)|^MemoryError",
    re.M,
)
# x264 says nothing else where it gets no thread. An encoder exits so where it can't take the file's size.
_NO_ENCODER, _WRONG_SIZE = re.compile(rb"^\S.*Error while opening encoder", re.M), 256 - errno.EINVAL


def run_ffmpeg(
    arguments: Sequence[str],
    *,
    subject: str,
    timeout_s: float,
    cancelled: threading.Event | None = None,
    descriptors: Sequence[int] = (),
) -> "subprocess.CompletedProcess[bytes]":
    """Run ffmpeg and return its output and messages.

    It is killed if this process or this thread ends, if it takes too long, or once it is cancelled.

    Args:
        arguments: What follows the name of the program.
        subject: What it works on, in messages.
        timeout_s: How long it may take, in seconds.
        cancelled: Another thread may set this.
        descriptors: Open files that it may use.

    Raises:
        Unavailable: It can't be started, takes too long, or gets too little of this machine.
    """
    command = [imageio_ffmpeg.get_ffmpeg_exe(), *arguments]
    if sys.platform == "linux":
        command = [sys.executable, "-ISc", _END_WITH_PARENT, str(os.getpid()), *command]
    pipe = subprocess.PIPE
    # With a terminal as its input, ffmpeg would read key presses.
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, pass_fds=descriptors
        ) as process:
            try:
                output, messages = _wait(process, time.monotonic() + timeout_s, cancelled or threading.Event())
            except BaseException:
                process.kill()
                raise
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"ffmpeg doesn't finish {subject} within {timeout_s:g} s; check this machine and its disks, and try again"
        ) from None
    except OSError as error:
        raise Unavailable(f"ffmpeg can't be started ({error.strerror}); make room on this machine") from None
    if process.returncode == _NOT_STARTED:
        reason = messages.decode(errors="replace").strip()
        raise Unavailable(f"ffmpeg can't be started ({reason}); make room on this machine")
    if process.returncode in _OUTSIDE_SIGNALS:
        ended_by = signal.Signals(-process.returncode).name
        raise Unavailable(f"ffmpeg was killed ({ended_by}) at {subject}; check this machine's memory")
    # A run that goes on without memory may have written fewer frames.
    no_encoder = _NO_ENCODER.search(messages) and process.returncode != _WRONG_SIZE
    if process.returncode in _SHORTAGE_EXITS or no_encoder or _SHORTAGE.search(messages):
        raise Unavailable(f"ffmpeg gets too little memory or too few threads for {subject}; check this machine")
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
