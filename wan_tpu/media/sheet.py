"""Contact sheets: frames of a video in rows, as one picture."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Width of a frame in a sheet, pixels; thumbnails and previews are at most as wide. Smaller frames are enlarged by a
# whole number, which keeps their pixels sharp.
WIDEST, NARROWEST = 480, 240
COLUMNS = 4
_TEXT = 16  # Pixels of a line's letters.


def spread_evenly(total: int, count: int) -> list[int]:
    """Return the indices of `count` evenly spaced frames of `total`, first and last included, or of all."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()


def fill_rows(total: int, count: int) -> list[int]:
    """Return the indices of at most `count` evenly spaced frames of `total` that leave no cell of a sheet empty."""
    count = min(count, total)
    return spread_evenly(total, count if count < COLUMNS else count - count % COLUMNS)


def frame_label(index: int, fps: float) -> str:
    """Return the text below a frame: its number, from 1, and when it is shown."""
    return f"frame {index + 1}, {index / fps:.2f} s"


def contact_sheet(frames: Sequence[Image.Image], labels: Sequence[str], *, columns: int = COLUMNS) -> Image.Image:
    """Return frames of one size in rows, with a line of text below each, for people."""
    width, height = frames[0].size
    if width < NARROWEST:
        scale = -(-NARROWEST // width)
        cell, resampling = (width * scale, height * scale), Image.Resampling.NEAREST
    else:
        cell = min(width, WIDEST), max(1, round(height * min(1, WIDEST / width)))
        resampling = Image.Resampling.LANCZOS
    line = _TEXT + 6
    sheet = grid([_pad_below(frame.resize(cell, resampling), line) for frame in frames], columns=columns, gap=8)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_TEXT)
    for i, text in enumerate(labels):
        left, top = 8 + i % columns * (cell[0] + 8), 8 + i // columns * (cell[1] + line + 8)
        draw.text((left, top + cell[1] + 3), text, fill="black", font=font)
    return sheet


def grid(frames: Sequence[Image.Image], *, columns: int = COLUMNS, gap: int = 0) -> Image.Image:
    """Return frames of one size in rows, with white gaps of `gap` pixels around them."""
    width, height = frames[0].size
    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), "white")
    for i, frame in enumerate(frames):
        sheet.paste(frame, (gap + i % columns * (width + gap), gap + i // columns * (height + gap)))
    return sheet


def _pad_below(frame: Image.Image, height: int) -> Image.Image:
    """Return a frame with white space of that height below it."""
    padded = Image.new("RGB", (frame.width, frame.height + height), "white")
    padded.paste(frame, (0, 0))
    return padded
