"""Read the frames of an input video that this program's user trusts, as `ShownVideo` shows them."""

import contextlib
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from wan_tpu.errors import InvalidRequest, Unavailable
from wan_tpu.media.encoding import exact_rate
from wan_tpu.media.ffmpeg import run_ffmpeg
from wan_tpu.media.shown import Fit, Run, ShownVideo, decode_sound
from wan_tpu.media.video import check_ffmpeg
from wan_tpu.media.video_content import VideoContent
from wan_tpu.sources.disk import is_permanent

# Few frames are read, however long the video is: this takes so long only if a disk or a machine hangs.
_TIMEOUT_S = 600.0
_SAMPLES = re.compile(rb"Audio: pcm_f32le, (\d+) Hz, (mono|stereo)")
_REMEDY = "give an mp4, or what else ffmpeg reads"
_SOUND_REMEDY = "give a wav, or what else ffmpeg reads"


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
    """Return the picture with which a video goes on after a frame: see `ShownVideo.read_end`.

    It raises what `read_frames` raises.
    """
    with open_video(video) as shown:
        frame = shown.read_end(index)
    if frame is None:
        raise InvalidRequest(f"video {video} has no frame {index}; save it again", "video")
    return frame


def count_frames(video: str | Path | VideoContent, fps: float) -> int:
    """Return how many frames a video has at a rate; raises what `read_frames` raises."""
    with open_video(video) as shown:
        return shown.count_frames(exact_rate(fps))


def read_ends(video: str | Path | VideoContent, start: int, fps: float) -> list[Image.Image]:
    """Return a video's first frame, and all frames from number `start` on, at a rate; raises as `read_frames`."""
    with open_video(video) as shown:
        frames = shown.read_pictures(rate=exact_rate(fps), select=f"eq(n,0)+gte(n,{start})")
    return frames if start else [frames[0], *frames]


def read_clip(video: str | Path | VideoContent, *, fps: float, height: int, width: int, count: int) -> np.ndarray:
    """Return a video's first frames at a rate and in a size, uint8 [T, H, W, 3]; raises as `read_frames`.

    Frames of another size are resized without being cropped, by ffmpeg with Lanczos' kernel.
    """
    fit = Fit(height, width, slack=max(height, width))
    with open_video(video) as shown:
        frames = shown.read_pictures(rate=exact_rate(fps), count=count, fit=fit)
    return np.stack([np.asarray(frame) for frame in frames])


def read_ending(
    video: str | Path | VideoContent, *, fps: float, count: int
) -> tuple[np.ndarray, tuple[np.ndarray, int] | None]:
    """Return a video's last frames at a rate, uint8 [T, H, W, 3], and what `read_sound` returns from there on.

    There are fewer frames than `count` if the video has fewer, and no sound if it has none or if it ends before them.
    It raises as `read_frames`.
    """
    rate = exact_rate(fps)
    with open_video(video) as shown:
        start = max(0, shown.count_frames(rate) - count)
        frames = shown.read_pictures(rate=rate, select=f"gte(n,{start})")
        has_sound = shown.has_sound
    sound = read_sound(video, count / fps, start=start / fps) if has_sound else None
    if sound is not None and not sound[0].size:
        sound = None
    return np.stack([np.asarray(frame) for frame in frames]), sound


def read_sound(source: str | Path | VideoContent, seconds: float, *, start: float = 0) -> tuple[np.ndarray, int]:
    """Return a file's sound of some seconds, float32 [1 or 2, samples], and its samples per second.

    Sound of more than two channels is mixed into two. Sound that begins after the frames is silent until then.

    Args:
        source: The path of the file, or its content.
        seconds: How much of it.
        start: Where it begins, in seconds; there are no samples if the file's end before that.

    Raises:
        InvalidRequest: The file is missing or damaged, or has no sound.
        Unavailable: The disk or the machine fails.
        OutputError: There is no ffmpeg.
    """
    part = [*(["-ss", f"{start:.6f}"] if start else []), "-t", f"{seconds + 1:g}"]
    with _open(source, "sound") as run:
        target = [*part, "-c:a", "pcm_f32le", "-f", "f32le", "-"]
        done = decode_sound(run, f"the sound of {source}", _SOUND_REMEDY, target, least=0 if start else 1)
    format_ = _SAMPLES.search(done.stderr)
    assert format_ is not None
    rate, channels = int(format_[1]), 1 if format_[2] == b"mono" else 2
    samples = np.frombuffer(done.stdout, "<f4").reshape(-1, channels).T
    return np.ascontiguousarray(samples[:, : int(seconds * rate)]), rate


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
    with _open(video, "video", timeout_s=timeout_s, cancelled=cancelled) as run:
        yield ShownVideo(run, f"video {video}", _REMEDY)


@contextlib.contextmanager
def _open(
    video: str | Path | VideoContent,
    kind: str,
    *,
    timeout_s: float = _TIMEOUT_S,
    cancelled: threading.Event | None = None,
) -> Iterator[Run]:
    """Yield a function that runs ffmpeg on a file."""
    check_ffmpeg()
    name, descriptors = f"{kind} {video}", []
    with contextlib.ExitStack() as opened:
        if isinstance(video, VideoContent):
            # ffmpeg couldn't go back in a pipe, but many files end with their index.
            try:
                file = opened.enter_context(tempfile.TemporaryFile())
                file.write(video.content)
                file.flush()
            except OSError as error:
                raise Unavailable(
                    f"can't write a {kind} to {tempfile.gettempdir()} ({error.strerror}); make room there"
                ) from None
            descriptors, source = [file.fileno()], ["-fd", str(file.fileno()), "-i", "fd:"]
        else:
            _check_readable(Path(video), kind)
            # ffmpeg reads a colon in a relative path as a protocol.
            source = ["-i", str(Path(video).absolute())]

        def run(options: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
            if descriptors:
                file.seek(0)
            command = ["-y", "-nostdin", *source, *options]
            return run_ffmpeg(command, subject=name, timeout_s=timeout_s, cancelled=cancelled, descriptors=descriptors)

        yield run


def _check_readable(path: Path, kind: str) -> None:
    """Raise an error if a file can't be read. ffmpeg would report it only as text."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        reason = str(error.strerror or error)
        if is_permanent(error):
            raise InvalidRequest(f"{kind} {path} can't be read ({reason}); {_REMEDY}", kind) from None
        raise Unavailable(f"{kind} {path} can't be read now ({reason}); check the disk, and try again") from None
