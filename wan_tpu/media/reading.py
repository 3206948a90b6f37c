"""Read the frames of an input video that this program's user trusts, as `ShownVideo` shows them."""

import contextlib
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from wan_tpu.errors import InvalidRequest, Unavailable
from wan_tpu.media.encoding import exact_rate
from wan_tpu.media.ffmpeg import run_ffmpeg
from wan_tpu.media.shown import ShownVideo
from wan_tpu.media.video import check_ffmpeg
from wan_tpu.media.video_content import VideoContent
from wan_tpu.sources.disk import is_permanent

# Few frames are read, however long the video is: this takes so long only if a disk or a machine hangs.
_TIMEOUT_S = 600.0
_REMEDY = "give an mp4, or what else ffmpeg reads"
# A machine or its operator ends a process by these signals. Others, such as SIGSEGV, come from a damaged file.
_OUTSIDE_SIGNALS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGXCPU}


def read_frames(video: str | Path | VideoContent, count: int, *, step: int = 1) -> list[Image.Image]:
    """Return a video's first frames, RGB, at the rate of the file.

    Args:
        video: The path of the file, or its content.
        count: How many frames.
        step: The difference between valid lengths, to suggest another one if the video has fewer frames.

    Raises:
        InvalidRequest: The file is missing or damaged, or has fewer frames.
        Unavailable: The disk or the machine fails.
        OutputError: There is no ffmpeg.
    """
    with open_video(video) as shown:
        frames = shown.read_pictures(count=count)
    if len(frames) < count:
        nearest = max(1, count - -(-(count - len(frames)) // step) * step)
        raise InvalidRequest(
            f"video {video} has {len(frames)} frames, and {count} are asked for; ask for {nearest}", "frames"
        )
    return frames


def read_frame(video: str | Path | VideoContent, index: int) -> Image.Image:
    """Return one frame of a video, RGB, at the rate of the file; raises what `read_frames` raises."""
    with open_video(video) as shown:
        frames = shown.read_pictures(select=f"eq(n,{index})", count=1)
    if not frames:
        raise InvalidRequest(f"video {video} has no frame {index}; save it again", "video")
    return frames[0]


def count_frames(video: str | Path | VideoContent, fps: float) -> int:
    """Return how many frames a video has at a rate; raises what `read_frames` raises."""
    with open_video(video) as shown:
        return shown.count_frames(exact_rate(fps))


def read_ends(video: str | Path | VideoContent, start: int, fps: float) -> list[Image.Image]:
    """Return a video's first frame, and all frames from number `start` on, at a rate; raises as `read_frames`."""
    with open_video(video) as shown:
        frames = shown.read_pictures(rate=exact_rate(fps), select=f"eq(n,0)+gte(n,{start})")
    return frames if start else [frames[0], *frames]


@contextlib.contextmanager
def open_video(
    video: str | Path | VideoContent, *, timeout_s: float = _TIMEOUT_S, cancelled: threading.Event | None = None
) -> Iterator[ShownVideo]:
    """Open a video, of which nothing is decoded after the block.

    Args:
        video: The path of the file, or its content.
        timeout_s: How long each run of ffmpeg may take, in seconds.
        cancelled: Another thread may set this to make the block fail soon.

    Raises:
        InvalidRequest: It can't be read, also within the block.
        Unavailable: The disk or the machine fails, also within the block.
        OutputError: There is no ffmpeg.
    """
    check_ffmpeg()
    name, descriptors = f"video {video}", []
    with contextlib.ExitStack() as opened:
        if isinstance(video, VideoContent):
            # ffmpeg couldn't go back in a pipe, but many files end with their index.
            try:
                file = opened.enter_context(tempfile.TemporaryFile())
                file.write(video.content)
                file.flush()
            except OSError as error:
                raise Unavailable(
                    f"can't write a video to {tempfile.gettempdir()} ({error.strerror}); make room there"
                ) from None
            descriptors, source = [file.fileno()], ["-fd", str(file.fileno()), "-i", "fd:"]
        else:
            _check_readable(Path(video))
            # ffmpeg reads a colon in a relative path as a protocol.
            source = ["-i", str(Path(video).absolute())]

        def run(options: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
            if descriptors:
                file.seek(0)
            command = ["-y", "-nostdin", *source, *options]
            try:
                done = run_ffmpeg(command, timeout_s=timeout_s, cancelled=cancelled, descriptors=descriptors)
            except subprocess.TimeoutExpired:
                raise Unavailable(
                    f"{name} can't be read within {timeout_s:.0f} s; check the disk that it lies on, and try again"
                ) from None
            except OSError as error:
                raise Unavailable(f"ffmpeg can't be started ({error.strerror}); make room on this machine") from None
            if done.returncode in _OUTSIDE_SIGNALS:
                ended_by = signal.Signals(-done.returncode).name
                raise Unavailable(f"ffmpeg was killed ({ended_by}) while it read {name}; check the machine's memory")
            return done

        yield ShownVideo(run, name, _REMEDY)


def _check_readable(path: Path) -> None:
    """Raise an error if a file can't be read. ffmpeg would report it only as text."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        reason = str(error.strerror or error)
        if is_permanent(error):
            raise InvalidRequest(f"video {path} can't be read ({reason}); {_REMEDY}", "video") from None
        raise Unavailable(f"video {path} can't be read now ({reason}); check the disk, and try again") from None
