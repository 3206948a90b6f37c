"""Contact sheets: frames of a video in rows, as one picture."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

WIDEST = 400  # pixels of a frame in a sheet


def evenly(total: int, count: int) -> list[int]:
    """Return the indices of `count` frames of `total`, the first and the last among them; all where there are fewer."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist()


def contact_sheet(frames: Sequence[Image.Image], *, columns: int = 4, gap: int = 4) -> Image.Image:
    """Return frames of one size in rows, no wider than `WIDEST` each, with white gaps of so many pixels around them."""
    width, height = frames[0].size
    scale = min(1.0, WIDEST / width)
    cell = max(1, round(width * scale)), max(1, round(height * scale))
    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    sheet = Image.new("RGB", (columns * (cell[0] + gap) + gap, rows * (cell[1] + gap) + gap), "white")
    for i, frame in enumerate(frames):
        corner = (gap + i % columns * (cell[0] + gap), gap + i // columns * (cell[1] + gap))
        sheet.paste(frame if frame.size == cell else frame.resize(cell, Image.Resampling.LANCZOS), corner)
    return sheet
