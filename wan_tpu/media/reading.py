"""Frames of a video that is given: read by ffmpeg, as pictures with a size of their own."""

import subprocess
from pathlib import Path

import imageio_ffmpeg
from PIL import Image

from wan_tpu.errors import InvalidRequest

_LONGEST_S = 600.0  # until a video must be read


def read_frames(path: str | Path, count: int) -> list[Image.Image]:
    """Return a video's first frames, RGB; raises `InvalidRequest` when it can't be read or has fewer."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-nostdin", "-i", str(path)]
    command += ["-frames:v", str(count), "-f", "image2pipe", "-vcodec", "ppm", "-"]
    try:
        made = subprocess.run(command, capture_output=True, timeout=_LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidRequest(
            f"video {path} takes more than {_LONGEST_S:.0f} s to read; cut it first", "video"
        ) from None
    frames, rest = [], memoryview(made.stdout)
    while rest:
        # "P6\n<width> <height>\n255\n", and the pixels
        kind, size, depth, _ = bytes(rest[:40]).split(b"\n", 3)
        width, height = map(int, size.split())
        start = len(kind) + len(size) + len(depth) + 3
        pixels = rest[start : start + 3 * width * height]
        if len(pixels) < 3 * width * height:
            break
        frames.append(Image.frombytes("RGB", (width, height), bytes(pixels)))
        rest = rest[start + 3 * width * height :]
    if not frames:
        reason = (made.stderr.decode(errors="replace").strip().splitlines() or ["it has no frames"])[-1]
        raise InvalidRequest(
            f"video {path} can't be read ({reason[:200]}); give an mp4, or what else ffmpeg reads", "video"
        )
    if len(frames) < count:
        nearest = max(1, (len(frames) - 1) // 4 * 4 + 1)
        raise InvalidRequest(
            f"video {path} has {len(frames)} frames, and {count} are asked for; ask for {nearest}", "frames"
        )
    return frames
