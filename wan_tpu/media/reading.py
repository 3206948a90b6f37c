"""Frames of an input video, read by ffmpeg: pictures that may differ in size."""

import itertools
import signal
import subprocess
from pathlib import Path

import imageio_ffmpeg
from PIL import Image, ImageSequence

from wan_tpu.errors import InvalidRequest, Unavailable
from wan_tpu.media.video import check_ffmpeg
from wan_tpu.media.video_content import VideoContent
from wan_tpu.sources.disk import is_permanent

# Few frames are read, however long the video is: this takes so long only if a disk or a machine hangs.
_TIMEOUT_S = 600.0
_PICTURES = ["-pix_fmt", "rgb24", "-vcodec", "ppm"]
# A machine or its operator ends a process by these signals. Others, such as SIGSEGV, come from a damaged file.
_OUTSIDE_SIGNALS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGXCPU}


def read_frames(video: str | Path | VideoContent, count: int, *, step: int = 1) -> list[Image.Image]:
    """Return a video's first frames, RGB, as `diffusers.utils.load_video` does.

    Pixels in another format are converted to 8-bit RGB by the colour space that the file declares, rotation is applied
    as it declares, and a variable frame rate becomes a constant one. Each picture of a GIF is a frame, however long it
    is shown.

    Args:
        video: The path of the file, or its content.
        count: How many frames.
        step: The difference between valid lengths, to suggest another one if the video has fewer frames.

    Raises:
        InvalidRequest: The file is missing or damaged, or has fewer frames.
        Unavailable: The disk or the machine fails.
        OutputError: There is no ffmpeg.
    """
    check_ffmpeg()
    if _is_gif(video):
        frames = _gif_frames(Path(str(video)), count)
    else:
        frames = _split_pictures(_run_ffmpeg(video, ["-frames:v", str(count), *_PICTURES]))
    if len(frames) < count:
        nearest = max(1, count - -(-(count - len(frames)) // step) * step)
        raise InvalidRequest(
            f"video {video} has {len(frames)} frames, and {count} are asked for; ask for {nearest}", "frames"
        )
    return frames


def count_frames(video: str | Path | VideoContent) -> int:
    """Return how many frames `read_frames` could read from a video; raises what `read_frames` raises."""
    check_ffmpeg()
    if _is_gif(video):
        return len(_gif_frames(Path(str(video))))
    return len(_run_ffmpeg(video, ["-vf", "scale=1:1", "-pix_fmt", "gray", "-vcodec", "rawvideo"]))


def read_ends(video: str | Path | VideoContent, start: int) -> list[Image.Image]:
    """Return a video's first frame, and all frames from number `start` on; raises what `read_frames` raises."""
    check_ffmpeg()
    if _is_gif(video):
        frames = _gif_frames(Path(str(video)))
        return [frames[0], *frames[start:]]
    # Frames are dropped after they are timed: if a filter dropped them earlier, others would be repeated instead.
    left_out = ["-bsf:v", f"noise=amount=0:drop='between(n,1,{start - 1})'"] if start > 1 else []
    frames = _split_pictures(_run_ffmpeg(video, [*_PICTURES, *left_out]))
    return frames if start else [frames[0], *frames]


def _is_gif(video: str | Path | VideoContent) -> bool:
    """Return whether a video is a GIF, by its name; raise an error if the file can't be read."""
    if isinstance(video, VideoContent):
        return False
    _check_readable(Path(video))
    return str(video).endswith(".gif")


def _gif_frames(path: Path, count: int | None = None) -> list[Image.Image]:
    try:
        with Image.open(path, formats=["GIF"]) as pictures:
            return [frame.convert("RGB") for frame in itertools.islice(ImageSequence.Iterator(pictures), count)]
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # An error of the operating system has a number, Pillow's own have none.
        if isinstance(error, OSError) and error.errno is not None:
            raise _explain(error, path) from None
        raise _unreadable(path, str(error)) from None


def _run_ffmpeg(path: str | Path | VideoContent, options: list[str]) -> bytes:
    """Return the frames of a video, at least one, as ffmpeg writes them with the given options."""
    content = path.content if isinstance(path, VideoContent) else None
    place = str(path) if content is None else "-"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", place]
    command += [*options, "-f", "image2pipe", "-"]
    try:
        # Without any input, ffmpeg would read key presses from the terminal.
        process = subprocess.run(command, input=content or b"", capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"video {path} can't be read within {_TIMEOUT_S:.0f} s; check the disk that it lies on, and try again"
        ) from None
    except OSError as error:
        raise Unavailable(f"ffmpeg can't be started ({error.strerror}); make room on this machine") from None
    if process.returncode in _OUTSIDE_SIGNALS:
        name = signal.Signals(-process.returncode).name
        raise Unavailable(f"ffmpeg was killed ({name}) while it read video {path}; check the machine's memory")
    if not process.stdout:
        raise _unreadable(
            path, (process.stderr.decode(errors="replace").strip().splitlines() or ["it has no frames"])[-1]
        )
    return process.stdout


def _split_pictures(pictures: bytes) -> list[Image.Image]:
    """Split concatenated pictures; a truncated one at the end is left out."""
    frames, rest = [], memoryview(pictures)
    while rest:
        # A picture is "P6\n<width> <height>\n255\n" and its pixels.
        kind, size, depth, _ = bytes(rest[:40]).split(b"\n", 3)
        width, height = map(int, size.split())
        start = len(kind) + len(size) + len(depth) + 3
        pixels = rest[start : start + 3 * width * height]
        if len(pixels) < 3 * width * height:
            break
        frames.append(Image.frombytes("RGB", (width, height), bytes(pixels)))
        rest = rest[start + 3 * width * height :]
    return frames


def _check_readable(path: Path) -> None:
    """Raise an error if a file can't be read. ffmpeg would report it only as text."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise _explain(error, path) from None


def _explain(error: OSError, path: Path) -> InvalidRequest | Unavailable:
    """Return the exception that says whose fault an error of the operating system is."""
    reason = str(error.strerror or error)
    if is_permanent(error):
        return _unreadable(path, reason)
    return Unavailable(f"video {path} can't be read now ({reason}); check the disk, and try again")


def _unreadable(path: str | Path | VideoContent, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"video {path} can't be read ({reason[:200]}); give an mp4, or what else ffmpeg reads", "video"
    )
