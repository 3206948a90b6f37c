"""Encode the sound of a file in another format, beside its unchanged frames."""

import threading
from pathlib import Path

from wan_tpu.errors import OutputError
from wan_tpu.media.encoding import AAC
from wan_tpu.media.ffmpeg import run_ffmpeg
from wan_tpu.media.shown import play_sound

_TIMEOUT_S = 600.0  # It takes so long only if a disk or a machine hangs.


def convert_sound(
    video: Path, output: Path, *, layout: str, into: str, rate: int, cancelled: threading.Event | None = None
) -> None:
    """Write a file with the frames of a video, and its sound as AAC that begins with its first frame.

    Args:
        video: The video.
        output: The mp4.
        layout: The layout of its sound.
        into: The layout of the result's sound.
        rate: Samples per second of the result's sound.
        cancelled: Another thread may set this to make the call fail soon.

    Raises:
        OutputError: The result can't be written.
        Unavailable: The machine fails.
    """
    # ffmpeg reads a colon in a relative path as a protocol.
    command = ["-y", "-v", "error", "-i", str(video.absolute()), "-map", "0:V:0", "-map", "0:a:0", "-c:v", "copy"]
    command += ["-af", play_sound(layout, into, rate), *AAC.split(), str(output.absolute())]
    done = run_ffmpeg(command, subject=str(video), timeout_s=_TIMEOUT_S, cancelled=cancelled)
    if done.returncode:
        message = (done.stderr.decode(errors="replace").strip().splitlines() or ["it has no sound"])[-1]
        raise OutputError(f"{video} can't be joined ({message[:200]}); check the disk")
