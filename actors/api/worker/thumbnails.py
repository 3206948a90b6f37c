"""Make the thumbnail, sprite sheet and last frame of a finished video, for which all of it is decoded."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from wan_tpu.errors import InvalidRequest, WanTpuError
from wan_tpu.media.reading import open_video, read_frame
from wan_tpu.media.sheet import WIDEST, fill_rows, grid
from wan_tpu.media.shown import Fit

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
    fit = Fit(max(2, round(height * wide / width)), wide, slack=max(height, width))
    indices = fill_rows(frames, SHEET_FRAMES)
    select = "+".join(f"eq(n,{index})" for index in indices)
    try:
        with open_video(video, timeout_s=_TIMEOUT_S) as shown:
            pictures = shown.read_pictures(select=select, fit=fit)
    except InvalidRequest as error:  # It is about a client's file, and this one is the engine's.
        raise BrokenVideo(str(error)) from error
    if len(pictures) != len(indices):
        raise BrokenVideo(f"the video has {len(pictures)} of its pictures instead of {len(indices)}")
    return pictures


def _encode(picture: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()
