"""Make the thumbnail, sprite sheet and last frame of a finished video, for which all of it is decoded."""

import io
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from PIL import Image

from wan_tpu.errors import InvalidRequest, Unavailable, WanTpuError
from wan_tpu.media.encoding import EXACT
from wan_tpu.media.reading import read_frame
from wan_tpu.media.sheet import WIDEST, fill_rows, grid

SHEET_FRAMES = 12
_TIMEOUT_S = 300.0


class BrokenVideo(WanTpuError):
    """The mp4 can't be decoded."""


def make_thumbnails(video: Path, *, height: int, width: int, frames: int) -> dict[str, bytes]:
    """Return the thumbnail (WebP) and the sheet (JPEG) of a video, by variant; raises `BrokenVideo`, `Unavailable`."""
    pictures = _decode_pictures(video, height=height, width=width, frames=frames)
    sheet = _encode(grid(pictures), "JPEG", quality=85)
    return {"thumbnail": _encode(pictures[0], "WEBP", quality=80), "spritesheet": sheet}


def encode_last_frame(pixels: np.ndarray) -> bytes:
    """Return a frame, uint8 [H, W, 3], as a PNG, from which another video can continue."""
    return _encode(Image.fromarray(pixels), "PNG", compress_level=1)


def read_last_frame(video: Path, frames: int) -> bytes:
    """Return the last of a video's `frames` frames as a PNG; raises `BrokenVideo`, `Unavailable`."""
    try:
        return _encode(read_frame(video, frames - 1), "PNG", compress_level=1)
    except InvalidRequest as error:  # It is about a client's file, and this one is the engine's.
        raise BrokenVideo(f"frame {frames}, its last one, can't be decoded") from error


def _decode_pictures(video: Path, *, height: int, width: int, frames: int) -> list[Image.Image]:
    wide = min(WIDEST, width)
    tall = max(2, round(height * wide / width))
    indices = fill_rows(frames, SHEET_FRAMES)
    select = "+".join(f"eq(n,{index})" for index in indices)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-threads", "1", "-i", str(video)]
    filters = f"select='{select}',scale={wide}:{tall}:flags=bicubic+{EXACT},format=rgb24"
    command += ["-vf", filters, "-fps_mode", "passthrough", "-f", "rawvideo", "-"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"this machine can't decode a video within {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise Unavailable(f"this machine can't start ffmpeg now ({error.strerror})") from None
    if done.returncode < 0:
        raise Unavailable(f"ffmpeg was ended by signal {-done.returncode}; is this machine out of memory?")
    size = wide * tall * 3
    expected = len(indices)
    if done.returncode or len(done.stdout) != expected * size:
        messages = done.stderr.decode(errors="replace").strip().splitlines() or ["it ends early"]
        raise BrokenVideo(
            f"the video has {len(done.stdout) / size:g} frames instead of {expected} ({messages[-1][:200]})"
        )
    return [
        Image.frombytes("RGB", (wide, tall), done.stdout[start : start + size])
        for start in range(0, len(done.stdout), size)
    ]


def _encode(picture: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()
