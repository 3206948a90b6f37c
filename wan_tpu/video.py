"""Write results people look at: an mp4 and a contact sheet, each whole or not at all."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import imageio.v2 as imageio
import imageio_ffmpeg
import numpy as np
from PIL import Image

from wan_tpu.errors import OutputError

CONTACT_SHEET_FRAMES = 12

# imageio-ffmpeg starts ffmpeg with a Python preexec_fn, which forks: unsafe beside JAX's threads. With this it
# doesn't; Ctrl-C then reaches ffmpeg too, which ends it, and its unfinished file is removed below.
os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")


def check_ffmpeg() -> None:
    """Raise `OutputError` when there is no ffmpeg to write H.264 with."""
    try:
        found = shutil.which(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError:
        found = None
    if found is None:
        raise OutputError("ffmpeg is missing: run `pip install imageio-ffmpeg`, or set IMAGEIO_FFMPEG_EXE to its path")


def check_output(path: str | Path, *, overwrite: bool) -> Path:
    """Return `path` if a file can be written there; make its folder when it is missing.

    Raises `OutputError` when the file exists and `overwrite` is false, or the folder can't be written to.
    """
    path = Path(path)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; give the path of a file in it")
    if path.exists() and not overwrite:
        raise OutputError(f"{path} exists; choose another path, or ask for --overwrite (overwrite=True)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.writable")
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"can't write to {path.parent} ({reason}); choose a folder that can be written to") from None
    return path


class VideoWriter:
    """Encode frames as they come: H.264, yuv420p, faststart; a context manager.

    The file appears at `path` when the block ends well; on any exception nothing is left behind.
    """

    def __init__(self, path: str | Path, *, fps: float, overwrite: bool = False) -> None:
        check_ffmpeg()
        self.path = check_output(path, overwrite=overwrite)
        self._overwrite = overwrite
        self._partial = self.path.with_name(f".{self.path.name}.partial.mp4")
        self._encoder = imageio.get_writer(
            self._partial,
            format="FFMPEG",
            fps=fps,
            codec="libx264",
            pixelformat="yuv420p",
            quality=8,
            macro_block_size=1,  # sizes are multiples of 16 already; never let it resize
            output_params=["-movflags", "+faststart"],
        )

    def write(self, frames: Iterable[np.ndarray]) -> None:
        """Append frames, uint8 [T, H, W, 3]."""
        for frame in frames:
            self._encoder.append_data(frame)

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._encoder.close()
            if kind is None:
                _publish(self._partial, self.path, overwrite=self._overwrite)
        finally:
            self._partial.unlink(missing_ok=True)


class ContactSheet:
    """Collect evenly spaced frames of a stream and draw them as one PNG."""

    def __init__(self, total_frames: int) -> None:
        count = min(CONTACT_SHEET_FRAMES, total_frames)
        self._wanted = set(np.linspace(0, total_frames - 1, count).round().astype(int).tolist())
        self._seen = 0
        self._frames: list[np.ndarray] = []

    def add(self, frames: np.ndarray) -> None:
        """Look at the next frames, uint8 [T, H, W, 3], and keep the wanted ones."""
        for frame in frames:
            if self._seen in self._wanted:
                self._frames.append(frame)
            self._seen += 1

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the sheet, at most 4 frames wide and 1,600 pixels; raises `OutputError` as `check_output`."""
        path = check_output(path, overwrite=overwrite)
        height, width, _ = self._frames[0].shape
        scale = min(1.0, 400 / width)
        cell = (round(width * scale), round(height * scale))
        columns = min(4, len(self._frames))
        rows = -(-len(self._frames) // columns)
        gap = 4
        sheet = Image.new("RGB", (columns * (cell[0] + gap) + gap, rows * (cell[1] + gap) + gap), "white")
        for i, frame in enumerate(self._frames):
            corner = (gap + i % columns * (cell[0] + gap), gap + i // columns * (cell[1] + gap))
            sheet.paste(Image.fromarray(frame).resize(cell, Image.Resampling.LANCZOS), corner)
        partial = path.with_name(f".{path.name}.partial.png")
        try:
            sheet.save(partial)
            _publish(partial, path, overwrite=overwrite)
        finally:
            partial.unlink(missing_ok=True)
        return path


def _publish(partial: Path, path: Path, *, overwrite: bool) -> None:
    """Move a finished file into place; not over one that appeared meanwhile unless asked."""
    if path.exists() and not overwrite:
        raise OutputError(f"{path} appeared while it was being made; choose another path")
    os.replace(partial, path)
