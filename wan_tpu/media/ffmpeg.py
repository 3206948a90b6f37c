"""Run ffmpeg so that it doesn't outlive whoever waits for it."""

import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO

import imageio_ffmpeg

_READ_BYTES = 2**16
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


def stream_ffmpeg(arguments: Sequence[str], *, silence_s: float) -> "Iterator[bytes]":
    """Run ffmpeg and yield its output as it comes, so that little of it is in memory.

    It is killed once the iterator is closed, or if it writes nothing for too long. The caller may take its time.

    Args:
        arguments: What follows the name of the program.
        silence_s: How long it may write nothing while the caller waits, in seconds.

    Raises:
        OSError: It can't be started.
        subprocess.TimeoutExpired: It wrote nothing for too long.
        subprocess.CalledProcessError: It failed; `stderr` is the end of its messages.
    """
    command, pipe = [imageio_ffmpeg.get_ffmpeg_exe(), *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            messages = b""
            for source, data in _read_both(process.stdout, process.stderr, command, silence_s):
                if source is process.stdout:
                    yield data
                else:
                    messages = (messages + data)[-_READ_BYTES:]
            process.wait(silence_s)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=messages)


def _read_both(
    output: IO[bytes], messages: IO[bytes], command: Sequence[str], silence_s: float
) -> Iterator[tuple[IO[bytes], bytes]]:
    """Yield what comes from two pipes until both are closed, and from which."""
    with selectors.DefaultSelector() as selector:
        for pipe in (output, messages):
            selector.register(pipe, selectors.EVENT_READ, pipe)
        while selector.get_map():
            ready = selector.select(silence_s)
            if not ready:
                raise subprocess.TimeoutExpired(command, silence_s)
            for key, _ in ready:
                if data := os.read(key.fd, _READ_BYTES):
                    yield key.data, data
                else:
                    selector.unregister(key.data)


def _wait(process: "subprocess.Popen[bytes]", until: float, cancelled: threading.Event) -> tuple[bytes, bytes]:
    while True:
        if cancelled.is_set():
            process.kill()
        try:
            return process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise
