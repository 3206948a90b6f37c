"""Pictures people look at: clips as rows of frames, with a line of text above each."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from wan_tpu.media.image import to_uint8
from wan_tpu.media.sheet import contact_sheet, frame_label, spread_evenly

from .scenes import FPS

_SHOWN = 9  # frames of 17
_LINE = 28


def save_rows(file: Path, clips: Sequence[np.ndarray], titles: Sequence[str] | None = None) -> None:
    """Draw clips below each other, uint8 or float in [0, 1], [T, H, W, 3]; every other frame is shown."""
    rows = [_row(clip) for clip in clips]
    head = _LINE if titles else 0
    sheet = Image.new("RGB", (max(row.width for row in rows), sum(row.height + head for row in rows)), "white")
    draw = ImageDraw.Draw(sheet)
    y = 0
    for i, row in enumerate(rows):
        if titles:
            draw.text((8, y + 8), titles[i], fill="black", font_size=18)
        sheet.paste(row, (0, y + head))
        y += row.height + head
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)


def _row(clip: np.ndarray) -> Image.Image:
    frames = clip if clip.dtype == np.uint8 else to_uint8(np.clip(clip, 0, 1))
    indices = spread_evenly(len(frames), _SHOWN)
    return contact_sheet(
        [Image.fromarray(frames[i]) for i in indices], [frame_label(i, FPS) for i in indices], columns=_SHOWN
    )
